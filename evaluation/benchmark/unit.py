"""One unit of the benchmark's work: a healthy program and the faults that are put into it."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import pandas as pd
import torch

from neuraldbg import NeuralDbg
from neuraldbg.evaluation.architectures import find_architecture
from neuraldbg.evaluation.benchmark.onset import find_onset
from neuraldbg.evaluation.benchmark.programs import difficulty_of, vary
from neuraldbg.evaluation.benchmark.record import RunRecord, View
from neuraldbg.evaluation.benchmark.verification import (
    HARM_LIMIT,
    LEARNED_LIMIT,
    Assessment,
    assess,
    harm_done,
)
from neuraldbg.evaluation.benchmark.views import full_view, partial_views
from neuraldbg.evaluation.faults import Fault, find_fault
from neuraldbg.evaluation.program import build
from neuraldbg.evaluation.recipe import Recipe
from neuraldbg.evaluation.training_loop import train
from neuraldbg.failure_modes import FailureMode


@dataclass(frozen=True, slots=True)
class Injection:
    """Faults that are put into a program together.

    Attributes:
        modes: one, or several that meet; the chief one first.
        severity: of all of them.
    """

    modes: tuple[FailureMode, ...]
    severity: float

    @property
    def faults(self) -> list[Fault]:
        """The faults themselves."""
        return [find_fault(mode) for mode in self.modes]

    def ground(self, recipe: Recipe) -> Recipe:
        """The healthy program that the faults are put into."""
        return reduce(lambda changed, fault: fault.ground(changed), self.faults, recipe)

    def put_into(self, ground: Recipe) -> Recipe:
        """The ground with all faults in it."""
        return reduce(lambda made, fault: fault.change(made, self.severity), self.faults, ground)

    def __str__(self) -> str:
        return f"{'+'.join(self.modes)}@{self.severity:g}"


@dataclass(frozen=True, slots=True)
class Unit:
    """One healthy program with one seed, and what is put into it.

    Attributes:
        program: name of a healthy recipe.
        seed: of its variation, weights, data and order; no two units share one.
        injections: each makes one faulty run.
        followed: whether the runs are also seen by observers with less to go on.
    """

    program: str
    seed: int
    injections: tuple[Injection, ...]
    followed: bool = False

    @property
    def name(self) -> str:
        """Identifies the unit."""
        return f"{self.program}~{self.seed}"


@dataclass(frozen=True, slots=True)
class _Outcome:
    recipe: Recipe
    untrained: Assessment
    trained: Assessment
    series: pd.DataFrame
    views: tuple[View, ...]


def run_unit(unit: Unit) -> list[RunRecord]:
    """Make all runs of a unit: every healthy twin that is needed, and the faulty runs.

    A twin that does not learn is no ground to judge a fault on: it and its faulty runs are left
    out.

    Args:
        unit: what to run; the result depends on nothing else.
    """
    recipe = vary(unit.program, unit.seed)
    records: list[RunRecord] = []
    by_ground: dict[Recipe, list[Injection]] = {recipe: []}
    for injection in unit.injections:
        by_ground.setdefault(injection.ground(recipe), []).append(injection)
    with _undisturbed():
        for ground, injections in by_ground.items():
            if not injections and len(by_ground) > 1:
                continue  # the faults have grounds of their own
            twin = _watch(ground, unit)
            if twin.trained.error > LEARNED_LIMIT:
                continue
            records.append(_healthy_record(unit, twin, len(records)))
            for injection in injections:
                outcome = _watch(injection.put_into(ground), unit)
                records.append(_faulty_record(unit, injection, twin, outcome))
    return records


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """One thread, so that sums are the same everywhere; no warnings about what faults do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def _watch(recipe: Recipe, unit: Unit) -> _Outcome:
    program = build(recipe, unit.seed)
    untrained = assess(program)
    with NeuralDbg(program.model) as debugger:
        train(program)
    if debugger.faults:
        raise RuntimeError(f"the capture failed at (step, what) {debugger.faults[0]}")
    series, steps = debugger.series, debugger.steps
    views = [full_view(series, debugger.events, steps)]
    if unit.followed:
        views += partial_views(series, steps)
    return _Outcome(recipe, untrained, assess(program), series, tuple(views))


def _healthy_record(unit: Unit, twin: _Outcome, number: int) -> RunRecord:
    name = f"{unit.name}/healthy{number or ''}"
    return _record(unit, name, twin, (), math.nan, harm=0.0, layer=None, step=None)


def _faulty_record(unit: Unit, injection: Injection, twin: _Outcome, faulty: _Outcome) -> RunRecord:
    onset = find_onset(twin.series, faulty.series)
    located = len(injection.modes) == 1 and injection.faults[0].located
    layers = dict(enumerate(_layers(faulty.series)))
    return _record(
        unit,
        f"{unit.name}/{injection}",
        faulty,
        injection.modes,
        injection.severity,
        harm=harm_done(twin.untrained, twin.trained, faulty.trained),
        layer=layers.get(onset.layer_index) if onset is not None and located else None,
        step=None if onset is None else onset.step,
    )


def _record(
    unit: Unit,
    name: str,
    outcome: _Outcome,
    causes: Sequence[FailureMode],
    severity: float,
    harm: float,
    layer: str | None,
    step: int | None,
) -> RunRecord:
    recipe = outcome.recipe
    return RunRecord(
        run=name,
        program=unit.program,
        architecture=recipe.architecture,
        family=find_architecture(recipe.architecture).family,
        dataset=recipe.dataset,
        optimizer=recipe.optimizer,
        schedule=recipe.schedule if isinstance(recipe.schedule, str) else "other",
        difficulty=difficulty_of(unit.program),
        causes=tuple(causes),
        severity=severity,
        seed=unit.seed,
        steps=outcome.views[0].steps,
        harm=harm,
        error=outcome.trained.error,
        masked=bool(causes) and harm <= HARM_LIMIT,
        layers=tuple(_layers(outcome.series)),
        layer=layer,
        step=step,
        views=outcome.views,
    )


def _layers(series: pd.DataFrame) -> list[str]:
    """Names of the layers in the order in which data flows."""
    table = series[["layer", "layer_index"]].dropna().drop_duplicates("layer_index")
    return table.sort_values("layer_index")["layer"].astype(str).tolist()
