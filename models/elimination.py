"""Exact posteriors by pgmpy's variable elimination: the route that the fast one is held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from neuraldbg.failure_modes import FailureMode
from neuraldbg.models.structure import PRESENT

if TYPE_CHECKING:
    from pgmpy.models import DiscreteBayesianNetwork


def eliminate(
    network: DiscreteBayesianNetwork, cause: FailureMode, evidence: Mapping[str, str]
) -> float:
    """The probability of one cause.

    A node that is neither the cause nor has an observed node below it sums to 1 and is left out;
    so are all observations that are missing from the evidence.

    Args:
        network: The pgmpy network of a specification.
        cause: One of its causes.
        evidence: Observation to state.
    """
    from pgmpy.inference import VariableElimination

    pruned = _prune(network, _ancestors(network, {*evidence, cause.value}))
    factor = VariableElimination(pruned).query(
        [cause.value], evidence=dict(evidence), show_progress=False
    )
    return float(factor.get_value(**{cause.value: PRESENT}))


def _ancestors(network: DiscreteBayesianNetwork, nodes: set[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(network.predecessors(node))
    return found


def _prune(network: DiscreteBayesianNetwork, nodes: set[str]) -> DiscreteBayesianNetwork:
    """The part of a network on an ancestral set of nodes, sharing the network's tables."""
    from pgmpy.models import DiscreteBayesianNetwork

    pruned = DiscreteBayesianNetwork()
    pruned.add_nodes_from(nodes)
    pruned.add_edges_from((a, b) for a, b in network.edges if a in nodes and b in nodes)
    pruned.add_cpds(*(network.get_cpds(node) for node in nodes))
    return pruned
