"""Rows about gradients, weights and updates: which layers they concern, and their flags."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.optimizer_watch import OptimizerRecord, OptimizerRegistry
from neuraldbg.capture.parameter_sampler import ParameterSampler
from neuraldbg.capture.probe import Deferred
from neuraldbg.capture.statistics import Columns
from neuraldbg.series import Kind


class ParameterRows:
    """Makes the rows of the layers with parameters around an optimizer's step.

    With several optimizers each step's rows are of its own layers and of those that none holds.

    Args:
        layers: The watched layers.
        optimizers: Which optimizer holds what.

    Attributes:
        layers: Those of them that own parameters.
        sampler: Reads their tensors.
    """

    def __init__(self, layers: Sequence[Layer], optimizers: OptimizerRegistry) -> None:
        self.layers = [layer for layer in layers if layer.parameters]
        self.sampler = ParameterSampler(self.layers)
        self._optimizers = optimizers

    def gradient_rows(self, step: int, record: OptimizerRecord | None, paired: bool) -> Deferred:
        """Rows about the gradients as they are now; see `ParameterSampler.read_gradients`."""
        concerned = self._concerned(record)
        tensors, columns = self.sampler.read_gradients(step, paired)
        return Deferred(
            lambda arrays: [self._block(step, Kind.GRADIENT, columns(arrays), concerned)], tensors
        )

    def weight_rows(self, step: int, record: OptimizerRecord | None) -> list[Deferred]:
        """Rows about the weights before the update that just ended, and about the update.

        None where the weights before it are not known: the layers were changed since.
        """
        if not self.sampler.has_weights_before:
            return []
        concerned = self._concerned(record)
        held = self._optimizers.held()
        in_optimizer = np.array(
            [
                float(any(p in held for p in layer.parameters)) if record else math.nan
                for layer in self.layers
            ]
        )
        tensors, columns = self.sampler.read_weights_after()

        def make(arrays: list[np.ndarray]) -> list[Block]:
            weight, update = columns(arrays)
            weight["in_optimizer"] = in_optimizer
            return [
                self._block(step, Kind.PARAMETER, weight, concerned),
                self._block(step, Kind.UPDATE, update, concerned),
            ]

        return [Deferred(make, tensors)]

    def _concerned(self, record: OptimizerRecord | None) -> list[int]:
        """Positions of the layers that a step concerns: all but those of other optimizers."""
        if len(self._optimizers) <= 1:
            return list(range(len(self.layers)))
        elsewhere = self._optimizers.held_by_others(record)
        return [
            position
            for position, layer in enumerate(self.layers)
            if not all(p in elsewhere for p in layer.parameters)
        ]

    def _block(self, step: int, kind: Kind, columns: Columns, rows: list[int]) -> Block:
        if len(rows) == len(self.layers):
            return Block(step, kind, self.layers, columns)
        layers = [self.layers[row] for row in rows]
        return Block(step, kind, layers, {name: values[rows] for name, values in columns.items()})
