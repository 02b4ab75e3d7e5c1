"""From a posterior, its findings and the events of a run to ranked hypotheses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from neuraldbg.causal_chain import chain_from, in_causal_order
from neuraldbg.events import SemanticEvent
from neuraldbg.failure_modes import FailureMode
from neuraldbg.hypotheses import CausalHypothesis, Finding
from neuraldbg.remedies import remedy_for

DECISIVE = 0.1
"""Weight of evidence (natural log) below which a finding is not worth telling: 10 % either way."""


@dataclass(frozen=True, slots=True)
class Support:
    """What a network has to say about one cause.

    Attributes:
        findings: Every piece of evidence with its weight, the heaviest first.
        events: For each observation the events from which its state was read.
    """

    findings: Sequence[Finding]
    events: Mapping[str, Sequence[SemanticEvent]]


def rank_hypotheses(
    probabilities: Sequence[tuple[FailureMode, float]],
    supports: Mapping[FailureMode, Support],
    graph: nx.DiGraph[int],
) -> list[CausalHypothesis]:
    """One hypothesis for each cause, most probable first.

    A cause is placed where the sign that is closest to it began: the first step of that sign's
    events, and the layer of the earliest.

    Args:
        probabilities: Causes with their posterior probabilities.
        supports: What speaks for and against each cause; a cause without an entry has neither.
        graph: The causal graph over the run's events.

    Returns:
        Hypotheses in descending order of probability; ties keep the given order.
    """
    ordered = sorted(probabilities, key=lambda item: -item[1])
    return [_hypothesis(mode, p, supports.get(mode, _NOTHING), graph) for mode, p in ordered]


_NOTHING = Support((), {})


def _hypothesis(
    mode: FailureMode, probability: float, support: Support, graph: nx.DiGraph[int]
) -> CausalHypothesis:
    speaking_for = [f for f in support.findings if f.weight > DECISIVE]
    origin = _origin(mode, speaking_for, support, graph)
    evidence = in_causal_order(
        {
            event.event_id: event
            for finding in speaking_for
            for event in support.events.get(finding.observation, ())
        }.values()
    )
    return CausalHypothesis(
        cause=mode,
        probability=probability,
        layer=origin[0].layer if origin else None,
        step=origin[0].step_start if origin else None,
        evidence=tuple(evidence),
        against=tuple(f for f in support.findings if f.weight < -DECISIVE),
        chain=chain_from(graph, origin),
        remedy=remedy_for(mode, evidence),
        findings=tuple(speaking_for),
    )


def _origin(
    mode: FailureMode, speaking_for: Sequence[Finding], support: Support, graph: nx.DiGraph[int]
) -> list[SemanticEvent]:
    """The events of the sign that is closest to the cause itself, in causal order.

    For ``unknown``, which has no sign of its own, the first event that nothing known led to.
    """
    if mode is FailureMode.UNKNOWN:
        roots = [graph.nodes[node]["event"] for node in graph if not graph.in_degree(node)]
        return in_causal_order(roots)[:1]
    closest = sorted(speaking_for, key=lambda finding: (-finding.directness, -finding.weight))
    for finding in closest:
        events = support.events.get(finding.observation, ())
        if events:
            return in_causal_order(events)
    return []
