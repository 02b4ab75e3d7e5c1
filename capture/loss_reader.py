"""What every backward pass tells: the loss, and the activations that functions apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from neuraldbg.capture.forward_sampler import ForwardSampler
from neuraldbg.capture.functional_activations import find_functional_activations

_REWALK_PERIOD = 16
"""Captured steps between walks of a graph in which no functional activation was found."""

Loss = float | Tensor | Callable[[], float]
"""A loss, or what gives it once the device may be waited for."""


def loss_value(roots: Sequence[Tensor]) -> Loss:
    """The loss that a backward pass begins with; NaN where it is no single number.

    >>> import torch
    >>> loss_value([torch.tensor(2.0)]), loss_value([])
    (2.0, nan)
    """
    if not roots or roots[0].numel() != 1:
        return math.nan
    if not roots[0].is_cpu:  # fetching it now would make the device wait
        return roots[0].detach().clone()
    return float(roots[0].item())


def mean_loss(losses: Sequence[Loss]) -> float | Callable[[], float]:
    """The mean of a step's losses; a function where fetching it would make the device wait.

    >>> mean_loss([1.0, 2.0])
    1.5
    """

    def mean() -> float:
        return sum(float(loss() if callable(loss) else loss) for loss in losses) / len(losses)

    if len(losses) == 1 and isinstance(losses[0], float):
        return losses[0]
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
    _walks_in_vain: int = 0

    def sample_functional_activations(self, loss: Tensor) -> None:
        """Sample activations that are applied by functions, found in the graph behind a loss."""
        if self.forward.uses_saved_tensor_hooks or loss.grad_fn is None:
            return
        if not self._walks_in_vain % _REWALK_PERIOD:
            try:
                activations, _ = find_functional_activations(loss, self.forward.producers)
            except RuntimeError:  # a graph already freed, which the backward pass will say itself
                return
            self.forward.sample_activations(activations)
            if activations:
                self._walks_in_vain = -1
        self._walks_in_vain += 1
