"""What a run leaves behind: statistics of captured steps, and the loss of every step.

Memory is bounded: frames (captured steps) and pulses (steps) are thinned with age. What goes hands
its extremes on to what stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from neuraldbg.capture.blocks import MAIN_STATISTIC, Block, fold_block, merge_blocks
from neuraldbg.capture.thinning import ThinningList
from neuraldbg.series import DETAIL, FLAGS, STATISTICS, Kind, build_series

MAX_FRAMES = 512
MAX_FRAME_BYTES = 8_000_000
"""What all frames together may hold: models with many layers keep fewer frames."""
FEWEST_FRAMES = 48
MAX_PULSES = 8_192
MAX_FINDINGS = 1_024
"""Blocks that belong to no captured step: the first non-finite values, evaluation phases."""

Frame = list[Block]


@dataclass(slots=True)
class Pulse:
    """What is known of every optimizer step, captured or not.

    Attributes:
        step: The step.
        optimizer: Number of the optimizer, in the order of their first steps.
        loss: Mean over the step's micro-batches, NaN where no scalar loss was seen. A function
            where it still lies on an accelerator.
        norm: Norm of the whole gradient as the optimizer saw it; a function likewise.
        learning_rate: The largest of the optimizer's groups.
        micro_batches: Backward passes since the last step.
        applied: Whether the optimizer applied the step.
        loss_facts: More columns of the loss's row.
        optimizer_facts: More columns of the optimizer's row.
        lowest: Least loss among the steps that this pulse stands for.
        highest: Greatest loss among them.
    """

    step: int
    optimizer: int
    loss: float | Callable[[], float]
    norm: float | Callable[[], float]
    learning_rate: float
    micro_batches: int
    applied: bool = True
    loss_facts: Mapping[str, float | str] | None = None
    optimizer_facts: Mapping[str, float | str] | None = None
    lowest: float = np.nan
    highest: float = np.nan

    def settle(self) -> None:
        """Fetch what still lies on the accelerator."""
        self.loss, self.norm = _settled(self.loss), _settled(self.norm)

    def fold(self, kept: Pulse) -> None:
        """Hand the extremes on to the pulse that stands for this step from now on."""
        losses = [_settled(pulse.loss) for pulse in (self, kept)]
        kept.lowest = float(np.fmin.reduce([self.lowest, kept.lowest, *losses]))
        kept.highest = float(np.fmax.reduce([self.highest, kept.highest, *losses]))


def _settled(value: float | Callable[[], float]) -> float:
    return value() if callable(value) else value


def _fold_frame(gone: Frame, kept: Frame) -> None:
    of_kind = {block.kind: block for block in kept}
    for block in gone:
        if block.kind in of_kind:
            fold_block(block, of_kind[block.kind])


@dataclass(slots=True)
class RunLog:
    """Collects a run's frames and pulses in bounded memory and makes the series of them.

    Attributes:
        rank: Of this process among those that train together.
        frames: The blocks of each captured step.
        pulses: What is known of each step.
        findings: Rows that belong to no captured step and must not be thinned away.
        version: Changes whenever something was logged, so that what was made of the log can be
            kept.
        before_thinning: Called while the log is still complete, before frames are thinned.
        streaming: Whether rows are also kept for `drain_rows`.
    """

    rank: int = 0
    frames: ThinningList[Frame] = field(init=False)
    pulses: ThinningList[Pulse] = field(init=False)
    findings: list[Block] = field(default_factory=list)
    version: int = 0
    before_thinning: Callable[[], None] | None = None
    streaming: bool = False
    _fresh_frames: list[Frame] = field(default_factory=list)
    _fresh_pulses: list[Pulse] = field(default_factory=list)
    _drained_findings: int = 0

    def __post_init__(self) -> None:
        self.frames = ThinningList(MAX_FRAMES, _fold_frame, self._announce_thinning)
        self.pulses = ThinningList(MAX_PULSES, Pulse.fold)

    def _announce_thinning(self) -> None:
        if self.before_thinning is not None:
            self.before_thinning()

    def add_frame(self, blocks: Sequence[Block], step: int) -> None:
        """Log the blocks of one captured step; rows of the same layer and kind become one."""
        frame = merge_blocks(blocks, step)
        size = max(sum(block.size for block in frame), 1)
        fitting = max(MAX_FRAME_BYTES // size, FEWEST_FRAMES)
        self.frames.limit = min(self.frames.limit, fitting)
        self.frames.append(frame)
        if self.streaming:
            self._fresh_frames.append(frame)
        self.version += 1

    def add_pulse(self, pulse: Pulse) -> None:
        """Log one optimizer step."""
        self.pulses.append(pulse)
        if self.streaming:
            self._fresh_pulses.append(pulse)
        self.version += 1

    def add_rows(self, blocks: Sequence[Block]) -> None:
        """Log blocks that belong to no captured step; beyond a limit the oldest half is thinned."""
        self.findings += blocks
        if len(self.findings) > MAX_FINDINGS:
            half = MAX_FINDINGS // 2
            self._drained_findings = max(self._drained_findings - half // 2, 0)
            self.findings = self.findings[:half:2] + self.findings[half:]
        self.version += 1

    def clear(self) -> None:
        """Forget everything logged so far."""
        self.frames.items.clear()
        self.pulses.items.clear()
        self.findings.clear()
        self._fresh_frames.clear()
        self._fresh_pulses.clear()
        self._drained_findings = 0
        self.version += 1

    def series(self) -> pd.DataFrame:
        """The series table (see `neuraldbg.series`), ordered by step, kind and layer."""
        return self._table(self.frames.items, self.pulses.items, self.findings)

    @property
    def undrained(self) -> int:
        """Frames and pulses logged since the last `drain_rows`."""
        return len(self._fresh_frames) + len(self._fresh_pulses)

    def drain_rows(self) -> pd.DataFrame:
        """The rows logged since the last call, before any thinning; needs `streaming`."""
        frames, self._fresh_frames = self._fresh_frames, []
        pulses, self._fresh_pulses = self._fresh_pulses, []
        findings = self.findings[self._drained_findings :]
        self._drained_findings = len(self.findings)
        return self._table(frames, pulses, findings)

    def _table(
        self, frames: Sequence[Frame], pulses: Sequence[Pulse], findings: Sequence[Block]
    ) -> pd.DataFrame:
        parts = [_block_columns(block) for frame in frames for block in frame]
        parts += [_block_columns(block) for block in findings]
        if pulses:
            for pulse in pulses:
                pulse.settle()
            parts += [_loss_columns(pulses), _optimizer_columns(pulses)]
        names = ("step", "layer", "layer_index", "kind", *STATISTICS, *FLAGS, DETAIL)
        columns = {name: _concatenate(name, parts) for name in names}
        columns["rank"] = np.full(len(columns["step"]), self.rank)
        table = _unscaled(_one_row_each(build_series(columns)))
        return table.sort_values(["step", "kind", "layer_index"], kind="stable").reset_index(
            drop=True
        )


def _one_row_each(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the same step, layer and kind united: of each column the last known value.

    Two optimizers' steps may see the same layer in the same step.
    """
    keys = pd.DataFrame(
        {
            "step": table["step"],
            "layer": table["layer"].cat.codes,
            "kind": table["kind"].cat.codes,
            "target": table["target"].fillna(0.0),
            "evaluation": table["evaluation"].fillna(0.0),
        }
    )
    several = keys.duplicated(keep=False)
    if not several.any():
        return table
    chosen = keys[several]
    groups = chosen.groupby(list(chosen.columns), sort=False).ngroup()
    values = table[several].drop(columns=["layer", "kind"])
    values[DETAIL] = values[DETAIL].astype(object)
    united = values.groupby(groups.to_numpy()).last()
    first = table[several][~chosen.duplicated()]
    numbers = groups[~chosen.duplicated()].to_numpy()
    for name in united.columns:
        column = united[name].to_numpy()[numbers]
        first = first.assign(**{name: pd.Categorical(column) if name == DETAIL else column})
    return pd.concat([table[~several], first], ignore_index=True).astype(
        {name: table[name].dtype for name in ("layer", "kind")}
    )


