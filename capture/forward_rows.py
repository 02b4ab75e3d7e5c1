"""Rows about inputs and outputs, made of the samples of a step's passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from neuraldbg.capture.activation_health import Activation, UnitHistories
from neuraldbg.capture.blocks import Block
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.moments import Moments
from neuraldbg.capture.sampling import Key, Samples
from neuraldbg.capture.statistics import feature_spread
from neuraldbg.capture.unit_similarity import similarity_columns
from neuraldbg.series import Kind

Bounds = Mapping[Layer, tuple[float, float] | None]
"""Limits of the functional activations found behind layers, None for rectifiers."""


class ForwardRows:
    """Makes the rows of one captured step after another.

    Args:
        dead_samples: See `Thresholds.dead_samples`.
    """

    def __init__(self, dead_samples: int) -> None:
        self._histories = UnitHistories(dead_samples)

    def blocks(
        self, step: int, passes: Sequence[Samples], bounds: Bounds, thorough: bool
    ) -> list[Block]:
        """Rows of kind output and input.

        Args:
            step: The step.
            passes: The samples of each of its passes (micro-batches): their moments are merged;
                shares of units and likenesses are those of the last.
            bounds: Of functional activations.
            thorough: Whether likenesses are worked out too.
        """
        moments = Moments.of(passes[0])
        for samples in passes[1:]:
            moments = moments.merge(Moments.of(samples))
        keys = {what: [k for k in moments.keys if k[1] == what] for what in ("output", "input")}
        last = passes[-1]
        position = {key: row for row, key in enumerate(last.keys)}
        outputs = moments.columns(keys["output"])
        row_of = {key[0]: row for row, key in enumerate(keys["output"])}
        health = [a for a in _activations(last, position, bounds) if a.layer in row_of]
        for name, values in self._histories.health(last, health).items():
            _place(outputs, name, values, [row_of[a.layer] for a in health], len(row_of))
        if thorough:
            seen = [key for key in keys["output"] if key in position]
            alike = similarity_columns(last, [position[key] for key in seen])
            for name, values in alike.items():
                _place(outputs, name, values, [row_of[key[0]] for key in seen], len(row_of))
        inputs = moments.columns(keys["input"])
        inputs["feature_spread"] = np.array(
            [
                feature_spread(last.matrix(position[key])) if key in position else np.nan
                for key in keys["input"]
            ]
        )
        inputs["target"] = np.zeros(len(keys["input"]))
        return [
            Block(step, Kind.OUTPUT, [key[0] for key in keys["output"]], outputs),
            Block(step, Kind.INPUT, [key[0] for key in keys["input"]], inputs),
        ]


def _place(
    columns: dict[str, np.ndarray], name: str, values: np.ndarray, rows: list[int], count: int
) -> None:
    """Enter a column that only some rows have."""
    columns[name] = np.full(count, np.nan)
    columns[name][rows] = values


def _activations(samples: Samples, position: Mapping[Key, int], bounds: Bounds) -> list[Activation]:
    """What of the samples is an activation: a layer's own output, or a function's after it."""
    found = []
    for layer, what in samples.keys:
        if what != "output":
            continue
        functional = position.get((layer, "activation"))
        if functional is not None:
            found.append(Activation(layer, functional, bounds[layer]))
        elif layer.is_rectifier or layer.bounds is not None:
            found.append(Activation(layer, position[layer, "output"], layer.bounds))
    return found
