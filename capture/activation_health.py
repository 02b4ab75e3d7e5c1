"""Silent, dead and saturated units of the sampled activations, over the captured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuraldbg.capture.layers import Layer
from neuraldbg.capture.sampling import MAX_UNITS, Samples
from neuraldbg.capture.statistics import Columns, silent_units

SATURATION_MARGIN = 0.01
"""Distance from a limit, as a share of half the range, within which a value is in the flat tail:
tanh's slope there is below 0.02, the sigmoid's below 0.005."""
_SILENT_FRAMES = 16
"""Captured steps after which a silent unit counts as dead, however small the batches."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation among the samples of a step.

    Attributes:
        layer: The layer it belongs to.
        position: Its row in the samples.
        bounds: Limits of a bounded activation, None for a rectifier.
    """

    layer: Layer
    position: int
    bounds: tuple[float, float] | None


class UnitHistories:
    """For how long each sampled unit of each rectifier has been zero.

    Args:
        dead_samples: Samples in a row after which a unit is dead; see `Thresholds`.
    """

    def __init__(self, dead_samples: int) -> None:
        self._dead_samples = dead_samples
        self._rows: dict[Layer, int] = {}
        self._samples = np.zeros((0, MAX_UNITS), dtype=np.int64)
        self._frames = np.zeros((0, MAX_UNITS), dtype=np.int64)

    def health(self, samples: Samples, activations: Sequence[Activation]) -> Columns:
        """Shares of silent, dead and saturated units or values of each activation.

        Args:
            samples: One step's samples.
            activations: Which of them are activations; units that are silent now are counted on
                from the last call.

        Returns:
            Arrays of shape (activations,), NaN where a share has no meaning.
        """
        names = ("silent_fraction", "dead_fraction", "saturated_fraction")
        columns = {name: np.full(len(activations), np.nan) for name in names}
        rectifiers = [k for k, found in enumerate(activations) if found.bounds is None]
        if rectifiers:
            chosen = [activations[k] for k in rectifiers]
            silent, dead = self._silent_and_dead(samples, chosen)
            columns["silent_fraction"][rectifiers] = silent
            columns["dead_fraction"][rectifiers] = dead
        for k, found in enumerate(activations):
            if found.bounds is not None:
                sample = samples.matrix(found.position)
                columns["saturated_fraction"][k] = saturated_fraction(sample, found.bounds)
        return columns

    def _silent_and_dead(
        self, samples: Samples, rectifiers: Sequence[Activation]
    ) -> tuple[np.ndarray, np.ndarray]:
        silent = np.zeros((len(rectifiers), MAX_UNITS), dtype=bool)
        positions = [found.position for found in rectifiers]
        counts, units = np.array([samples.shapes[position] for position in positions]).T
        for k, position in enumerate(positions):
            silent[k, : units[k]] = silent_units(samples.matrix(position))
        rows = [self._row(found.layer) for found in rectifiers]
        self._samples[rows] = np.where(silent, self._samples[rows] + counts[:, None], 0)
        self._frames[rows] = np.where(silent, self._frames[rows] + 1, 0)
        dead = (self._samples[rows] >= self._dead_samples) | (self._frames[rows] >= _SILENT_FRAMES)
        return silent.sum(axis=1) / units, dead.sum(axis=1) / units

    def _row(self, layer: Layer) -> int:
        row = self._rows.get(layer)
        if row is None:
            row = self._rows[layer] = len(self._rows)
            grown = ((0, 1), (0, 0))
            self._samples = np.pad(self._samples, grown)
            self._frames = np.pad(self._frames, grown)
        return row


def saturated_fraction(sample: np.ndarray, bounds: tuple[float, float]) -> float:
    """Share of values in the flat tails of a bounded activation.

    >>> saturated_fraction(np.array([[0.999, 0.5], [-1.0, 0.0]]), (-1.0, 1.0))
    0.5
    """
    low, high = bounds
    margin = SATURATION_MARGIN * (high - low) / 2
    return float(np.mean((sample < low + margin) | (sample > high - margin)))
