"""A recorder's run, kept on disk while it is recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from neuraldbg.capture.backward_watch import BackwardWatcher, watch_backward
from neuraldbg.capture.optimizer_watch import watch_optimizers
from neuraldbg.capture.ranks import current_rank
from neuraldbg.capture.run_writer import SeriesStreamer, open_run

if TYPE_CHECKING:
    from neuraldbg.capture.recorder import Recorder


class RunStream:
    """Writes what a recorder logs, from `open` to `close`; a second time goes on with the first.

    Args:
        recorder: What to write.
        url: The run's folder.
        overwrite: Replace a run that is there.
    """

    def __init__(
        self, recorder: Recorder, url: str | os.PathLike[str], overwrite: bool = False
    ) -> None:
        self._recorder = recorder
        self._url = url
        self._overwrite = overwrite
        self._began = False
        self._streamer: SeriesStreamer | None = None
        self._stops: list[Callable[[], None]] = []

    def open(self) -> None:
        """Open the folder, before the loop; a second call while it is open changes nothing.

        Raises:
            RunInUseError: another process writes there.
            RunExistsError: the folder holds an earlier run.
            OSError: the folder cannot be made or written to.
            ValueError: the URL's protocol is not known.
            ImportError: the package that serves the protocol is not installed.
        """
        if self._streamer is not None:
            return
        recorder, rank = self._recorder, current_rank()
        sink = open_run(
            self._url,
            rank.number,
            rank.world_size,
            overwrite=self._overwrite,
            resume=self._began,
            thresholds=recorder.thresholds,
            models=[type(model).__qualname__ for model in recorder.models],
            torch=torch.__version__,
            neuraldbg=_own_version(),
        )
        self._began = True
        self._streamer = SeriesStreamer(recorder.log, sink, self._facts)

    def follow(self) -> None:
        """Write now and then while the loop runs: whenever a step has been recorded."""
        if self._stops or self._streamer is None:
            return
        self._stops = [
            # Most loops have both an optimizer and backward calls, some only one of them.
            watch_optimizers(_nothing, self._after_step),
            watch_backward(BackwardWatcher(_nothing, self._after_step)),
        ]

    def _after_step(self, *_: object) -> None:
        streamer = self._streamer
        if streamer is not None and streamer.is_due:
            # A place of its own for each failure: when to give up is the streamer's decision.
            place = f"writing the run, after {streamer.failures} failures"
            self._recorder.guard.wrap(streamer.flush, place)()

    def close(self, error: BaseException | None = None) -> None:
        """Write what is left and end the run on disk; nothing is raised.

        Args:
            error: What ended the loop, if it did not end by itself.
        """
        for stop in self._stops:
            stop()
        self._stops.clear()
        streamer, self._streamer = self._streamer, None
        if streamer is None:
            return
        guard = self._recorder.guard
        told: dict[str, Any] = {"ended_by": None if error is None else type(error).__qualname__}
        guard.wrap(lambda: told.update(coverage=self._coverage()), "coverage")()
        guard.wrap(lambda: streamer.close(**told), "ending the run on disk")()

    def _coverage(self) -> list[dict[Hashable, object]]:
        recorder = self._recorder
        return recorder.coverage(recorder.series()).to_dict("records")

    def _facts(self) -> dict[str, object]:
        recorder = self._recorder
        return {
            "steps": recorder.steps_seen,
            "faults": recorder.guard.faults,
            "cost": recorder.cost,
        }


def _nothing(*_: object) -> None:
    """What there is to do before a step."""


def _own_version() -> str:
    try:
        return version("neuraldbg")
    except PackageNotFoundError:  # run from a copy of the sources
        return ""
