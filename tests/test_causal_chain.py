"""Chains of events: acyclic, within the coupling window, the way data flows."""

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_events import semantic_events

from neuraldbg import EventType, SemanticEvent, Thresholds
from neuraldbg.causal_chain import (
    EFFECTS,
    build_causal_graph,
    in_causal_order,
    trace_causal_chain,
)


def event(
    number: int, kind: EventType, start: int, end: int | None = None, layer: int | None = None
) -> SemanticEvent:
    name = None if layer is None else f"layer{layer}"
    index = -1 if layer is None else layer
    last = start if end is None else end
    return SemanticEvent(number, kind, name, index, start, last, "a", "b", 1.0, 1.0, 1.0)


def numbered(events: list[SemanticEvent]) -> list[SemanticEvent]:
    """The events with the ids that a table would give them."""
    return [replace(e, event_id=k) for k, e in enumerate(sorted(events, key=lambda e: e.moment))]


@given(st.lists(semantic_events(), max_size=14))
def test_the_graph_has_no_cycle_and_knows_its_effects(events: list[SemanticEvent]) -> None:
    graph = build_causal_graph(numbered(events))
    assert nx.is_directed_acyclic_graph(graph)
    for a, b in graph.edges:
        cause, effect = graph.nodes[a]["event"], graph.nodes[b]["event"]
        assert effect.event_type in EFFECTS[cause.event_type]
        assert (
            effect.event_type is EventType.LOSS_FLAT
            or "opposed" in effect.event_type
            or ("aligned" in effect.event_type or cause.moment < effect.moment)
        )


@given(st.lists(semantic_events(), max_size=10), st.sampled_from(list(EventType)))
def test_a_chain_is_what_leads_to_the_first_event_of_its_type(
    events: list[SemanticEvent], wanted: EventType
) -> None:
    events = numbered(events)
    chain = trace_causal_chain(events, wanted.value)
    targets = [e for e in events if e.event_type is wanted]
    if not targets:
        assert chain == ()
        return
    target = min(targets, key=lambda e: e.moment)
    assert chain[-1] == target
    graph = build_causal_graph(events)
    leading = {target.event_id}
    for _ in events:  # a slow closure: whatever has an edge into the set joins it
        leading |= {a for a, b in graph.edges if b in leading}
    types = {e.event_type for e in events if e.event_id in leading} - {wanted}
    assert {e.event_type for e in chain[:-1]} == types
    assert list(chain[:-1]) == in_causal_order(chain[:-1])


def test_events_further_apart_than_the_window_are_not_coupled() -> None:
    update = event(0, EventType.UPDATE_TOO_LARGE, 10, 12, layer=0)
    near = event(1, EventType.LOSS_RISING, 17)
    far = event(2, EventType.LOSS_RISING, 18)
    assert list(build_causal_graph([update, near, far]).edges) == [(0, 1)]
    wide = Thresholds(coupling_window=6)
    assert list(build_causal_graph([update, near, far], wide).edges) == [(0, 1), (0, 2)]


def test_gradients_vanish_towards_the_input_only() -> None:
    dead = event(0, EventType.ACTIVATION_DEAD, 5, 9, layer=3)
    below = event(1, EventType.GRADIENT_VANISHING, 5, layer=1)
    above = event(2, EventType.GRADIENT_VANISHING, 5, layer=6)
    edges = build_causal_graph([dead, below, above]).edges
    assert (0, 1) in edges
    assert (0, 2) not in edges


def test_an_unknown_type_is_refused_with_the_types_there_are() -> None:
    with pytest.raises(ValueError, match=r"'loss_sad' is no event type.*loss_rising"):
        trace_causal_chain([], "loss_sad")
