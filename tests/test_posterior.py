"""The posterior is exact: against brute force over every variable, and by a second route."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuraldbg.failure_modes import FailureMode
from neuraldbg.models import (
    Cause,
    FailureNetwork,
    Mechanism,
    Observation,
    Specification,
    State,
    default_network,
    default_specification,
    enumerate_causes,
)
from neuraldbg.models.elimination import eliminate
from neuraldbg.models.message_passing import pass_messages
from neuraldbg.models.noisy_or import noisy_or_table
from neuraldbg.models.structure import MAX_PARENTS, build_network
from neuraldbg.series import Kind

NETWORK = default_network()
SPECIFICATION = default_specification()


def random_specification(seed: int) -> Specification:
    """A small network with a mechanism of more causes than a family may have parents."""
    draw = random.Random(seed)
    modes = [mode for mode in FailureMode if mode.is_root_cause][:6]
    causes = tuple(Cause(mode, draw.uniform(0.05, 0.5)) for mode in modes)

    def mechanism(name: str, count: int) -> Mechanism:
        chosen = draw.sample(modes, count)
        strengths = {mode: draw.uniform(0.1, 0.95) for mode in chosen}
        return Mechanism(name, draw.uniform(0.01, 0.2), strengths, {})

    def observation(name: str, parent: str, states: int) -> Observation:
        present, absent = (
            np.array([draw.uniform(0.1, 1.0) for _ in range(states)]) for _ in range(2)
        )
        present, absent = present / present.sum(), absent / absent.sum()
        return Observation(
            name,
            parent,
            tuple(
                State(f"s{k}", (), "", "", 0.0, float(present[k]), float(absent[k]), "")
                for k in range(states)
            ),
            Kind.LOSS,
            "value",
            1,
        )

    return Specification(
        causes,
        (mechanism("m_many", 6), mechanism("m_few", 2)),
        (
            observation("o1", "m_many", 3),
            observation("o2", "m_many", 2),
            observation("o3", "m_few", 3),
        ),
    )


def brute_force(specification: Specification, evidence: dict[str, str]) -> dict[str, float]:
    """Sum the joint over every assignment of every cause and mechanism, one by one."""
    totals: dict[str, float] = {cause.mode.value: 0.0 for cause in specification.causes}
    totals["healthy"] = everything = 0.0
    for present in itertools.product((False, True), repeat=len(specification.causes)):
        on = {c.mode for c, p in zip(specification.causes, present, strict=True) if p}
        prior = math.prod(
            cause.prior if cause.mode in on else 1 - cause.prior for cause in specification.causes
        )
        for active in itertools.product((False, True), repeat=len(specification.mechanisms)):
            joint = prior
            for mechanism, is_active in zip(specification.mechanisms, active, strict=True):
                absent = 1 - mechanism.leak
                for mode, strength in mechanism.strengths.items():
                    if mode in on:
                        absent *= 1 - strength
                joint *= 1 - absent if is_active else absent
                for observation in specification.observations:
                    if observation.mechanism == mechanism.name and observation.name in evidence:
                        state = observation.state(evidence[observation.name])
                        joint *= state.p_present if is_active else state.p_absent
            everything += joint
            for mode in on:
                totals[mode.value] += joint
            if not on:
                totals["healthy"] += joint
    return {name: total / everything for name, total in totals.items()}


@pytest.mark.parametrize("seed", range(6))
def test_elimination_equals_brute_force_on_small_networks(seed: int) -> None:
    specification = random_specification(seed)
    draw = random.Random(seed)
    evidence = {
        o.name: draw.choice(o.states).name
        for o in specification.observations
        if draw.random() < 0.8
    }
    expected = brute_force(specification, evidence)
    posterior = FailureNetwork(specification).posterior(evidence)
    for mode, probability in posterior.causes.items():
        assert probability == pytest.approx(expected[mode.value], abs=1e-12)
    assert posterior.healthy == pytest.approx(expected["healthy"], abs=1e-12)


@st.composite
def evidences(draw: st.DrawFn) -> dict[str, str]:
    """Any states of any observations of the shipped network; some are missing."""
    return {
        o.name: draw(st.sampled_from([state.name for state in o.states]))
        for o in SPECIFICATION.observations
        if draw(st.booleans())
    }


def part_of_the_network(draw: random.Random) -> Specification:
    """The shipped network with some of its causes, so few that their sets can be enumerated."""
    causes = draw.sample(SPECIFICATION.causes, 14)
    modes = {cause.mode for cause in causes}
    mechanisms = tuple(
        replace(m, strengths={mode: p for mode, p in m.strengths.items() if mode in modes})
        for m in SPECIFICATION.mechanisms
    )
    return Specification(tuple(causes), mechanisms, SPECIFICATION.observations)


@settings(max_examples=25, deadline=None)
@given(evidences(), st.randoms(use_true_random=False))
def test_messages_equal_enumeration_on_parts_of_the_network(
    evidence: dict[str, str], draw: random.Random
) -> None:
    part = part_of_the_network(draw)
    passed, enumerated = pass_messages(part, evidence), enumerate_causes(part, evidence)
    for mode, probability in passed.causes.items():
        assert probability == pytest.approx(enumerated.causes[mode], abs=1e-9)
    assert passed.healthy == pytest.approx(enumerated.healthy, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_messages_equal_elimination_by_pgmpy_on_the_whole_network(seed: int) -> None:
    draw = random.Random(seed)
    evidence = {
        o.name: draw.choice(o.states).name
        for o in SPECIFICATION.observations
        if draw.random() < 0.8
    }
    passed = NETWORK.posterior(evidence)
    for mode in draw.sample(list(passed.causes), 5):
        eliminated = eliminate(NETWORK.pgmpy, mode, evidence)
        assert passed.causes[mode] == pytest.approx(eliminated, abs=1e-9)


def test_without_evidence_the_posterior_is_the_prior() -> None:
    posterior = NETWORK.posterior({})
    for cause in SPECIFICATION.causes:
        assert posterior.causes[cause.mode] == pytest.approx(cause.prior, abs=1e-12)
    healthy = math.prod(1 - cause.prior for cause in SPECIFICATION.causes)
    assert posterior.healthy == pytest.approx(healthy, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(evidences())
def test_missing_evidence_drops_out(evidence: dict[str, str]) -> None:
    """Summing over the states of an unobserved node gives the posterior without it."""
    name = SPECIFICATION.observations[len(evidence) % len(SPECIFICATION.observations)].name
    known = {key: state for key, state in evidence.items() if key != name}
    base = NETWORK.posterior(known)
    observation = SPECIFICATION.observation(name)
    mixed = 0.0
    weights: list[float] = []
    for state in observation.states:
        weights.append(_probability_of(known | {name: state.name}) / _probability_of(known))
        posterior = NETWORK.posterior(known | {name: state.name})
        mixed += weights[-1] * posterior.healthy
    assert sum(weights) == pytest.approx(1.0, abs=1e-9)
    assert mixed == pytest.approx(base.healthy, abs=1e-9)


def _probability_of(evidence: dict[str, str]) -> float:
    """P(evidence), by Bayes' rule from the posterior of health: P(e | healthy) P(h) / P(h | e)."""
    likelihood = 1.0
    for mechanism in SPECIFICATION.mechanisms:
        absent = present = 1.0
        for observation in SPECIFICATION.observations:
            if observation.mechanism == mechanism.name and observation.name in evidence:
                state = observation.state(evidence[observation.name])
                absent *= state.p_absent
                present *= state.p_present
        likelihood *= (1 - mechanism.leak) * absent + mechanism.leak * present
    prior = math.prod(1 - cause.prior for cause in SPECIFICATION.causes)
    return likelihood * prior / NETWORK.posterior(evidence).healthy


