"""The norm of the whole gradient at every step, at a cost that does not grow with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from neuraldbg.capture.parameter_sampler import norms

VALUES_PER_TENSOR = 16_384
"""Consecutive values of each gradient that stand for it: a microsecond or two by BLAS."""


def gradient_norm(gradients: Iterable[Tensor]) -> float | Callable[[], float]:
    """Euclidean norm of gradients taken together.

    On the CPU it is exact for tensors of up to `VALUES_PER_TENSOR` values; of larger ones that
    many from the middle stand for the rest. On an accelerator it is exact, and a function of no
    arguments, so that nothing waits for the device before it is asked for.

    Args:
        gradients: Of any shapes, on one kind of device; sparse ones count with their values.

    Returns:
        The norm, NaN where there are no gradients, infinity or NaN where they are not finite.

    Example:
        >>> gradient_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])])
        5.0
    """
    square, known = 0.0, False
    elsewhere: list[Tensor] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for gradient in gradients:
            if gradient.device.type != "cpu" or gradient.dtype is not torch.float32:
                elsewhere.append(gradient)
                continue
            known = True
            square += _square(gradient)
    if not elsewhere:
        return math.sqrt(square) if known else math.nan
    return _on_device(elsewhere, square)


def _square(gradient: Tensor) -> float:
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    if gradient.requires_grad:
        gradient = gradient.detach()
    values = gradient.numpy().reshape(-1)
    size = len(values)
    part = values
    if size > VALUES_PER_TENSOR:
        first = (size - VALUES_PER_TENSOR) // 2
        part = values[first : first + VALUES_PER_TENSOR]
    square = float(np.dot(part, part))
    if not math.isfinite(square):  # squares leave float32 long before the values do
        wide = part.astype(np.float64)
        square = float(np.dot(wide, wide))
    return square * (size / max(len(part), 1))


def _on_device(gradients: list[Tensor], square: float) -> float | Callable[[], float]:
    total = norms(gradients).norm()

    def value() -> float:
        return math.sqrt(square + float(total) ** 2)

    return value() if total.device.type == "cpu" else value
