"""Seeing calls of a function or method without asking the training loop for anything.

The attribute that callers look it up by is replaced while somebody watches, and put back after
the last watcher left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


def _nothing(args: Arguments, kwargs: Keywords) -> None:
    """What a watcher does who is not interested in one side of the call."""


@dataclass(frozen=True, slots=True, eq=False)
class CallWatcher:
    """Two callbacks around each call; neither may raise.

    Attributes:
        before: Called with the arguments.
        after: Called with the arguments when the call has returned; not when it raised.
    """

    before: Callable[[Arguments, Keywords], None] = _nothing
    after: Callable[[Arguments, Keywords], None] = _nothing


class WatchedFunction:
    """A function that can be watched where it is looked up.

    Args:
        owner: The module or class.
        name: Its attribute there.

    Example:
        >>> import math
        >>> seen, square_root = [], WatchedFunction(math, "sqrt")
        >>> stop = square_root.watch(CallWatcher(lambda args, kwargs: seen.append(args)))
        >>> math.sqrt(4.0)
        2.0
        >>> stop()
        >>> math.sqrt(9.0), seen
        (3.0, [(4.0,)])
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._watchers: list[CallWatcher] = []
        self._original: Callable[..., Any] | None = None
        self._stand_in: Callable[..., Any] | None = None

    @property
    def exists(self) -> bool:
        """Whether there is such a function in this version of its library."""
        return callable(getattr(self._owner, self._name, None))

    def watch(self, watcher: CallWatcher) -> Callable[[], None]:
        """Start calling a watcher around every call; returns the function that ends it."""
        self._watchers.append(watcher)
        if self._stand_in is None:
            self._put_in_place()
        return lambda: self._remove(watcher)

    def _put_in_place(self) -> None:
        original = getattr(self._owner, self._name)

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            watchers = tuple(self._watchers)
            for watcher in watchers:
                watcher.before(args, kwargs)
            result = original(*args, **kwargs)
            for watcher in watchers:
                watcher.after(args, kwargs)
            return result

        self._original, self._stand_in = original, stand_in
        setattr(self._owner, self._name, stand_in)

    def _remove(self, watcher: CallWatcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
        # Somebody may have replaced the function after us; theirs must then stay, and this one,
        # which theirs calls, only passes on.
        ours = getattr(self._owner, self._name) is self._stand_in
        if not self._watchers and ours and self._stand_in is not None:
            setattr(self._owner, self._name, self._original)
            self._original = self._stand_in = None


def argument(args: Arguments, kwargs: Keywords, position: int, name: str) -> Any:
    """An argument that may be given by position or by name, None where it is not given.

    >>> argument((1, 2), {}, 1, "b"), argument((1,), {"b": 2}, 1, "b"), argument((), {}, 0, "a")
    (2, 2, None)
    """
    return args[position] if len(args) > position else kwargs.get(name)
