"""Exact posteriors by pgmpy's variable elimination on the network pruned to what was observed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from neuraldbg.models.posterior import Posterior, posterior_from_joint
from neuraldbg.models.specification import Specification

if TYPE_CHECKING:
    from pgmpy.models import DiscreteBayesianNetwork


def eliminate(
    network: DiscreteBayesianNetwork, specification: Specification, evidence: Mapping[str, str]
) -> Posterior:
    """The posterior of all causes, from one joint query over them.

    A node that is no cause and has no observed node below it sums to 1 and is left out; so are
    all observations that are missing from the evidence.

    Args:
        network: The pgmpy network of the specification.
        specification: What it was built from.
        evidence: Observation to state.
    """
    from pgmpy.inference import VariableElimination

    causes = [cause.mode for cause in specification.causes]
    names = [cause.value for cause in causes]
    relevant = _ancestors(network, set(evidence)) | set(names)
    pruned = _prune(network, relevant)
    factor = VariableElimination(pruned).query(
        names, evidence=dict(evidence), joint=True, show_progress=False
    )
    axes = [factor.variables.index(name) for name in names]
    joint = np.asarray(factor.values, dtype=np.float64).transpose(axes)
    return posterior_from_joint(joint / joint.sum(), causes, evidence)


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