def test_no_family_has_more_than_four_parents_and_every_table_is_a_distribution() -> None:
    network = build_network(SPECIFICATION)
    assert network.check_model()
    assert max(network.in_degree(node) for node in network.nodes) <= MAX_PARENTS == 4


@pytest.mark.parametrize("causes", [1, 4, 5, 9, 17])
def test_divorced_families_are_the_same_noisy_or(causes: int) -> None:
    modes = [mode for mode in FailureMode if mode.is_root_cause][:causes]
    draw = random.Random(causes)
    strengths = {mode: draw.uniform(0.05, 0.95) for mode in modes}
    specification = Specification(
        tuple(Cause(mode, 0.5) for mode in modes),
        (Mechanism("m", 0.03, strengths, {}),),
        (),
    )
    from pgmpy.inference import VariableElimination

    engine = VariableElimination(build_network(specification))
    for _ in range(5):
        given_states = {mode.value: draw.choice(("absent", "present")) for mode in modes}
        factor = engine.query(["m"], evidence=given_states, show_progress=False)
        absent = 0.97 * math.prod(
            1 - strengths[mode] for mode in modes if given_states[mode.value] == "present"
        )
        assert factor.get_value(m="absent") == pytest.approx(absent, abs=1e-12)


def test_noisy_or_columns_count_with_the_last_parent_fastest() -> None:
    table = noisy_or_table([0.5, 0.25], leak=0.1)
    assert table[0].tolist() == pytest.approx([0.9, 0.9 * 0.75, 0.9 * 0.5, 0.9 * 0.5 * 0.75])


def test_unknown_evidence_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"no observation 'loss'.*loss_turn"):
        NETWORK.posterior({"loss": "flat"})
    with pytest.raises(KeyError, match=r"has no state 'flatter'.*falls, slow, flat"):
        NETWORK.posterior({"loss_progress": "flatter"})
