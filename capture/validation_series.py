"""The validation loss of a run: what the user recorded under such a name, else what was seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neuraldbg.capture.metrics import is_validation_loss
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.series import Kind


@dataclass(frozen=True, slots=True)
class ValidationSeries:
    """A loss at several moments of a run, on data that it may not have been trained on.

    Attributes:
        panel: Where it is from.
        positions: Its rows in the panel.
        values: Shape (positions,), finite.
        name: The metric's name, or the loss function's.
    """

    panel: Panel
    positions: np.ndarray
    values: np.ndarray
    name: str

    @property
    def steps(self) -> np.ndarray:
        """The steps of the values: optimizer steps before them."""
        return np.asarray(self.panel.steps[self.positions])


def validation_series(panels: Panels) -> ValidationSeries | None:
    """The longest recorded validation loss, or the loss of evaluations; None without either."""
    metrics = panels.of(Kind.METRIC)
    found = [
        _series(metrics, column, name)
        for column, name in enumerate(metrics.layers)
        if name is not None and is_validation_loss(name)
    ]
    found = [series for series in found if len(series.values)]
    if found:
        return max(found, key=lambda series: len(series.values))
    losses = panels.of(Kind.LOSS, evaluation=True)
    if not losses.layers:
        return None
    series = _series(losses, 0, "")
    names = losses.details[series.positions, 0] if len(series.values) else np.zeros(0)
    return ValidationSeries(losses, series.positions, series.values, _only(names))


def _series(panel: Panel, column: int, name: str) -> ValidationSeries:
    values = panel["value"][:, column]
    positions = np.flatnonzero(np.isfinite(values))
    return ValidationSeries(panel, positions, values[positions], name)


def _only(names: np.ndarray) -> str:
    distinct = {str(name) for name in names if name is not None}
    return distinct.pop() if len(distinct) == 1 else ""
