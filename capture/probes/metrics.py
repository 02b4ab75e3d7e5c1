"""Metrics that the user records: rows of their own kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.late_rows import LateRows
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.metrics import read_metric
from neuraldbg.capture.pace import Pace
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.series import Kind

_FIRST_RECORDS = 192
"""Values of one metric kept one by one; later ones ever more sparsely, so that a metric of every
step does not fill the log."""


class Metrics(Probe):
    """Rows of kind metric, the metric's name in the place of a layer's."""

    rarely = False

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._rows = LateRows(run.log_rows)
        self._paces: dict[str, Pace] = {}
        self._names: dict[str, Layer] = {}
        self._warned: set[str] = set()
        self._skipped: dict[str, tuple[int, float | Tensor]] = {}

    def record(self, step: int, metrics: Mapping[str, object]) -> None:
        """Take metrics as they are at a step; what is no number becomes one warning a name."""
        taken: dict[str, float | Tensor] = {}
        for name, value in metrics.items():
            if name in self._warned:
                continue
            number = read_metric(name, value)
            if number is None:
                self._warned.add(name)
            elif self._paces.setdefault(name, Pace(_FIRST_RECORDS)).is_due():
                taken[name] = number
                self._skipped.pop(name, None)
            else:
                self._skipped[name] = (step, number)
        self._add(step, taken)
        self._rows.log_ready()

    def frame(self) -> Iterable[Deferred]:
        """Nothing of its own; what lies on an accelerator travels with this step."""
        return self._rows.board()

    def detach(self) -> None:
        """Log the rest, the last value of each metric among it."""
        skipped, self._skipped = self._skipped, {}
        for name, (step, number) in skipped.items():
            self._add(step, {name: number})
        self._rows.log_all()

    def _add(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        if not metrics:
            return
        names = [self._names.setdefault(name, Layer(name, None)) for name in metrics]
        given = list(metrics.values())
        tensors = [value for value in given if isinstance(value, Tensor)]

        def make(arrays: list[np.ndarray]) -> list[Block]:
            arrived = iter(arrays)
            values = [float(next(arrived) if isinstance(v, Tensor) else v) for v in given]
            return [Block(step, Kind.METRIC, names, {"value": np.array(values)})]

        self._rows.add(Deferred(make, tensors))
