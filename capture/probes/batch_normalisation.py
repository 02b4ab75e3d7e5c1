"""Batch normalisation: how much each batch gives, and how far running statistics are from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.series import Kind

_NEARLY_ONE = 0.99
"""Momentum above which running statistics hold nothing of what was before the batch."""


def running_distance(
    mean: np.ndarray,
    variance: np.ndarray,
    running_mean: np.ndarray,
    running_variance: np.ndarray,
) -> float:
    """How far running statistics are from a batch's, in running standard deviations.

    The root mean square over channels of the difference of means and that of deviations.

    Args:
        mean: The batch's means, shape (channels,).
        variance: Its variances.
        running_mean: The running means.
        running_variance: The running variances.

    Example:
        >>> one = np.ones(2)
        >>> running_distance(3 * one, one, one, one), running_distance(one, 4 * one, one, one)
        (2.0, 1.0)
    """
    scale = np.sqrt(np.maximum(running_variance, 1e-12))
    shift = (mean - running_mean) / scale
    stretch = np.sqrt(np.maximum(variance, 0.0)) / scale - 1.0
    return float(np.sqrt(np.mean(shift**2 + stretch**2)))


class BatchNormalisation(Probe):
    """Leaves batch sizes and the distance and lag of running statistics on rows of kind output."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._seen: dict[Layer, Deferred] = {}

    def detach(self) -> None:  # noqa: D102
        self._seen.clear()

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: D102
        module = layer.module
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or not module.training:
            return
        given = first_tensor(args)
        if given is None or given.dim() < 2 or isinstance(module, nn.SyncBatchNorm):
            return  # statistics across processes are of more than this batch
        self._seen[layer] = self._read(layer, module, given, first_tensor(output))

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        seen, self._seen = self._seen, {}
        return list(seen.values())

    def _read(
        self,
        layer: Layer,
        module: nn.modules.batchnorm._BatchNorm,
        given: Tensor,
        output: Tensor | None,
    ) -> Deferred:
        step = self.run.current_step()
        columns = {
            "batch_size": np.array([float(given.shape[0])]),
            "values_per_channel": np.array([given.numel() / given.shape[1]]),
        }
        buffers = (module.running_mean, module.running_var, module.num_batches_tracked)
        running = [buffer.detach().clone() for buffer in buffers if isinstance(buffer, Tensor)]
        batch = None if self.run.saved_tensors_are_packed else _batch_statistics(output)
        momentum = module.momentum
        if batch is None or len(running) < len(buffers) or momentum is None:
            return Deferred.of([Block(step, Kind.OUTPUT, [layer], columns)])
        count, epsilon, rate = columns["values_per_channel"][0], module.eps, float(momentum)

        def make(arrays: list[np.ndarray]) -> list[Block]:
            mean, inverse, running_mean, running_variance, batches = (
                array.astype(np.float64) for array in arrays
            )
            variance = 1.0 / inverse**2 - epsilon
            unbiased = variance * count / max(count - 1.0, 1.0)
            before = [
                _before(running_mean, mean, rate),
                np.maximum(_before(running_variance, unbiased, rate), 0.0),
            ]
            distance = running_distance(mean, variance, *before) if rate < _NEARLY_ONE else math.nan
            lag = (1.0 - min(rate, 1.0)) ** float(batches)
            found = {"running_distance": np.array([distance]), "running_lag": np.array([lag])}
            return [Block(step, Kind.OUTPUT, [layer], columns | found)]

        return Deferred(make, [*batch, *running])


def _before(after: np.ndarray, batch: np.ndarray, momentum: float) -> np.ndarray:
    """Running statistics as they were before a batch was blended in."""
    return (after - momentum * batch) / (1.0 - momentum) if momentum < _NEARLY_ONE else after


def _batch_statistics(output: Tensor | None) -> Sequence[Tensor] | None:
    """Mean and inverse deviation of the whole batch, which the backward pass has saved anyway."""
    node = None if output is None else output.grad_fn
    mean = getattr(node, "_saved_result1", None)
    inverse = getattr(node, "_saved_result2", None)
    if not isinstance(mean, Tensor) or not isinstance(inverse, Tensor) or not mean.numel():
        return None
    with torch.no_grad():
        return mean.detach(), inverse.detach()
