"""Bounded strided samples of tensors, gathered in one preallocated buffer.

A sample keeps the structure that unit-wise statistics need: its last axis runs over units
(features or channels), all other axes are flattened into rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLE_SIZE = 2048
"""Values kept of one tensor: enough for a standard error of 2 % of the standard deviation, and
small enough that a layer's copy costs a few microseconds."""
MAX_UNITS = 64
"""Units kept of one tensor; the rest of the sample's values go to rows."""


def strided_sample(tensor: Tensor, unit_axis: int) -> Tensor:
    """A view of at most `SAMPLE_SIZE` values of a tensor, units last.

    Args:
        tensor: Any shape with at least one axis.
        unit_axis: The axis over units.

    Returns:
        A view (no copy) of the same number of axes, the unit axis moved to the end. Each axis is
        stepped through evenly from half a stride in, so that borders are not over-represented.

    Example:
        >>> strided_sample(torch.zeros(32, 128, 28, 28), unit_axis=1).shape
        torch.Size([5, 2, 2, 64])
        >>> strided_sample(torch.zeros(3, 5), unit_axis=1).shape
        torch.Size([3, 5])
    """
    view = tensor if tensor.dim() == 0 else tensor.movedim(unit_axis, -1)
    return view[_slices(tuple(view.shape))]


_SLICES: dict[tuple[int, ...], tuple[slice, ...]] = {}


def _slices(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices for a shape with units last, computed once a shape."""
    known = _SLICES.get(shape)
    if known is None:
        if len(_SLICES) > 4096:  # shapes that vary every step (padded text) must not pile up
            _SLICES.clear()
        known = _SLICES[shape] = tuple(
            slice((size - 1) % stride // 2 if stride > 1 else 0, None, stride)
            for size, stride in zip(shape, _strides(shape), strict=True)
        )
    return known


def _strides(shape: tuple[int, ...]) -> list[int]:
    if not shape:
        return []
    units = min(shape[-1], MAX_UNITS)
    strides = [1] * len(shape)
    strides[-1] = -(-shape[-1] // MAX_UNITS)
    budget = SAMPLE_SIZE // max(units, 1)
    # Halve the widest row axis until the rows fit: batch and space are thinned alike.
    kept = list(shape[:-1])
    while np.prod(kept, dtype=np.int64) > budget:
        widest = int(np.argmax(kept))
        strides[widest] += 1
        kept[widest] = -(-shape[widest] // strides[widest])
    return strides


Key = tuple[Any, str]
"""What a sample is of (a layer) and which of its tensors (output, input, ...)."""


@dataclass(slots=True)
class SampleBuffer:
    """One flat buffer that holds a slot of `SAMPLE_SIZE` values for each key.

    Slots are handed out on first use and kept for the buffer's life, so that a step copies into
    memory that already exists.
    """

    _storage: Tensor | None = None
    _slots: dict[Key, int] = field(default_factory=dict)
    _shapes: dict[Key, tuple[int, int]] = field(default_factory=dict)

    def copy(self, key: Key, sample: Tensor) -> None:
        """Copy a sample (units last) into the slot of its key.

        Shape (*rows, units) with at most `SAMPLE_SIZE` values.
        """
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self._slots)
        if self._storage is None or slot >= len(self._storage):
            self._grow(sample.device)
        assert self._storage is not None
        size = sample.numel()
        self._storage[slot, :size].view(sample.shape).copy_(sample)
        units = sample.shape[-1] if sample.dim() else 1
        self._shapes[key] = (size // max(units, 1), units)

    def _grow(self, device: torch.device) -> None:
        old = self._storage
        count = 16 if old is None else 2 * len(old)
        new = torch.zeros(count, SAMPLE_SIZE, device=device if old is None else old.device)
        if old is not None:
            new[: len(old)] = old
        self._storage = new

    def drain(self) -> Samples:
        """All samples copied since the last call, on the host; empties the buffer."""
        keys = list(self._shapes)
        if not keys or self._storage is None:
            return Samples([], np.zeros((0, SAMPLE_SIZE), dtype=np.float32), [])
        # Slots fill from 0 in order of first use, so one block holds them all.
        last = max(self._slots[key] for key in keys) + 1
        block = self._storage[:last].cpu().numpy()
        values = block[[self._slots[key] for key in keys]]
        shapes = [self._shapes[key] for key in keys]
        self._shapes.clear()
        return Samples(keys, values, shapes)


@dataclass(slots=True)
class Samples:
    """Samples of one step on the host: row k of `values` holds the sample of `keys[k]`.

    The first rows * units values of a row are valid, `shapes[k]` being (rows, units).
    """

    keys: list[Key]
    values: np.ndarray
    shapes: list[tuple[int, int]]

    def matrix(self, position: int) -> np.ndarray:
        """The sample at a position as a matrix of shape (rows, units)."""
        rows, units = self.shapes[position]
        return self.values[position, : rows * units].reshape(rows, units)
