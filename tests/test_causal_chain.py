"""Chains of events: acyclic, within the coupling window, the way data flows."""

from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_events import semantic_events

from neuraldbg import EventType, SemanticEvent, Thresholds
from neuraldbg.causal_chain import (
    EFFECTS,
    OF_THE_WHOLE_RUN,
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


# The first draw builds the strategy, which a slow machine does not do within a second.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(semantic_events(), max_size=14))
def test_the_graph_has_no_cycle_and_knows_its_effects(events: list[SemanticEvent]) -> None:
    graph = build_causal_graph(numbered(events))
    assert nx.is_directed_acyclic_graph(graph)
    for a, b in graph.edges:
        cause, effect = graph.nodes[a]["event"], graph.nodes[b]["event"]
        assert effect.event_type in EFFECTS[cause.event_type]
        assert effect.event_type in OF_THE_WHOLE_RUN or cause.moment < effect.moment


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


WHOLE_RUN = {EventType.LOSS_FLAT, EventType.GRADIENTS_OPPOSED, EventType.GRADIENTS_ALIGNED}
FORWARD = {
    EventType.ACTIVATION_NON_FINITE,
    EventType.ACTIVATION_FADING,
    EventType.ACTIVATION_SATURATED,
}
BACKWARD = {EventType.GRADIENT_VANISHING, EventType.GRADIENT_NON_FINITE}
FROM_THE_FORWARD_PASS = {
    EventType.ACTIVATION_NON_FINITE,
    EventType.ACTIVATION_BLOWUP,
    EventType.INPUT_OFF_SCALE,
    EventType.INPUT_NON_FINITE,
    EventType.WEIGHTS_LARGE_AT_START,
    EventType.WEIGHTS_SMALL_AT_START,
}


def slowly_coupled(cause: SemanticEvent, effect: SemanticEvent, window: int) -> bool:
    """The rules of coupling, told once more and one at a time."""
    if effect.event_type not in EFFECTS.get(cause.event_type, ()):
        return False
    if effect.event_type in WHOLE_RUN:
        return cause.event_type not in WHOLE_RUN
    begins_later = cause.moment < effect.moment
    near = effect.step_start - cause.step_end <= window
    downstream = True
    if cause.layer is not None and effect.layer is not None:
        if effect.event_type in BACKWARD:
            downstream = cause.layer_index >= effect.layer_index
        elif effect.event_type in FORWARD and cause.event_type in FROM_THE_FORWARD_PASS:
            downstream = cause.layer_index <= effect.layer_index
    return begins_later and near and downstream


def slow_ancestors(
    events: list[SemanticEvent], target: SemanticEvent, window: int
) -> set[SemanticEvent]:
    found: set[SemanticEvent] = set()
    waiting = [target]
    while waiting:
        effect = waiting.pop()
        for cause in events:
            if cause not in found and slowly_coupled(cause, effect, window):
                found.add(cause)
                waiting.append(cause)
    return found


@st.composite
def crowded_events(draw: st.DrawFn) -> list[SemanticEvent]:
    """Few types, steps and layers, so that most events have to do with each other."""
    kinds = [
        EventType.INPUT_OFF_SCALE, EventType.ACTIVATION_BLOWUP, EventType.ACTIVATION_SATURATED,
        EventType.ACTIVATION_NON_FINITE, EventType.GRADIENT_VANISHING,
        EventType.GRADIENT_EXPLODING, EventType.UPDATE_TOO_LARGE, EventType.LOSS_FLAT,
    ]  # fmt: skip
    return numbered(
        [
            event(0, draw(st.sampled_from(kinds)), start, start + draw(st.integers(0, 3)), layer)
            for start, layer in draw(
                st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 3)), max_size=12)
            )
        ]
    )


@given(crowded_events(), st.integers(0, 6))
def test_edges_and_ancestors_agree_with_a_pairwise_search(
    events: list[SemanticEvent], window: int
) -> None:
    graph = build_causal_graph(events, Thresholds(coupling_window=window))
    assert set(graph.edges) == {
        (a.event_id, b.event_id) for a in events for b in events if slowly_coupled(a, b, window)
    }
    for target in events:
        expected = {e.event_id for e in slow_ancestors(events, target, window)}
        assert nx.ancestors(graph, target.event_id) == expected


@given(crowded_events(), st.sampled_from([EventType.LOSS_FLAT, EventType.GRADIENT_VANISHING]))
def test_a_chain_holds_the_first_ancestor_of_each_type(
    events: list[SemanticEvent], wanted: EventType
) -> None:
    chain = trace_causal_chain(events, wanted)
    targets = [e for e in events if e.event_type is wanted]
    if not targets:
        assert chain == ()
        return
    first: dict[EventType, SemanticEvent] = {}
    for ancestor in sorted(slow_ancestors(events, targets[0], 5), key=lambda e: e.event_id):
        first.setdefault(ancestor.event_type, ancestor)
    first.pop(wanted, None)
    assert set(chain[:-1]) == set(first.values())
    assert chain[-1] == targets[0]
    assert trace_causal_chain(events, wanted.value) == chain


def test_of_events_at_one_moment_the_first_in_the_table_stands_for_all() -> None:
    ranks = [
        replace(event(number, EventType.UPDATE_TOO_LARGE, 3, layer=0), rank=number)
        for number in range(16)
    ]
    rising = event(16, EventType.LOSS_RISING, 4)
    for first, second in pairwise(ranks):
        assert trace_causal_chain([first, second, rising], rising.event_type) == (first, rising)