def _unscaled(table: pd.DataFrame) -> pd.DataFrame:
    """Divide by the scale of a gradient scaler what was read while it was multiplied with it."""
    scales = table.loc[table["loss_scale"].notna()].groupby("step")["loss_scale"].last()
    if scales.empty:
        return table
    scale = table["step"].map(scales).astype("float32").to_numpy()
    loss = (table["kind"] == Kind.LOSS.value) & (table["evaluation"].fillna(0.0) == 0.0)
    kept = (table["loss_scaled"] == 1) & (table["kind"] == Kind.GRADIENT.value)
    inside = table["kind"] == Kind.OUTPUT_GRADIENT.value  # read before anybody can unscale it
    for chosen, names in (
        (loss, _OF_THE_LOSS),
        (kept, _OF_THE_GRADIENT),
        (inside, (*_OF_THE_GRADIENT, "lowest", "highest")),
    ):
        rows = chosen.to_numpy() & ~np.isnan(scale)
        for name in names:
            table.loc[rows, name] = table.loc[rows, name] / scale[rows]
    return table


_OF_THE_LOSS = ("value", "expected", "lowest", "highest")
_OF_THE_GRADIENT = ("norm", "rms", "mean", "std", "max_abs")


def _block_columns(block: Block) -> dict[str, Any]:
    columns = dict(block.columns)
    main = columns.get(MAIN_STATISTIC.get(block.kind, ""))
    if main is not None:
        columns.setdefault("lowest", main)
        columns.setdefault("highest", main)
    return {
        "step": np.full(len(block.layers), block.step),
        "kind": np.full(len(block.layers), block.kind.value, dtype=object),
        "layer": np.array([_name(layer) for layer in block.layers], object),
        "layer_index": np.array([layer.index if layer else -1 for layer in block.layers], int),
        **columns,
    }


