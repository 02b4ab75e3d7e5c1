"""What a run leaves behind: statistics of captured steps, and the loss of every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd

from neuraldbg.capture.layers import Layer
from neuraldbg.capture.statistics import Columns
from neuraldbg.series import DETAIL, FLAGS, STATISTICS, Kind, build_series

T = TypeVar("T")

MAX_FRAMES = 512
MAX_PULSES = 8_192


@dataclass(slots=True)
class ThinningList(Generic[T]):
    """A list of bounded length that keeps its start, its recent end, and ever less between.

    When it is full, every second item between the first eighth and the last quarter goes.

    Attributes:
        limit: The most items it holds.

    Example:
        >>> kept = ThinningList(limit=16)
        >>> for item in range(40):
        ...     kept.append(item)
        >>> len(kept.items) <= 16, kept.items[:2], kept.items[-1]
        (True, [0, 1], 39)
    """

    limit: int
    items: list[T] = field(default_factory=list)

    def append(self, item: T) -> None:
        """Add an item at the end, thinning the middle first when the list is full."""
        if len(self.items) >= self.limit:
            head, tail = self.limit // 8, self.limit - self.limit // 4
            self.items = self.items[:head] + self.items[head:tail:2] + self.items[tail:]
        self.items.append(item)


@dataclass(slots=True)
class Block:
    """Rows of one kind from one captured step: a layer for each row, and their columns."""

    step: int
    kind: Kind
    layers: Sequence[Layer | None]
    columns: Columns


@dataclass(slots=True)
class Pulse:
    """What is known of every optimizer step, captured or not.

    Attributes:
        loss: Mean over the step's micro-batches, NaN where no scalar loss was seen. A function
            where it still lies on an accelerator.
        optimizer: Number of the optimizer, in the order of their first steps.
    """

    step: int
    optimizer: int
    loss: float | Callable[[], float]
    expected: float
    learning_rate: float
    micro_batches: int
    gradient_kept: float
    applied: bool = True
    loss_facts: Mapping[str, float | str] = field(default_factory=dict)
    """More columns of the loss's row."""
    optimizer_facts: Mapping[str, float | str] = field(default_factory=dict)
    """More columns of the optimizer's row."""

    def settle(self) -> None:
        """Fetch the loss from the accelerator if it still lies there."""
        if callable(self.loss):
            self.loss = self.loss()


@dataclass(slots=True)
class RunLog:
    """Collects a run's blocks and pulses in bounded memory and makes the series of them."""

    rank: int = 0
    frames: ThinningList[list[Block]] = field(default_factory=lambda: ThinningList(MAX_FRAMES))
    pulses: ThinningList[Pulse] = field(default_factory=lambda: ThinningList(MAX_PULSES))
    findings: list[Block] = field(default_factory=list)
    """Rows that must not be thinned away: what was found when the loss turned non-finite."""
    version: int = 0
    """Changes whenever something was logged, so that what was made of the log can be kept."""

    def add_frame(self, blocks: list[Block]) -> None:
        """Log the blocks of one captured step."""
        self.frames.append(blocks)
        self.version += 1

    def add_pulse(self, pulse: Pulse) -> None:
        """Log one optimizer step."""
        self.pulses.append(pulse)
        self.version += 1

    def clear(self) -> None:
        """Forget everything logged so far."""
        self.frames.items.clear()
        self.pulses.items.clear()
        self.findings.clear()
        self.version += 1

    def series(self) -> pd.DataFrame:
        """The series table (see `neuraldbg.series`), ordered by step, kind and layer.

        Where two optimizers' steps saw the same layer in the same step, the later row counts.
        """
        blocks = [block for frame in self.frames.items for block in frame] + self.findings
        parts = [self._block_columns(block) for block in blocks]
        if self.pulses.items:
            parts += [self._loss_columns(), self._optimizer_columns()]
        names = ("step", "layer", "layer_index", "kind", *STATISTICS, *FLAGS, DETAIL)
        columns = {name: _concatenate(name, parts) for name in names}
        columns["rank"] = np.full(len(columns["step"]), self.rank)
        table = build_series(columns)
        target = table["target"].fillna(0.0)
        keys = [table["step"], table["layer"], table["kind"], target]
        duplicated = pd.concat(keys, axis=1).duplicated(keep="last")
        return (
            table[~duplicated]
            .sort_values(["step", "kind", "layer_index"], kind="stable")
            .reset_index(drop=True)
        )

    def _block_columns(self, block: Block) -> dict[str, Any]:
        return {
            "step": np.full(len(block.layers), block.step),
            "kind": np.full(len(block.layers), block.kind.value, dtype=object),
            "layer": np.array([layer.name if layer else None for layer in block.layers], object),
            "layer_index": np.array([layer.index if layer else -1 for layer in block.layers], int),
            **block.columns,
        }

    def _loss_columns(self) -> dict[str, Any]:
        pulses = self.pulses.items
        for pulse in pulses:
            pulse.settle()
        value = np.array([pulse.loss for pulse in pulses], dtype=float)
        return self._pulse_keys(Kind.LOSS) | {
            "value": value,
            "nonfinite_fraction": (~np.isfinite(value)).astype(float),
            "expected": np.array([pulse.expected for pulse in pulses]),
            "micro_batches": np.array([pulse.micro_batches for pulse in pulses], dtype=float),
            **_fact_columns([pulse.loss_facts for pulse in pulses]),
        }

    def _optimizer_columns(self) -> dict[str, Any]:
        pulses = self.pulses.items
        return self._pulse_keys(Kind.OPTIMIZER) | {
            "value": np.array([pulse.learning_rate for pulse in pulses]),
            "micro_batches": np.array([pulse.micro_batches for pulse in pulses], dtype=float),
            "gradient_kept": np.array([pulse.gradient_kept for pulse in pulses]),
            "step_applied": np.array([pulse.applied for pulse in pulses], dtype=float),
            **_fact_columns([pulse.optimizer_facts for pulse in pulses]),
        }

    def _pulse_keys(self, kind: Kind) -> dict[str, Any]:
        pulses = self.pulses.items
        return {
            "step": np.array([pulse.step for pulse in pulses]),
            "kind": np.full(len(pulses), kind.value, dtype=object),
            "layer": np.array([optimizer_name(pulse.optimizer) for pulse in pulses], object),
            "layer_index": np.full(len(pulses), -1),
        }


def optimizer_name(number: int) -> str | None:
    """What stands in the `layer` column of loss and optimizer rows: None for the first optimizer.

    >>> optimizer_name(0), optimizer_name(1)
    (None, 'optimizer 1')
    """
    return f"optimizer {number}" if number else None


_TEXT = ("layer", "kind", DETAIL)


def _fact_columns(facts: Sequence[Mapping[str, float | str]]) -> dict[str, np.ndarray]:
    """Facts by row turned into columns; what a row does not tell is missing."""
    names = {name: None for row in facts for name in row}
    return {name: np.array([row.get(name, _missing(name)) for row in facts]) for name in names}


def _missing(name: str) -> float | None:
    return None if name in _TEXT else np.nan


def _concatenate(name: str, parts: Sequence[dict[str, Any]]) -> np.ndarray:
    dtype = object if name in _TEXT else float
    if not parts:
        return np.zeros(0, dtype=dtype)
    return np.concatenate(
        [
            np.asarray(part[name], dtype=dtype)
            if name in part
            else np.full(len(part["step"]), _missing(name), dtype=dtype)
            for part in parts
        ]
    )
