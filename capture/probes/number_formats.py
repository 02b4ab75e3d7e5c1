"""Number formats: how near half-precision values are to the ends of what they can hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.local_shards import local_shard
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.capture.sampling import strided_sample
from neuraldbg.series import DETAIL, Kind

_WHOLE = 1 << 22
"""Values up to which a whole tensor is searched for its largest: the sample may miss it."""
_QUANTUM = 2.0**-24
"""The least positive float16."""
_SUBNORMAL = 2.0**-14
"""Below this float16 values lie on a grid of quanta."""


def flushed_fraction(gradient: np.ndarray) -> float:
    """Share of a float16 gradient that is flushed to zero; zeros of dead units do not count.

    Values that were too small leave zeros beside neighbours on the grid of the format's least
    magnitudes. Rows and columns of zeros alone belong to units that are off and are left out;
    where no value is near the least magnitude, zeros have another reason.

    Args:
        gradient: Sample of a weight's gradient, shape (rows, columns).

    Returns:
        0 to 1; 1 where all values are zero.

    Example:
        >>> tiny = 2.0 ** -24 * np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        >>> flushed_fraction(tiny)
        0.5
        >>> flushed_fraction(np.array([[0.1, 0.0], [0.0, 0.2]]))
        0.0
    """
    sizes = np.abs(np.nan_to_num(gradient.astype(np.float64)))
    if not sizes.any():
        return 1.0
    small = sizes[(sizes > 0) & (sizes < _SUBNORMAL)] / _QUANTUM
    if not small.size or small.min() > 16 or not np.array_equal(small, np.round(small)):
        return 0.0
    alive = sizes[sizes.any(axis=1)][:, sizes.any(axis=0)]
    return float((alive == 0).mean())


class NumberFormats(Probe):
    """Leaves `format_share`, `flushed_fraction` and the name of the format on rows."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._largest: dict[Layer, tuple[torch.dtype, list[Tensor]]] = {}
        self._gradients: dict[Layer, Tensor] = {}

    def detach(self) -> None:  # noqa: D102
        self._largest.clear()
        self._gradients.clear()

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: ARG002, D102
        made = first_tensor(output)
        if made is None or made.dtype not in (torch.float16, torch.bfloat16) or not made.numel():
            return
        known = self._largest.setdefault(layer, (made.dtype, []))
        if made.dtype is torch.float16 and len(known[1]) < 8:
            known[1].append(_largest_finite(made.detach()))

    def before_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002, D102
        for layer in self.run.layers_with_parameters:
            weight = layer.sampled_weight
            half = weight.dtype is torch.float16
            half = half or self._largest.get(layer, (None,))[0] is torch.float16
            gradient = None if weight.grad is None else local_shard(weight.grad)
            if half and gradient is not None and gradient.layout is torch.strided:
                matrix = gradient.detach() if gradient.dim() else gradient.detach()[None]
                sample = strided_sample(matrix, 0).float()
                self._gradients[layer] = sample.reshape(-1, sample.shape[-1]).clone()

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        largest, self._largest = self._largest, {}
        gradients, self._gradients = self._gradients, {}
        step = self.run.current_step()
        if largest:
            yield _output_rows(step, largest)
        if gradients:
            yield _gradient_rows(step, gradients)
        cast = [
            layer
            for layer in self.run.layers_with_parameters
            if layer.sampled_weight.dtype is not torch.float32
        ]
        if cast:
            names = [format_name(layer.sampled_weight.dtype) for layer in cast]
            columns = {DETAIL: np.array(names, dtype=object)}
            yield Deferred.of([Block(step, Kind.PARAMETER, cast, columns)])


def format_name(dtype: torch.dtype) -> str:
    """The name of a number format without its package.

    >>> format_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _largest_finite(values: Tensor) -> Tensor:
    """The largest finite magnitude of a float16 tensor, without waiting for its device."""
    if values.numel() > _WHOLE:
        values = values.reshape(-1)[:: -(-values.numel() // _WHOLE)]
    low, high = values.aminmax()
    largest = torch.maximum(high, -low)
    if values.device.type == "cpu" and bool(torch.isfinite(largest)):
        return largest
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).abs().amax()


def _output_rows(step: int, largest: dict[Layer, tuple[torch.dtype, list[Tensor]]]) -> Deferred:
    layers = list(largest)
    names = np.array([format_name(dtype) for dtype, _ in largest.values()], dtype=object)
    counts = [len(found) for _, found in largest.values()]
    tensors = [tensor for _, found in largest.values() for tensor in found]
    limit = torch.finfo(torch.float16).max

    def make(arrays: list[np.ndarray]) -> list[Block]:
        values = iter(arrays)
        shares = [
            max((float(next(values)) / limit for _ in range(count)), default=np.nan)
            for count in counts
        ]
        columns = {"format_share": np.array(shares), DETAIL: names}
        return [Block(step, Kind.OUTPUT, layers, columns)]

    return Deferred(make, tensors)


def _gradient_rows(step: int, gradients: dict[Layer, Tensor]) -> Deferred:
    layers = list(gradients)
    return Deferred(
        lambda arrays: [
            Block(
                step,
                Kind.GRADIENT,
                layers,
                {"flushed_fraction": np.array([flushed_fraction(array) for array in arrays])},
            )
        ],
        list(gradients.values()),
    )
