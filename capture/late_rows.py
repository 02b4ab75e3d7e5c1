"""Rows that belong to no captured step and whose numbers may still lie on an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.probe import Deferred

Log = Callable[[Sequence[Block]], None]


class LateRows:
    """Keeps such rows until they can be logged without making a device wait.

    Rows on the host are logged by `log_ready`. Others travel with the next captured step
    (`board`), which brings their tensors along in its one asynchronous copy.

    Args:
        log: Logs blocks with steps of their own.

    Example:
        >>> import torch
        >>> logged = []
        >>> rows = LateRows(logged.extend)
        >>> rows.add(Deferred(lambda arrays: [arrays[0].item()], [torch.tensor(2.0)]))
        >>> rows.log_ready()
        >>> logged
        [2.0]
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: list[Deferred] = []

    def add(self, rows: Deferred) -> None:
        """Keep rows; their tensors are not written to again."""
        self._waiting.append(rows)

    def log_ready(self) -> None:
        """Log what lies on the host."""
        waiting, self._waiting = self._waiting, []
        for rows in waiting:
            if all(tensor.device.type == "cpu" for tensor in rows.tensors):
                self._log(rows.now())
            else:
                self._waiting.append(rows)

    def log_all(self) -> None:
        """Log everything: waits for the device where something lies on one."""
        waiting, self._waiting = self._waiting, []
        for rows in waiting:
            self._log(rows.now())

    def board(self) -> list[Deferred]:
        """All rows, for a captured step to take along; they are logged when they arrive."""
        waiting, self._waiting = self._waiting, []
        return [Deferred(self._logging(rows.make), rows.tensors) for rows in waiting]

    def _logging(
        self, make: Callable[[list[np.ndarray]], Iterable[Block]]
    ) -> Callable[[list[np.ndarray]], Iterable[Block]]:
        def log(arrays: list[np.ndarray]) -> Iterable[Block]:
            self._log(list(make(arrays)))
            return ()  # nothing of them belongs to the captured step itself

        return log
