"""The causal graph over the events of a run, and chains through it.

An event may have brought another about when its type can do so, it began no later, the two lie
within the coupling window, and the effect lies on the way that data (or gradients) flow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.thresholds import Thresholds

_T = EventType

EFFECTS: Mapping[EventType, tuple[EventType, ...]] = {
    _T.WEIGHTS_SMALL_AT_START: (_T.ACTIVATION_FADING, _T.GRADIENT_VANISHING, _T.UPDATE_TOO_SMALL),
    _T.WEIGHTS_LARGE_AT_START: (
        _T.ACTIVATION_BLOWUP, _T.ACTIVATION_SATURATED, _T.ACTIVATION_DEAD, _T.LOSS_HIGH_AT_START,
        _T.GRADIENT_EXPLODING,
    ),
    _T.UNITS_IDENTICAL: (_T.GRADIENT_VANISHING, _T.ACTIVATION_DEAD, _T.LOSS_FLAT),
    _T.INPUT_NON_FINITE: (_T.ACTIVATION_NON_FINITE, _T.LOSS_NON_FINITE),
    _T.TARGET_NON_FINITE: (_T.LOSS_NON_FINITE,),
    _T.INPUT_OFF_SCALE: (
        _T.ACTIVATION_BLOWUP, _T.ACTIVATION_SATURATED, _T.ACTIVATION_DEAD, _T.LOSS_HIGH_AT_START,
        _T.GRADIENT_EXPLODING, _T.UPDATE_TOO_LARGE,
    ),
    _T.ACTIVATION_NON_FINITE: (_T.ACTIVATION_NON_FINITE, _T.LOSS_NON_FINITE),
    _T.ACTIVATION_FADING: (_T.GRADIENT_VANISHING, _T.LOSS_FLAT),
    _T.ACTIVATION_BLOWUP: (
        _T.ACTIVATION_SATURATED, _T.ACTIVATION_NON_FINITE, _T.LOSS_HIGH_AT_START, _T.LOSS_RISING,
        _T.GRADIENT_EXPLODING,
    ),
    _T.ACTIVATION_SATURATED: (_T.ACTIVATIONS_ALIKE, _T.GRADIENT_VANISHING, _T.LOSS_FLAT),
    _T.ACTIVATION_DEAD: (_T.ACTIVATIONS_ALIKE, _T.GRADIENT_VANISHING, _T.LOSS_FLAT),
    _T.LOSS_NON_FINITE: (_T.GRADIENT_NON_FINITE,),
    _T.LOSS_HIGH_AT_START: (_T.GRADIENT_EXPLODING, _T.UPDATE_TOO_LARGE),
    _T.LOSS_RISING: (_T.GRADIENT_EXPLODING, _T.LOSS_NON_FINITE),
    _T.GRADIENT_NOT_RESET: (
        _T.GRADIENTS_ALIGNED, _T.GRADIENT_EXPLODING, _T.UPDATE_TOO_LARGE, _T.LOSS_RISING,
    ),
    _T.GRADIENT_NON_FINITE: (_T.WEIGHTS_NON_FINITE,),
    _T.GRADIENT_VANISHING: (_T.GRADIENT_VANISHING, _T.UPDATE_TOO_SMALL, _T.LOSS_FLAT),
    _T.GRADIENT_EXPLODING: (_T.UPDATE_TOO_LARGE, _T.GRADIENT_NON_FINITE),
    _T.UPDATE_MISSING: (_T.LOSS_FLAT,),
    _T.UPDATE_TOO_SMALL: (_T.LOSS_FLAT,),
    _T.UPDATE_TOO_LARGE: (
        _T.WEIGHTS_GROWING, _T.ACTIVATION_BLOWUP, _T.ACTIVATION_SATURATED, _T.ACTIVATION_DEAD,
        _T.ACTIVATIONS_ALIKE, _T.LOSS_RISING, _T.LOSS_FLAT, _T.GRADIENTS_OPPOSED,
        _T.GRADIENT_EXPLODING,
    ),
    _T.WEIGHTS_GROWING: (_T.ACTIVATION_BLOWUP, _T.LOSS_RISING, _T.GRADIENT_EXPLODING),
    _T.WEIGHTS_NON_FINITE: (_T.ACTIVATION_NON_FINITE, _T.LOSS_NON_FINITE),
    _T.PARAMETERS_FROZEN: (_T.LOSS_FLAT, _T.UPDATE_MISSING),
    _T.PARAMETERS_UNREGISTERED: (_T.UPDATE_MISSING, _T.LOSS_FLAT),
    _T.MODULE_NEVER_CALLED: (_T.GRADIENT_CUT, _T.LOSS_FLAT),
    _T.EVALUATION_MODE: (_T.STATISTICS_LAGGING, _T.EVALUATION_GAP, _T.LOSS_FLAT),
    _T.DROPOUT_STRONG: (_T.LOSS_FLAT, _T.GRADIENT_NOISY, _T.EVALUATION_GAP),
    _T.TARGET_OFF_SCALE: (
        _T.LOSS_HIGH_AT_START, _T.GRADIENT_EXPLODING, _T.UPDATE_TOO_LARGE, _T.LOSS_RISING,
    ),
    _T.LABELS_IMBALANCED: (_T.ACTIVATIONS_ALIKE, _T.LOSS_FLAT),
    _T.BATCHES_ORDERED: (_T.LOSS_PERIODIC, _T.LOSS_SPIKING, _T.GRADIENTS_ALIGNED),
    _T.BATCH_TOO_SMALL: (_T.STATISTICS_LAGGING, _T.GRADIENT_NOISY, _T.EVALUATION_GAP),
    _T.ACTIVATION_NEAR_OVERFLOW: (_T.ACTIVATION_NON_FINITE, _T.LOSS_NON_FINITE, _T.STEP_SKIPPED),
    _T.ACTIVATIONS_ALIKE: (_T.LOSS_FLAT, _T.GRADIENT_VANISHING),
    _T.STATISTICS_LAGGING: (_T.EVALUATION_GAP, _T.VALIDATION_LOSS_RISING),
    _T.OUTPUT_OUT_OF_DOMAIN: (_T.GRADIENT_VANISHING, _T.LOSS_FLAT, _T.OPERATION_UNDEFINED),
    _T.REDUCTION_OVER_WRONG_AXIS: (_T.LOSS_FLAT,),
    _T.SHAPES_BROADCAST: (_T.LOSS_FLAT, _T.ACTIVATIONS_ALIKE),
    _T.OPERATION_UNDEFINED: (
        _T.ACTIVATION_NON_FINITE, _T.LOSS_NON_FINITE, _T.GRADIENT_NON_FINITE,
    ),
    _T.LOSS_SPIKING: (_T.GRADIENT_SPIKING, _T.LOSS_RISING),
    _T.GRADIENT_RESET_EARLY: (_T.GRADIENT_NOISY, _T.LOSS_FLAT),
    _T.MICRO_BATCHES_SUMMED: (_T.GRADIENT_EXPLODING, _T.UPDATE_TOO_LARGE, _T.LOSS_RISING),
    _T.GRADIENT_CUT: (_T.UPDATE_MISSING, _T.LOSS_FLAT),
    _T.GRADIENT_UNDERFLOW: (_T.UPDATE_TOO_SMALL, _T.LOSS_FLAT),
    _T.GRADIENT_SPIKING: (
        _T.UPDATE_TOO_LARGE, _T.UPDATE_SPIKING, _T.LOSS_SPIKING, _T.GRADIENT_NON_FINITE,
    ),
    _T.GRADIENT_NOISY: (_T.LOSS_FLAT,),
    _T.GRADIENT_CLIPPED: (_T.UPDATE_TOO_SMALL, _T.LOSS_FLAT),
    _T.GRADIENT_CLIPPED_SCALED: (_T.UPDATE_TOO_SMALL, _T.LOSS_FLAT),
    _T.STEP_SKIPPED: (_T.LOSS_FLAT,),
    _T.LEARNING_RATE_FALLING: (_T.UPDATE_TOO_SMALL, _T.LOSS_FLAT),
    _T.LEARNING_RATE_STARTS_HIGH: (
        _T.UPDATE_TOO_LARGE, _T.ACTIVATION_SATURATED, _T.ACTIVATION_DEAD, _T.LOSS_RISING,
        _T.LOSS_FLAT,
    ),
    _T.EPSILON_LOST: (_T.UPDATE_SPIKING, _T.UPDATE_TOO_LARGE, _T.WEIGHTS_NON_FINITE),
    _T.WEIGHT_DECAY_DOMINANT: (_T.WEIGHTS_SHRINKING, _T.LOSS_FLAT),
    _T.UPDATE_SPIKING: (_T.LOSS_SPIKING, _T.LOSS_RISING, _T.GRADIENT_SPIKING),
    _T.WEIGHTS_SHRINKING: (_T.ACTIVATION_FADING, _T.GRADIENT_VANISHING, _T.LOSS_FLAT),
    _T.RANKS_DIFFER: (_T.LOSS_RISING, _T.LOSS_FLAT),
}  # fmt: skip
"""What each type of event can bring about directly."""

OF_THE_WHOLE_RUN = (
    _T.LOSS_FLAT, _T.LOSS_PERIODIC, _T.LOSS_STILL_FALLING, _T.GRADIENTS_OPPOSED,
    _T.GRADIENTS_ALIGNED, _T.GRADIENT_NOISY, _T.EVALUATION_GAP,
)  # fmt: skip
"""Types judged over the whole run: they begin with it and are only ever effects."""
_FORWARD = (_T.ACTIVATION_NON_FINITE, _T.ACTIVATION_FADING, _T.ACTIVATION_SATURATED)
_BACKWARD = (_T.GRADIENT_VANISHING, _T.GRADIENT_NON_FINITE)
_FROM_ACTIVATIONS = (
    _T.ACTIVATION_NON_FINITE, _T.ACTIVATION_BLOWUP, _T.INPUT_OFF_SCALE, _T.INPUT_NON_FINITE,
    _T.WEIGHTS_LARGE_AT_START, _T.WEIGHTS_SMALL_AT_START,
)  # fmt: skip


def build_causal_graph(
    events: Iterable[SemanticEvent], thresholds: Thresholds | None = None
) -> nx.DiGraph[int]:
    """The directed acyclic graph of what may have brought what about.

    Args:
        events: The events of one run.
        thresholds: Gives the coupling window.

    Returns:
        A graph whose nodes are event ids, each with its event as attribute ``event``.

    Example:
        >>> first = SemanticEvent(0, _T.UPDATE_TOO_LARGE, "fc", 0, 3, 9, "ordinary", "huge",
        ...                       1.0, 2.0, 0.1)
        >>> second = SemanticEvent(1, _T.LOSS_RISING, None, -1, 4, 9, "falling", "rising",
        ...                        0.5, 3.0, 1.5)
        >>> build_causal_graph([second, first]).edges
        OutEdgeView([(0, 1)])
    """
    window = (thresholds or Thresholds()).coupling_window
    ordered = sorted(events, key=lambda event: event.moment)
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from((event.event_id, {"event": event}) for event in ordered)
    by_type: dict[EventType, list[SemanticEvent]] = {}
    for event in ordered:
        by_type.setdefault(event.event_type, []).append(event)
    for cause in ordered:
        for effect_type in EFFECTS.get(cause.event_type, ()):
            for effect in by_type.get(effect_type, ()):
                if _may_cause(cause, effect, window):
                    graph.add_edge(cause.event_id, effect.event_id)
    return graph


def _may_cause(cause: SemanticEvent, effect: SemanticEvent, window: int) -> bool:
    if cause.event_id == effect.event_id:
        return False
    if effect.event_type in OF_THE_WHOLE_RUN:
        return cause.event_type not in OF_THE_WHOLE_RUN
    if cause.moment >= effect.moment or effect.step_start > cause.step_end + window:
        return False
    return _on_the_way(cause, effect)


def _on_the_way(cause: SemanticEvent, effect: SemanticEvent) -> bool:
    """Whether the effect's layer can be reached from the cause's in the direction of flow."""
    if cause.layer is None or effect.layer is None:
        return True
    if effect.event_type in _BACKWARD:
        return effect.layer_index <= cause.layer_index
    if effect.event_type in _FORWARD and cause.event_type in _FROM_ACTIVATIONS:
        return effect.layer_index >= cause.layer_index
    return True


def in_causal_order(events: Iterable[SemanticEvent]) -> list[SemanticEvent]:
    """Events in causal order; those judged over the whole run come last, ties stay by number."""
    return sorted(
        events,
        key=lambda event: (event.event_type in OF_THE_WHOLE_RUN, event.moment, event.event_id),
    )


def trace_causal_chain(
    events: Sequence[SemanticEvent],
    event_type: EventType | str,
    thresholds: Thresholds | None = None,
) -> tuple[SemanticEvent, ...]:
    """The events that lead to the first event of a type, in causal order, that event last.

    Args:
        events: The events of one run.
        event_type: The member or its value.
        thresholds: Gives the coupling window.

    Returns:
        The chain, empty when no such event occurred. Of several layers in which the same type
        of event happened, the first in causal order stands for all.

    Raises:
        ValueError: the value names no event type; the message lists those that exist.
    """
    wanted = EventType.parse(event_type)
    targets = [event for event in events if event.event_type is wanted]
    if not targets:
        return ()
    target = min(targets, key=lambda event: event.moment)
    graph = build_causal_graph(events, thresholds)
    leading = [graph.nodes[node]["event"] for node in nx.ancestors(graph, target.event_id)]
    return (*first_of_each_type(e for e in leading if e.event_type is not wanted), target)


def chain_from(graph: nx.DiGraph[int], roots: Sequence[SemanticEvent]) -> tuple[SemanticEvent, ...]:
    """The events that some roots may have brought about, roots included, in causal order.

    One event stands for each type: the first.
    """
    reached = {root.event_id for root in roots}
    for root in roots:
        reached |= nx.descendants(graph, root.event_id)
    return tuple(first_of_each_type(graph.nodes[node]["event"] for node in reached))


def first_of_each_type(events: Iterable[SemanticEvent]) -> list[SemanticEvent]:
    """The first event of each type, in causal order."""
    first: dict[EventType, SemanticEvent] = {}
    for event in in_causal_order(events):
        first.setdefault(event.event_type, event)
    return list(first.values())
