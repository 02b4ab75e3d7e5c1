"""From the specification to a pgmpy network: one node each, no family above four parents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from neuraldbg.models.noisy_or import noisy_or_table
from neuraldbg.models.pgmpy_loading import load_pgmpy
from neuraldbg.models.specification import Mechanism, Observation, Specification

if TYPE_CHECKING:
    from pgmpy.factors.discrete import TabularCPD
    from pgmpy.models import DiscreteBayesianNetwork

MAX_PARENTS = 4
"""Parents of one family; a table has 2 ** parents columns."""
ABSENT, PRESENT = "absent", "present"
_BINARY = [ABSENT, PRESENT]


def build_network(specification: Specification) -> DiscreteBayesianNetwork:
    """The pgmpy network of a specification.

    A mechanism with more than four causes is divorced: groups of causes meet in noisy-OR nodes of
    their own (``stalled_learning~1``), whose plain OR it is. The result is exactly the same
    distribution (Henrion 1989; Heckerman and Breese 1996).
    """
    load_pgmpy()
    from pgmpy.models import DiscreteBayesianNetwork

    tables = [_cause_table(cause.mode.value, cause.prior) for cause in specification.causes]
    for mechanism in specification.mechanisms:
        tables.extend(_mechanism_tables(mechanism))
    tables.extend(_observation_table(observation) for observation in specification.observations)
    network = DiscreteBayesianNetwork()
    network.add_nodes_from([table.variable for table in tables])
    network.add_edges_from(
        [(parent, table.variable) for table in tables for parent in table.variables[1:]]
    )
    network.add_cpds(*tables)
    return network


def _cause_table(name: str, prior: float) -> TabularCPD:
    return _table(name, _BINARY, np.array([[1.0 - prior], [prior]]), [])


def _mechanism_tables(mechanism: Mechanism) -> Iterator[TabularCPD]:
    parents = [mode.value for mode in mechanism.strengths]
    strengths = list(mechanism.strengths.values())
    level = 0
    while len(parents) > MAX_PARENTS:
        level += 1
        groups = list(_groups(len(parents)))
        joined = [
            f"{mechanism.name}~{level}.{number}" if level > 1 else f"{mechanism.name}~{number}"
            for number in range(1, len(groups) + 1)
        ]
        for name, group in zip(joined, groups, strict=True):
            values = noisy_or_table([strengths[i] for i in group], leak=0.0)
            yield _table(name, _BINARY, values, [parents[i] for i in group])
        parents, strengths = joined, [1.0] * len(joined)
    yield _table(mechanism.name, _BINARY, noisy_or_table(strengths, mechanism.leak), parents)


def _groups(count: int) -> Iterator[range]:
    """As few groups of at most `MAX_PARENTS` as possible, of about equal size."""
    number = -(-count // MAX_PARENTS)
    bounds = [round(k * count / number) for k in range(number + 1)]
    for start, end in itertools.pairwise(bounds):
        yield range(start, end)


def _observation_table(observation: Observation) -> TabularCPD:
    values = np.array([[state.p_absent, state.p_present] for state in observation.states])
    names = [state.name for state in observation.states]
    return _table(observation.name, names, values, [observation.mechanism])


def _table(
    name: str, states: Sequence[str], values: np.ndarray, parents: Sequence[str]
) -> TabularCPD:
    from pgmpy.factors.discrete import TabularCPD

    return TabularCPD(
        name,
        len(states),
        values,
        evidence=list(parents) or None,
        evidence_card=[2] * len(parents) or None,
        state_names={name: list(states)} | {parent: list(_BINARY) for parent in parents},
    )
