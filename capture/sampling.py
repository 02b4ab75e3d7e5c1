"""Bounded strided samples of tensors, gathered in one preallocated buffer.

A sample keeps the structure that unit-wise statistics need: its last axis runs over units
(features or channels), all other axes are flattened into rows.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        torch.Size([3, 3, 3, 64])
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
    strides[-1] = max(-(-shape[-1] // MAX_UNITS), 1)
    budget = SAMPLE_SIZE // max(units, 1)
    # Thin the widest row axis, again and again, until the rows fit.
    kept = list(shape[:-1])
    while np.prod(kept, dtype=np.int64) > budget:
        widest = int(np.argmax(kept))
        strides[widest] += 1
        kept[widest] = -(-shape[widest] // strides[widest])
    return strides


Key = tuple[Any, str]
"""What a sample is of (a layer) and which of its tensors (output, input, ...)."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Where the samples of one key go, and how they are cut from a tensor of the usual shape."""

    row: int
    shape: tuple[int, ...] = ()
    unit_axis: int = 0
    moved: bool = False
    slices: tuple[slice, ...] = ()
    target: Tensor | None = None
    rows: int = 0
    units: int = 0


class SampleBuffer:
    """One buffer that holds a row of `SAMPLE_SIZE` values for each key, zeros behind the sample.

    It grows when there are more keys than its capacity; views given out before are then stale.

    Rows are handed out on first use and kept for the buffer's life, so that a step copies into
    memory that already exists, through views that already exist while shapes stay the same.
    """

    def __init__(self, capacity: int = 16) -> None:
        self._capacity = capacity
        self._storage: Tensor | None = None
        self._slots: dict[Key, _Slot] = {}
        self._filled: dict[Key, _Slot] = {}

    def copy(self, key: Key, tensor: Tensor, unit_axis: int) -> None:
        """Copy a sample of a tensor into the row of its key.

        Args:
            key: What the sample is of.
            tensor: Of at least one axis; not part of a graph.
            unit_axis: The axis over units, not negative.
        """
        target, sample = self.place(key, tensor, unit_axis)
        target.copy_(sample)

    def place(self, key: Key, tensor: Tensor, unit_axis: int) -> tuple[Tensor, Tensor]:
        """The row's view and the tensor's, for the caller to copy the second into the first."""
        slot = self._slots.get(key)
        if slot is None or slot.shape != tensor.shape or slot.unit_axis != unit_axis:
            slot = self._lay_out(key, tensor, unit_axis)
        self._filled[key] = slot
        assert slot.target is not None
        view = tensor.movedim(unit_axis, -1) if slot.moved else tensor
        return slot.target, view[slot.slices]

    def _lay_out(self, key: Key, tensor: Tensor, unit_axis: int) -> _Slot:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _Slot(row=len(self._slots))
        if self._storage is None or slot.row >= len(self._storage):
            self._grow(tensor.device)
        assert self._storage is not None
        sample = strided_sample(tensor, unit_axis)
        slot.shape, slot.unit_axis = tuple(tensor.shape), unit_axis
        slot.moved = unit_axis != tensor.dim() - 1
        slot.slices = _slices(tuple(tensor.movedim(unit_axis, -1).shape))
        slot.units = sample.shape[-1]
        slot.rows = sample.numel() // max(slot.units, 1)
        self._storage[slot.row].zero_()
        slot.target = self._storage[slot.row, : sample.numel()].view(sample.shape)
        return slot

    def _grow(self, device: torch.device) -> None:
        old = self._storage
        count = max(self._capacity, 1) if old is None else 2 * len(old)
        self._storage = torch.zeros(
            count, SAMPLE_SIZE, device=device if old is None else old.device
        )
        if old is None:
            return
        self._storage[: len(old)] = old
        for slot in self._slots.values():
            if slot.target is not None:
                size = slot.rows * slot.units
                slot.target = self._storage[slot.row, :size].view(slot.target.shape)

    def drain(self, keep: bool = False) -> Snapshot:
        """All samples copied since the last call, where they lie.

        Args:
            keep: Whether the same keys are filled again without being placed again.
        """
        filled, self._filled = self._filled, (self._filled if keep else {})
        rows = [slot.row for slot in filled.values()]
        # Rows fill in order of first use, so one block holds them all.
        values = (
            torch.zeros(0, SAMPLE_SIZE)
            if self._storage is None or not rows
            else self._storage[: max(rows) + 1]
        )
        shapes = [(slot.rows, slot.units) for slot in filled.values()]
        return Snapshot(list(filled), rows, shapes, values)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Samples of one step where they lie: a view of the buffer, valid until it is filled again.

    Attributes:
        keys: What each sample is of.
        rows: Their rows in `values`.
        shapes: (rows, units) of each sample.
        values: Shape (rows of the buffer, `SAMPLE_SIZE`), on the buffer's device.
    """

    keys: list[Key]
    rows: list[int]
    shapes: list[tuple[int, int]]
    values: Tensor

    def kept(self) -> Snapshot:
        """The same, in memory of its own."""
        return Snapshot(self.keys, self.rows, self.shapes, self.values.clone())

    def on_host(self) -> Samples:
        """The samples, at once: waits for the device where they are on one."""
        return self.samples(self.values.cpu().numpy())

    def samples(self, values: np.ndarray) -> Samples:
        """The samples, given `values` on the host; copies them."""
        return Samples(self.keys, values[self.rows], self.shapes)


@dataclass(slots=True)
class Samples:
    """Samples of one step on the host: row k of `values` holds the sample of `keys[k]`.

    Attributes:
        keys: What each sample is of.
        values: Shape (samples, `SAMPLE_SIZE`), float32, zeros behind each sample.
        shapes: (rows, units) of each sample.
    """

    keys: list[Key]
    values: np.ndarray
    shapes: list[tuple[int, int]]

    @property
    def sizes(self) -> np.ndarray:
        """Number of values of each sample."""
        return np.array([rows * units for rows, units in self.shapes], dtype=np.int64)

    def matrix(self, position: int) -> np.ndarray:
        """The sample at a position as a matrix of shape (rows, units)."""
        rows, units = self.shapes[position]
        return self.values[position, : rows * units].reshape(rows, units)
