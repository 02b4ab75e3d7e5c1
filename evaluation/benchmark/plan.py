"""Which runs the benchmark makes: faults spread evenly over modes, families and severities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np

from neuraldbg.evaluation.architectures import find_architecture
from neuraldbg.evaluation.benchmark.programs import program_names, vary
from neuraldbg.evaluation.benchmark.unit import Injection, Unit
from neuraldbg.evaluation.faults import FAULTS
from neuraldbg.failure_modes import FailureMode

_M = FailureMode
FAULTS_PER_UNIT = 2
"""Faulty runs beside one healthy twin: more than a third of all runs are healthy."""
SEVERITIES = (0.5, 1.0, 1.5, 2.0)
FOLLOWED_EVERY = 8
"""Units between two whose runs are also seen along the way and with steps left out."""
DOUBLED_EVERY = 12
"""Units between two with a double fault."""
DOUBLE_FAULTS: tuple[tuple[FailureMode, FailureMode], ...] = (
    (_M.UNNORMALISED_INPUT, _M.LR_BLOWUP),
    (_M.INIT_COLLAPSE, _M.LR_TOO_LOW),
    (_M.LABEL_NOISE, _M.CLASS_IMBALANCE),
    (_M.DROPOUT_TOO_HIGH, _M.LR_TOO_LOW),
    (_M.FROZEN_PARAMETERS, _M.UNNORMALISED_INPUT),
    (_M.PARAM_NOT_IN_OPTIMIZER, _M.LR_TOO_LOW),
    (_M.MISSING_ZERO_GRAD, _M.WEIGHT_DECAY_TOO_HIGH),
    (_M.UNSCALED_TARGET, _M.UNNORMALISED_INPUT),
    (_M.DEAD_RELU, _M.WEIGHT_DECAY_TOO_HIGH),
    (_M.OUTPUT_ACTIVATION_MISMATCH, _M.LR_TOO_LOW),
    (_M.EVAL_MODE, _M.ORDERED_DATA),
    (_M.SCHEDULE_COLLAPSE, _M.INIT_COLLAPSE),
)
"""Pairs of faults that meet in practice; the first is named first, both count."""


def plan_units(runs: int, seed: int = 0) -> list[Unit]:
    """Units that together make at least so many runs, if every twin learns.

    Programs take turns. Each gets the faults that suit it and that had the fewest runs so far,
    first in all, then in its family; so rare faults are made wherever they can be.

    Args:
        runs: how many runs are wanted.
        seed: another seed gives other runs of the same kind.

    Raises:
        ValueError: runs is less than 1.

    Example:
        >>> units = plan_units(30)
        >>> sum(planned_runs(unit) for unit in units) >= 30, units == plan_units(30)
        (True, True)
    """
    if runs < 1:
        raise ValueError(f"runs={runs} must be at least 1")
    programs = program_names()
    draw = np.random.default_rng(seed)
    used: Counter[object] = Counter()
    units: list[Unit] = []
    total = 0
    while total < runs:
        number = len(units)
        if number % len(programs) == 0:
            turn = draw.permutation(len(programs))
        program = programs[turn[number % len(programs)]]
        unit = Unit(
            program,
            seed=1_000_000 * seed + number,
            injections=_injections(program, number, used, draw),
            followed=number % FOLLOWED_EVERY == 0,
        )
        units.append(unit)
        total += planned_runs(unit)
    return units


def planned_runs(unit: Unit) -> int:
    """How many runs a unit makes if its twins learn."""
    recipe = vary(unit.program, unit.seed)
    grounds = {injection.ground(recipe) for injection in unit.injections} or {recipe}
    return len(grounds) + len(unit.injections)


def _injections(
    program: str, number: int, used: Counter[object], draw: np.random.Generator
) -> tuple[Injection, ...]:
    chosen: list[tuple[FailureMode, ...]] = []
    family = _family(program)
    pairs = _suitable_pairs(program)
    if number % DOUBLED_EVERY == 0 and pairs:
        chosen.append(min(pairs, key=lambda pair: (used[pair], draw.random())))
    for _ in range(FAULTS_PER_UNIT - len(chosen)):
        single = [mode for mode in _suitable(program) if (mode,) not in chosen]
        if single:
            rarest = min(single, key=lambda m: (used[m], used[m, family], draw.random()))
            chosen.append((rarest,))
    for modes in chosen:
        used[modes if len(modes) > 1 else modes[0]] += 1
        used[modes[0], family] += 1
    severities = draw.choice(SEVERITIES, size=len(chosen))
    return tuple(
        Injection(modes, float(severity))
        for modes, severity in zip(chosen, severities, strict=True)
    )


@cache
def _family(program: str) -> str:
    return find_architecture(vary(program, 0).architecture).family


@cache
def _suitable(program: str) -> Sequence[FailureMode]:
    recipe = vary(program, 0)
    return [mode for mode, fault in FAULTS.items() if fault.applies(recipe)]


@cache
def _suitable_pairs(program: str) -> Sequence[tuple[FailureMode, FailureMode]]:
    suitable = set(_suitable(program))
    return [pair for pair in DOUBLE_FAULTS if suitable.issuperset(pair)]