def _name(layer: Any) -> str | None:
    return None if layer is None else sys.intern(layer.name)


def _loss_columns(pulses: Sequence[Pulse]) -> dict[str, Any]:
    value = np.array([pulse.loss for pulse in pulses], dtype=float)
    return _pulse_keys(pulses, Kind.LOSS) | {
        "value": value,
        "norm": np.array([pulse.norm for pulse in pulses], dtype=float),
        "lowest": np.fmin([pulse.lowest for pulse in pulses], value),
        "highest": np.fmax([pulse.highest for pulse in pulses], value),
        "nonfinite_fraction": (~np.isfinite(value)).astype(float),
        "micro_batches": np.array([pulse.micro_batches for pulse in pulses], dtype=float),
        **_fact_columns([pulse.loss_facts or {} for pulse in pulses]),
    }


def _optimizer_columns(pulses: Sequence[Pulse]) -> dict[str, Any]:
    facts = _fact_columns([pulse.optimizer_facts or {} for pulse in pulses])
    applied = np.array([pulse.applied for pulse in pulses], dtype=float)
    # A fused optimizer is called at a skipped step too, and tells so itself.
    told = facts.get("step_applied", np.full(len(pulses), np.nan)).astype(float)
    return _pulse_keys(pulses, Kind.OPTIMIZER) | {
        "value": np.array([pulse.learning_rate for pulse in pulses]),
        "micro_batches": np.array([pulse.micro_batches for pulse in pulses], dtype=float),
        **facts,
        "step_applied": np.where(np.isnan(told), applied, told),
    }


def _pulse_keys(pulses: Sequence[Pulse], kind: Kind) -> dict[str, Any]:
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
    names = dict.fromkeys(name for row in facts for name in row)
    return {name: np.array([row.get(name, _missing(name)) for row in facts]) for name in names}


def _missing(name: str) -> float | None:
    return None if name in _TEXT else np.nan


def _concatenate(name: str, parts: Sequence[dict[str, Any]]) -> np.ndarray:
    dtype: type = np.float32 if name in STATISTICS or name in FLAGS else float
    dtype = object if name in _TEXT else dtype
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
