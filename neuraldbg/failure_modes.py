"""The failure modes a run can be diagnosed with, and what is known about each.

The catalogue itself is the table ``failure_modes.csv`` beside this file, one row a mode. A new
mode is one row there, one member here, and its rows in the tables of ``neuraldbg.models``.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from types import MappingProxyType


class FailureMode(StrEnum):
    """A root cause that a person can fix, or one of the two verdicts that name none.

    >>> FailureMode("lr_blowup")
    <FailureMode.LR_BLOWUP: 'lr_blowup'>
    >>> FailureMode.HEALTHY.is_root_cause
    False
    """

    LR_BLOWUP = "lr_blowup"
    LR_TOO_LOW = "lr_too_low"
    MISSING_WARMUP = "missing_warmup"
    SCHEDULE_COLLAPSE = "schedule_collapse"
    OPTIMIZER_INSTABILITY = "optimizer_instability"
    WEIGHT_DECAY_TOO_HIGH = "weight_decay_too_high"
    CLIP_TOO_TIGHT = "clip_too_tight"
    TOO_FEW_STEPS = "too_few_steps"
    INIT_COLLAPSE = "init_collapse"
    INIT_BLOWUP = "init_blowup"
    SYMMETRIC_INIT = "symmetric_init"
    DEAD_RELU = "dead_relu"
    SATURATED_ACTIVATION = "saturated_activation"
    VANISHING_DEPTH = "vanishing_depth"
    EXPLODING_DEPTH = "exploding_depth"
    OUTPUT_ACTIVATION_MISMATCH = "output_activation_mismatch"
    WRONG_REDUCTION_DIM = "wrong_reduction_dim"
    BROADCAST_SHAPE = "broadcast_shape"
    LOSS_NUMERICS = "loss_numerics"
    UNNORMALISED_INPUT = "unnormalised_input"
    UNSCALED_TARGET = "unscaled_target"
    NAN_INPUT = "nan_input"
    LABEL_NOISE = "label_noise"
    CLASS_IMBALANCE = "class_imbalance"
    ORDERED_DATA = "ordered_data"
    MISSING_ZERO_GRAD = "missing_zero_grad"
    ACCUMULATION_SCALE = "accumulation_scale"
    PARAM_NOT_IN_OPTIMIZER = "param_not_in_optimizer"
    FROZEN_PARAMETERS = "frozen_parameters"
    DETACHED_GRAPH = "detached_graph"
    EVAL_MODE = "eval_mode"
    DROPOUT_TOO_HIGH = "dropout_too_high"
    BATCHNORM_SMALL_BATCH = "batchnorm_small_batch"
    OVERFITTING = "overfitting"
    FP16_OVERFLOW = "fp16_overflow"
    FP16_UNDERFLOW = "fp16_underflow"
    AMP_MISUSE = "amp_misuse"
    RANK_DESYNC = "rank_desync"
    HEALTHY = "healthy"
    UNKNOWN = "unknown"

    @property
    def is_root_cause(self) -> bool:
        """Whether this names something to fix, as ``healthy`` and ``unknown`` do not."""
        return self not in (FailureMode.HEALTHY, FailureMode.UNKNOWN)


@dataclass(frozen=True, slots=True)
class FailureModeFacts:
    """What the catalogue says of one failure mode."""

    mode: FailureMode
    title: str
    group: str
    primary_sign: str
    look_alikes: tuple[FailureMode | str, ...]
    separated_by: str
    remedy: str


_VERDICTS_WITHOUT_A_CAUSE = {
    FailureMode.HEALTHY: FailureModeFacts(
        mode=FailureMode.HEALTHY,
        title="Nothing is wrong",
        group="verdict",
        primary_sign="no sign of any failure mode",
        look_alikes=(FailureMode.TOO_FEW_STEPS,),
        separated_by="the loss falls at ordinary step sizes",
        remedy="nothing to change",
    ),
    FailureMode.UNKNOWN: FailureModeFacts(
        mode=FailureMode.UNKNOWN,
        title="Something is wrong that no known mode explains",
        group="verdict",
        primary_sign="signs of failure that fit none of the modes",
        look_alikes=(),
        separated_by="no mode explains the signs together",
        remedy="look at the chain of events below, from its first event on",
    ),
}


@cache
def catalogue() -> Mapping[FailureMode, FailureModeFacts]:
    """All failure modes with their facts, in the order of the catalogue's table.

    >>> catalogue()[FailureMode.LR_BLOWUP].title
    'Learning rate too high'
    """
    text = resources.files(__package__).joinpath("failure_modes.csv").read_text(encoding="utf-8")
    facts = {FailureMode(row["id"]): _facts(row) for row in csv.DictReader(text.splitlines())}
    return MappingProxyType(facts | _VERDICTS_WITHOUT_A_CAUSE)


def _facts(row: Mapping[str, str]) -> FailureModeFacts:
    return FailureModeFacts(
        mode=FailureMode(row["id"]),
        title=row["title"],
        group=row["group"],
        primary_sign=row["primary_sign"],
        look_alikes=tuple(_mode_or_words(part.strip()) for part in row["look_alikes"].split(";")),
        separated_by=row["separated_by"],
        remedy=row["remedy"],
    )


def _mode_or_words(text: str) -> FailureMode | str:
    name = text.split(" (")[0]
    return FailureMode(name) if name in set(FailureMode) else text
