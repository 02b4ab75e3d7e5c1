"""What is kept of one benchmark run: its true cause, and what an observer saw of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from neuraldbg.failure_modes import FailureMode
from neuraldbg.models.evidence import Observed

FULL = "full"
"""Name of the view of all that was captured, at the end of the run."""

Difficulty = Literal["easy", "hard"]


@dataclass(frozen=True, slots=True)
class View:
    """What an observer has seen of a run.

    Attributes:
        name: ``full``; ``step 32`` when asked after that many steps; ``every 10th`` when only
            every tenth captured step is kept.
        steps: steps the run had when it was asked.
        events: the event table.
        observed: of what the series held values, at how many steps and in how many layers.
        features: numbers that summarise the series, by name; see ``run_features``.
    """

    name: str
    steps: int
    events: pd.DataFrame
    observed: Observed
    features: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of the benchmark.

    Attributes:
        run: identifies it: program, causes, severity and seed.
        program: the healthy recipe it was made from, by name; intervals are taken over these.
        architecture: a name in ``ARCHITECTURES``.
        family: the architecture's; splits hold out whole families.
        dataset: a name in ``DATASETS``.
        optimizer: a name in ``OPTIMIZERS``.
        schedule: a name in ``SCHEDULES``.
        difficulty: of telling that the healthy program is healthy.
        causes: the faults in it, the chief one first; empty for a healthy run.
        severity: 0 mild, 1 plain, more drastic; NaN for a healthy run.
        seed: of weights, data and order.
        steps: optimizer steps.
        harm: share of the twin's progress that the faults cost; see ``twins``. 0 for a healthy
            run.
        error: how wrong the model was at the end: 0 perfect, 1 no better than a constant.
        masked: whether the faults did no measurable harm.
        layers: names of the layers, in the order in which data flows.
        layer: the one where the fault originates; None where no single layer is to blame.
        step: the first step that departed from the twin's; None for a healthy run.
        views: what was seen of it; the first is the full one.
    """

    run: str
    program: str
    architecture: str
    family: str
    dataset: str
    optimizer: str
    schedule: str
    difficulty: Difficulty
    causes: tuple[FailureMode, ...]
    severity: float
    seed: int
    steps: int
    harm: float
    error: float
    masked: bool
    layers: tuple[str, ...]
    layer: str | None
    step: int | None
    views: tuple[View, ...]

    @property
    def cause(self) -> FailureMode:
        """The chief cause; ``healthy`` where there is none."""
        return self.causes[0] if self.causes else FailureMode.HEALTHY

    @property
    def full(self) -> View:
        """The view of all that was captured."""
        return self.views[0]
