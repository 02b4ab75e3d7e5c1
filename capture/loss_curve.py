"""The loss of a run as a curve, and how much of it is noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.series import Kind

_TO_SIGMA = 1.4826
"""From a median absolute deviation to the standard deviation of a normal distribution."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The finite losses of a run with one objective.

    Attributes:
        panel: Where they are from.
        positions: Their rows in the panel.
        values: Shape (positions,), none negative.
        highest: The greatest loss among the steps that each row stands for.
    """

    panel: Panel
    positions: np.ndarray
    values: np.ndarray
    highest: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """The steps of the rows."""
        return np.asarray(self.panel.steps[self.positions])

    def __len__(self) -> int:
        return len(self.values)


def loss_curve(panels: Panels) -> LossCurve | None:
    """The training loss of a run, None where its course says nothing about progress.

    That is so for several optimizers (the losses of generator and discriminator oppose each
    other) and for a loss that changes its sign (policy gradients).
    """
    panel = panels.of(Kind.LOSS)
    if len(panel.layers) != 1 or not len(panel):
        return None
    values = panel["value"][:, 0]
    positions = np.flatnonzero(np.isfinite(values))
    values = values[positions]
    if not len(values) or values.min() < 0 or values.max() <= 0:
        return None
    highest = np.fmax(panel["highest"][positions, 0], values)
    return LossCurve(panel, positions, values, np.where(np.isfinite(highest), highest, values))


def noise_of(values: np.ndarray) -> float:
    """The standard deviation of a curve's noise, from how its second differences scatter.

    These leave out level and slope (as the estimators of Gasser, Sroka and Jennen-Steinmetz,
    Biometrika 73, 1986, do); the median keeps single jumps out.

    Args:
        values: Shape (points,); the noise of fewer than 4 counts as 0.

    Example:
        >>> noise_of(np.linspace(3.0, 1.0, 50)) < 1e-12
        True
        >>> rng = np.random.default_rng(0)
        >>> round(noise_of(np.linspace(3.0, 1.0, 500) + 0.1 * rng.standard_normal(500)), 2)
        0.1
    """
    if len(values) < 4:
        return 0.0
    return float(_TO_SIGMA * np.median(np.abs(np.diff(values, 2))) / np.sqrt(6.0))


def block_medians(values: np.ndarray, blocks: int) -> np.ndarray:
    """Medians of consecutive parts of nearly equal length.

    >>> block_medians(np.arange(9.0), 3).tolist()
    [1.0, 4.0, 7.0]
    """
    parts = np.array_split(values, min(blocks, len(values)))
    return np.array([np.median(part) for part in parts])
