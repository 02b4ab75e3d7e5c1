"""What one backward pass tells: the loss, what it should be at the start, and its target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.forward_sampler import ForwardSampler
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.loss_anatomy import find_functional_activations, read_loss_head
from neuraldbg.capture.parameter_sampler import norms
from neuraldbg.capture.statistics import Columns
from neuraldbg.series import Kind

_REWALK_PERIOD = 16
"""Captured steps between walks of a graph in which no functional activation was found."""

Loss = float | Tensor | Callable[[], float]
"""A loss, or what gives it once the device may be waited for."""


def mean_loss(losses: Sequence[Loss]) -> float | Callable[[], float]:
    """The mean of a step's losses; a function where fetching it would make the device wait.

    >>> mean_loss([1.0, 2.0])
    1.5
    """

    def mean() -> float:
        return sum(float(loss() if callable(loss) else loss) for loss in losses) / len(losses)

    if not losses:
        return math.nan
    return mean() if all(isinstance(loss, float) for loss in losses) else mean


@dataclass(slots=True)
class LossReader:
    """Reads losses and the graphs behind them, before the backward pass frees those.

    Attributes:
        forward: Knows the outputs of the pass, and samples the activations found in the graph.
    """

    forward: ForwardSampler
    _saw_non_finite: bool = False
    _walks_in_vain: int = 0

    def value(self, roots: Sequence[Tensor]) -> Loss:
        """The loss that a backward pass begins with; NaN where it is no single number."""
        if not roots or roots[0].numel() != 1:
            return math.nan
        if roots[0].device.type != "cpu":  # fetching it now would make the device wait
            return roots[0].detach().clone()
        return float(roots[0].detach())

    def read_anatomy(self, loss: Tensor, step: int) -> tuple[float, list[Block]]:
        """What an untrained model should score on this loss, and the rows about its target.

        Functional activations found in the graph are sampled on the way.
        """
        if self.forward.uses_saved_tensor_hooks or loss.grad_fn is None:
            return math.nan, []
        try:
            return self._read(loss, step)
        except RuntimeError:  # a graph already freed, which the backward pass will say itself
            return math.nan, []

    def _read(self, loss: Tensor, step: int) -> tuple[float, list[Block]]:
        head = read_loss_head(loss)
        if not self._walks_in_vain % _REWALK_PERIOD:
            activations, _ = find_functional_activations(loss, self.forward.producers)
            self.forward.sample_activations(activations)
            if activations:
                self._walks_in_vain = -1
        self._walks_in_vain += 1
        return head.expected, _target_blocks(head.target, step)

    def inspect_non_finite(self, loss: Tensor, step: int, layers: Sequence[Layer]) -> list[Block]:
        """At the first non-finite loss: rows about the batch, the target and the weights.

        Which of them is not finite tells where it came from; later all of them are.

        Args:
            loss: The loss.
            step: The step that it belongs to.
            layers: The layers with parameters.
        """
        if self._saw_non_finite:
            return []
        self._saw_non_finite = True
        blocks = []
        for layer, tensor in self.forward.batch.items():
            bad = float((~tensor.isfinite()).float().mean())
            columns = {"nonfinite_fraction": np.array([bad]), "target": np.zeros(1)}
            blocks.append(Block(step, Kind.INPUT, [layer], columns))
        if not self.forward.uses_saved_tensor_hooks:
            blocks += _target_blocks(read_loss_head(loss).target, step)
        broken = [
            layer
            for layer in layers
            if not norms([p.detach() for p in layer.parameters]).isfinite().all()
        ]
        if broken:  # by the step before, or they came so
            columns = {"nonfinite_fraction": np.ones(len(broken))}
            blocks.append(Block(max(step - 1, 0), Kind.PARAMETER, broken, columns))
        return blocks


def _target_blocks(target: Tensor | None, step: int) -> list[Block]:
    """The row about a floating target; none for class labels or where none was saved."""
    if target is None or not target.is_floating_point():
        return []
    values = target.detach().float()
    finite = values[values.isfinite()]
    columns: Columns = {
        "mean": np.array([float(finite.mean()) if finite.numel() else math.nan]),
        "rms": np.array([float(finite.square().mean().sqrt()) if finite.numel() else math.nan]),
        "nonfinite_fraction": np.array([1.0 - finite.numel() / max(values.numel(), 1)]),
        "target": np.ones(1),
    }
    return [Block(step, Kind.INPUT, [None], columns)]
