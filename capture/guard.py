"""Keeping the watcher's own faults out of the training it watches, and counting its time."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec

P = ParamSpec("P")

MAX_FAULTS = 3
"""Faults in one place after which it is no longer called: it would fail on every step."""


class CaptureFaultWarning(UserWarning):
    """NeuralDBG could not observe a part of the run; the training itself is untouched."""


@dataclass(slots=True)
class Guard:
    """Runs callbacks inside a user's training loop so that nothing they raise gets out.

    Each fault is recorded with its step; the first one also becomes a warning. The time spent in
    all callbacks is counted.

    Attributes:
        faults: As (step, message).
        current_step: Gives the step to record a fault with.
    """

    faults: list[tuple[int, str]] = field(default_factory=list)
    current_step: Callable[[], int] = lambda: 0
    _failures: dict[str, int] = field(default_factory=dict)
    _spent: float = 0.0
    _depth: int = 0
    _entered: float = 0.0

    @property
    def seconds(self) -> float:
        """Time spent inside callbacks so far, that of one now running included."""
        return self._spent + (time.perf_counter() - self._entered if self._depth else 0.0)

    @property
    def given_up(self) -> list[str]:
        """Places that failed so often that they are no longer called."""
        return [place for place, count in self._failures.items() if count >= MAX_FAULTS]

    def wrap(self, callback: Callable[P, None], place: str = "") -> Callable[P, None]:
        """The callback, unable to raise.

        Args:
            callback: What to call.
            place: Under which name its faults are counted; its own if left out.

        Example:
            >>> guard = Guard()
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     guard.wrap(lambda: 1 / 0)()
            >>> len(caught), guard.faults[0][1]
            (1, 'ZeroDivisionError: division by zero')
        """
        place = place or getattr(callback, "__qualname__", type(callback).__name__)

        @functools.wraps(callback)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if self._failures and self._failures.get(place, 0) >= MAX_FAULTS:
                return
            if not self._depth:  # callbacks inside callbacks count once
                self._entered = time.perf_counter()
            self._depth += 1
            try:
                callback(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not get out
                self._failures[place] = self._failures.get(place, 0) + 1
                self._record(error)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._spent += time.perf_counter() - self._entered

        return guarded

    def _record(self, error: Exception) -> None:
        first = not self.faults
        self.faults.append((self.current_step(), f"{type(error).__name__}: {error}"))
        if first:
            where = traceback.extract_tb(error.__traceback__)[-1]
            # Warnings turned into errors must not reach the loop either.
            with contextlib.suppress(CaptureFaultWarning):
                warnings.warn(
                    f"NeuralDBG could not observe part of this run ({self.faults[0][1]}, at "
                    f"{where.filename}:{where.lineno}). Training goes on unchanged; what was "
                    "missed counts as not observed.",
                    CaptureFaultWarning,
                    stacklevel=3,
                )
