"""The norm of the whole gradient at every step, at a cost that does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from neuraldbg.capture.local_shards import local_shard
from neuraldbg.capture.parameter_sampler import norms

VALUES_PER_TENSOR = 4_096
"""Consecutive values of each gradient that stand for it: a standard error of about 1 %, and a few
microseconds at most."""


def gradient_norm(gradients: Iterable[Tensor]) -> float | Callable[[], float]:
    """Euclidean norm of gradients taken together.

    On the CPU it is exact for tensors of up to `VALUES_PER_TENSOR` values; of larger ones that
    many from the middle stand for the rest. On an accelerator it is exact, and a function of no
    arguments, so that nothing waits for the device before it is asked for.

    Args:
        gradients: Of any shapes, on one kind of device; sparse ones count with their values,
            those split over ranks with this rank's part.

    Returns:
        The norm, NaN where there are no gradients, infinity or NaN where they are not finite.

    Example:
        >>> gradient_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        5.0
    """
    square, known = 0.0, False
    elsewhere: list[Tensor] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for gradient in map(local_shard, gradients):
            if gradient.is_cpu and gradient.dtype is torch.float32:
                square += _square(gradient)
                known = True
            else:
                elsewhere.append(gradient)
    if not elsewhere:
        return math.sqrt(square) if known else math.nan
    return _on_device(elsewhere, square)


def _square(gradient: Tensor) -> float:
    """Sum of squares of a gradient, estimated from its middle where it is large."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.requires_grad:
        gradient = gradient.detach()
    values = gradient.numpy().ravel()
    size = values.size
    scale = 1.0
    if size > VALUES_PER_TENSOR:
        first = (size - VALUES_PER_TENSOR) // 2
        values = values[first : first + VALUES_PER_TENSOR]
        scale = size / VALUES_PER_TENSOR
    square = float(values.dot(values))
    if square - square != 0.0:  # squares leave float32 long before the values do
        wide = values.astype(np.float64)
        square = float(wide.dot(wide))
    return square * scale


def _on_device(gradients: list[Tensor], square: float) -> float | Callable[[], float]:
    total = norms(gradients).norm()

    def value() -> float:
        return math.sqrt(square + float(total) ** 2)

    return value() if total.is_cpu else value


def float_or_function(parts: Tensor) -> float | Callable[[], float]:
    """The norm of norms; a function of no arguments where they lie on an accelerator."""
    if parts.is_cpu:
        return math.sqrt(sum(part * part for part in parts.tolist())) if len(parts) else math.nan
    total = parts.norm()
    return lambda: float(total)


class GradientNorms:
    """Gradient norms that can be compared from step to step, exact at captured steps.

    Between those, a few weights stand for the whole: their norm times what the whole was of it at
    the last captured step. On accelerators every norm is exact.

    Args:
        parameters: Of the watched models, in the order of their layers.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._chosen: dict[tuple[int, int], list[Parameter]] = {}
        self._shares: dict[tuple[int, int], float] = {}

    def norm(
        self, held: set[Parameter], optimizer: int, exact: bool
    ) -> float | Callable[[], float]:
        """The norm of the gradients of some parameters, as they are now.

        Args:
            held: Those that the step concerns.
            optimizer: Number of the optimizer that holds them.
            exact: Whether to take all of them.

        Returns:
            The norm; a function of no arguments where it lies on an accelerator.
        """
        key = (optimizer, len(held))
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = self._representatives(held)
        part = gradient_norm([p.grad for p in chosen if p.grad is not None])
        if callable(part):
            return float_or_function(norms([p.grad for p in held if p.grad is not None]))
        if not exact:
            return part * self._shares.get(key, 1.0)
        value = float_or_function(norms([p.grad for p in held if p.grad is not None]))
        if not callable(value) and part > 0 and math.isfinite(value):
            self._shares[key] = value / part
        return value

    def _representatives(self, held: set[Parameter]) -> list[Parameter]:
        """The first, the middle and the last weight among them, and the largest."""
        mine = [p for p in self._parameters if p in held and p.requires_grad]
        weights = [p for p in mine if p.dim() > 1] or mine
        if not weights:
            return []
        largest = max(weights, key=Parameter.numel)
        return list({weights[0], weights[len(weights) // 2], weights[-1], largest})
