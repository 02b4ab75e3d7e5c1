"""Gradients, weights and updates of the watched layers, read around the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from neuraldbg.capture.layers import Layer
from neuraldbg.capture.local_shards import local_shard, shard_count
from neuraldbg.capture.moments import Moments
from neuraldbg.capture.sampling import SAMPLE_SIZE, SampleBuffer, Samples, Snapshot
from neuraldbg.capture.statistics import (
    Columns,
    cosines,
    noise_scales,
    summarise,
    unit_spread,
)

_SURELY_DISTINCT = 0.1
"""Spread of a layer's units beyond which they are not watched any more for being copies."""
_OF_GRADIENT_SAMPLES = ("count", "mean", "std", "max_abs", "zero_fraction")
_OF_UPDATES = ("count", "mean", "std", "max_abs", "zero_fraction")
"""Statistics of the sampled values; others are of whole tensors, or told in another way."""


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norms of tensors, computed in float32 by as few kernels as devices allow.

    Sparse tensors count with the values they hold, those split over ranks with this rank's part.

    Args:
        tensors: Of any shapes and formats.

    Returns:
        Shape (tensors,), float32, on the first tensor's device.

    Example:
        >>> norms([torch.tensor([3.0, 4.0]), torch.ones(4, dtype=torch.float16)]).tolist()
        [5.0, 2.0]
    """
    local = [local_shard(tensor) for tensor in tensors]
    dense = [t.coalesce().values() if t.layout is torch.sparse_coo else t for t in local]
    if not dense:
        return torch.zeros(0)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(dense):
        groups.setdefault((tensor.device, tensor.dtype), []).append(position)
    found: list[Tensor] = [dense[0]] * len(dense)
    for (_, dtype), positions in groups.items():
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        for position, norm in zip(
            positions,
            torch._foreach_norm([dense[p] for p in positions], 2, dtype=wide),
            strict=True,
        ):
            found[position] = norm
    if len(groups) > 1:
        found = [norm.to(dense[0].device, torch.float32, non_blocking=True) for norm in found]
    return torch.stack(found).detach()


@dataclass(eq=False)
class ParameterSampler:
    """Reads gradients before the optimizer's step and weights on both sides of it.

    The norm of each gradient and weight is over the whole tensor; everything else comes from a
    strided sample of each layer's largest weight. Where tensors are split over ranks all of that
    is of this rank's part, and the rows say so in the column `shards`.

    Attributes:
        layers: The layers that own parameters.
    """

    layers: list[Layer]
    _before: Snapshot | None = None
    _last_step: int = -2

    def __post_init__(self) -> None:
        self._weights = [layer.sampled_weight for layer in self.layers]
        self._weight_buffer = SampleBuffer(len(self.layers))
        self._gradient_buffer = SampleBuffer(len(self.layers))
        self._views: list[tuple[Tensor, Tensor]] = []
        self._pointers: list[int] = []
        self._last_gradients = np.zeros((len(self.layers), SAMPLE_SIZE), dtype=np.float32)
        self._maybe_copies = [row for row, layer in enumerate(self.layers) if layer.has_units]
        self._fan_in = np.array([layer.fan_in for layer in self.layers])
        self._shards = np.array([shard_count(weight) for weight in self._weights], dtype=float)

    def _sample_weights(self) -> Snapshot:
        """Samples of shape (inputs..., units) of each layer's weight, by views that last."""
        weights = [local_shard(weight) for weight in self._weights]
        pointers = [weight.data_ptr() for weight in weights]
        if pointers != self._pointers:
            self._pointers = pointers
            self._views = [
                self._place(self._weight_buffer, layer, weight.detach())
                for layer, weight in zip(self.layers, weights, strict=True)
            ]
        _copy_all(self._views)
        return self._weight_buffer.drain(keep=True)

    def _place(self, buffer: SampleBuffer, layer: Layer, tensor: Tensor) -> tuple[Tensor, Tensor]:
        whole = shard_count(layer.sampled_weight) == 1
        matrix = tensor[: layer.unit_rows if whole else None] if tensor.dim() else tensor[None]
        return buffer.place((layer, "weight"), matrix, 0)

    def read_weights_before(self) -> None:
        """Sample the weights as they are before an update."""
        self._before = self._sample_weights().kept()

    @property
    def has_weights_before(self) -> bool:
        """Whether the weights before the update now under way have been read."""
        return self._before is not None

    def read_gradients(
        self, step: int, paired: bool
    ) -> tuple[list[Tensor], Callable[[list[np.ndarray]], Columns]]:
        """Copy what the gradient columns of all layers are made of.

        Args:
            step: The step they belong to: the cosine is taken with the step just before only.
            paired: Whether the step before or after is captured too; if not, there is no cosine.

        Returns:
            Tensors, and what makes the columns of them once they are on the host: NaN where a
            layer has no gradient.
        """
        owned = [
            (position, local_shard(p.grad))
            for position, layer in enumerate(self.layers)
            for p in layer.parameters
            if p.grad is not None
        ]
        positions = [position for position, _ in owned]
        sizes = [gradient.numel() for _, gradient in owned]
        tensors = [norms([gradient for _, gradient in owned])]
        rows, snapshot = self._sample_gradients() if paired else ([], None)
        if snapshot is not None:
            tensors.append(snapshot.values)

        def columns(arrays: list[np.ndarray]) -> Columns:
            found = self._gradient_columns(positions, sizes, arrays[0])
            if snapshot is not None:
                samples = snapshot.samples(arrays[1])
                found = self._sample_columns(rows, samples) | found
                found |= self._pair_columns(step, rows, samples)
            return found

        return tensors, columns

    def _gradient_columns(
        self, positions: list[int], sizes: list[int], norm: np.ndarray
    ) -> Columns:
        """Columns of each layer from the norms of its parameters' gradients."""
        count = len(self.layers)
        square, size = np.zeros(count), np.zeros(count)
        np.add.at(square, positions, norm.astype(np.float64) ** 2)
        np.add.at(size, positions, sizes)
        present = size > 0
        square[~present] = np.nan
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "norm": np.sqrt(square),
                "rms": np.sqrt(square / size),
                "cosine": np.full(count, np.nan),
                "nonfinite_fraction": np.where(present, ~np.isfinite(square), np.nan),
                **self._shard_columns(size),
            }

    def _shard_columns(self, sizes: np.ndarray) -> Columns:
        """What the rows of several ranks are combined by, where any layer is split over them."""
        return {"shards": self._shards, "count": sizes} if (self._shards > 1).any() else {}

    def _sample_gradients(self) -> tuple[list[int], Snapshot]:
        rows, views = [], []
        for row, (layer, weight) in enumerate(zip(self.layers, self._weights, strict=True)):
            gradient = None if weight.grad is None else local_shard(weight.grad)
            if gradient is not None and gradient.layout is torch.strided:
                rows.append(row)
                views.append(self._place(self._gradient_buffer, layer, gradient))
        _copy_all(views)
        return rows, self._gradient_buffer.drain()

    def _sample_columns(self, rows: list[int], samples: Samples) -> Columns:
        """Columns of the sampled values of each layer's gradient, NaN where there are none."""
        summary = summarise(samples)
        found = {name: np.full(len(self.layers), np.nan) for name in _OF_GRADIENT_SAMPLES}
        for name, column in found.items():
            column[rows] = summary[name]
        return found

    def _pair_columns(self, step: int, rows: list[int], samples: Samples) -> Columns:
        """What each layer's gradient has in common with that of the step before, NaN if unknown."""
        current, sizes = np.zeros_like(self._last_gradients), np.zeros(len(self.layers))
        if rows:
            current[rows], sizes[rows] = samples.values, samples.sizes
        previous, follows = self._last_gradients, step == self._last_step + 1
        self._last_gradients, self._last_step = current, step
        if not follows:
            return {name: np.full(len(self.layers), np.nan) for name in ("cosine", "noise_scale")}
        return {
            "cosine": cosines(current, previous),
            "noise_scale": noise_scales(previous, current, sizes),
        }

    def read_weights_after(
        self,
    ) -> tuple[list[Tensor], Callable[[list[np.ndarray]], tuple[Columns, Columns]]]:
        """Copy the weights on both sides of the update.

        Returns:
            Tensors, and what makes of them, once they are on the host, the parameter columns (as
            before the update) and the update columns of all layers.
        """
        before = self._before
        assert before is not None
        self._before = None
        after = self._sample_weights()
        trainable = np.array([float(weight.requires_grad) for weight in self._weights])

        def columns(arrays: list[np.ndarray]) -> tuple[Columns, Columns]:
            weight, update = self._weight_columns(
                before.samples(arrays[0]), after.samples(arrays[1])
            )
            weight["trainable"] = trainable
            return weight, update

        return [before.values, after.values], columns

    def _weight_columns(self, before: Samples, after: Samples) -> tuple[Columns, Columns]:
        columns = summarise(before)
        with np.errstate(invalid="ignore"):
            difference = after.values - before.values
        changed = Moments.of(Samples(after.keys, difference, after.shapes)).columns()
        broken = changed["nonfinite_fraction"] > 0
        change = np.where(broken, np.nan, changed["rms"])
        # Weights near zero would make any update look huge: measure it against the scale of
        # PyTorch's default initialisation at least, uniform in +-1/sqrt(fan_in).
        scale = np.fmax(columns["rms"], 1.0 / np.sqrt(3.0 * self._fan_in))
        ratio = np.divide(change, scale, out=np.full(len(scale), np.nan), where=scale > 0)
        # What matters of non-finite weights is where the update left them.
        if not np.isfinite(after.values.sum()):
            columns["nonfinite_fraction"] = summarise(after)["nonfinite_fraction"]
        columns["gain"] = columns["rms"] * np.sqrt(self._fan_in)
        columns["unit_spread"] = self._unit_spreads(before)
        update = {name: np.where(broken, np.nan, changed[name]) for name in _OF_UPDATES}
        update |= {"rms": change, "ratio": ratio}
        if (self._shards > 1).any():
            self._mark_shards(columns, update)
        return columns, update

    def _mark_shards(self, *blocks: Columns) -> None:
        """Say that rows are of this rank's part, and nothing of a part that holds no values."""
        sizes = np.array([local_shard(weight).numel() for weight in self._weights], dtype=float)
        for columns in blocks:
            for name, values in columns.items():
                columns[name] = np.where(sizes > 0, values, np.nan)
            columns.update(self._shard_columns(sizes))

    def _unit_spreads(self, weights: Samples) -> np.ndarray:
        """How much the units of each layer differ, for as long as they hardly do."""
        spreads = np.full(len(self.layers), np.nan)
        for row in list(self._maybe_copies):
            spreads[row] = unit_spread(weights.matrix(row))
            if not spreads[row] < _SURELY_DISTINCT:
                self._maybe_copies.remove(row)
        return spreads

    def unset_gradients(self, parameters: set[Parameter]) -> set[Parameter]:
        """Those of the parameters whose gradient is absent or zero everywhere."""
        present = [p for p in parameters if p.grad is not None]
        if not present:
            return set(parameters)
        zero = (norms([p.grad for p in present if p.grad is not None]) == 0).tolist()
        return set(parameters).difference(p for p, z in zip(present, zero, strict=True) if not z)


def _copy_all(views: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, by one call for all."""
    if views:
        torch._foreach_copy_([target for target, _ in views], [source for _, source in views])
