"""What to change, with the numbers of the run at hand where they tell how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.failure_modes import FailureMode, catalogue

FIRST_UPDATE = 4e-2
"""Update over weight of the layer that moves most at step 0 that a lower rate aims at: the
geometric mean over the healthy recipes of ``neuraldbg.evaluation`` is 0.044."""
TYPICAL_UPDATE = 3e-3
"""The same over a run that a higher rate aims at: a few times the rule of thumb for each layer
(Karpathy, CS231n notes)."""


def remedy_for(mode: FailureMode, evidence: Sequence[SemanticEvent]) -> str:
    """The catalogue's remedy for a mode, made definite by the events where it can be.

    Args:
        mode: The failure mode.
        evidence: The events that speak for it.

    Example:
        >>> event = SemanticEvent(0, EventType.UPDATE_TOO_LARGE, "fc", 0, 0, 9, "ordinary",
        ...                       "huge", 1.0, 0.9, 0.1)
        >>> remedy_for(FailureMode.LR_BLOWUP, [event])
        'lower the learning rate at least 20-fold, or add warmup'
    """
    definite = _DEFINITE.get(mode)
    text = definite(evidence) if definite is not None else None
    return text or catalogue()[mode].remedy


def _lower_rate(evidence: Sequence[SemanticEvent]) -> str | None:
    updates = [e for e in evidence if e.event_type is EventType.UPDATE_TOO_LARGE]
    if not updates:
        return None
    # The first ones: those that come later are inflated by the divergence that these began.
    start = min(event.step_start for event in updates)
    ratio = max(event.value for event in updates if event.step_start == start)
    return f"lower the learning rate at least {_factor(ratio / FIRST_UPDATE)}, or add warmup"


def _raise_rate(evidence: Sequence[SemanticEvent]) -> str | None:
    ratios = [ratio for ratio in _values(evidence, EventType.UPDATE_TOO_SMALL) if ratio > 0]
    if not ratios:
        return None
    return f"raise the learning rate about {_factor(TYPICAL_UPDATE / min(ratios))}"


def _hold_parameters(evidence: Sequence[SemanticEvent]) -> str | None:
    layers = _layers(evidence, EventType.UPDATE_MISSING)
    if not layers:
        return None
    return (
        f"give the optimizer the parameters of {_listed(layers)}: pass all of "
        "model.parameters(), and build it after the last layer is replaced"
    )


def _clean_data(evidence: Sequence[SemanticEvent]) -> str | None:
    kinds = (EventType.INPUT_NON_FINITE, EventType.TARGET_NON_FINITE)
    steps = [event.step_start for event in evidence if event.event_type in kinds]
    if not steps:
        return None
    return f"clean the data: the batch of step {min(steps)} (counted from 0) is the first bad one"


def _rescale_weights(evidence: Sequence[SemanticEvent]) -> str | None:
    layers = _layers(evidence, EventType.WEIGHTS_LARGE_AT_START) or _layers(
        evidence, EventType.WEIGHTS_SMALL_AT_START
    )
    if not layers:
        return None
    return f"use a variance-preserving initialisation (Kaiming, Xavier) in {_listed(layers)}"


_DEFINITE: Mapping[FailureMode, Callable[[Sequence[SemanticEvent]], str | None]] = {
    FailureMode.LR_BLOWUP: _lower_rate,
    FailureMode.LR_TOO_LOW: _raise_rate,
    FailureMode.PARAM_NOT_IN_OPTIMIZER: _hold_parameters,
    FailureMode.NAN_INPUT: _clean_data,
    FailureMode.INIT_BLOWUP: _rescale_weights,
    FailureMode.INIT_COLLAPSE: _rescale_weights,
}


def _values(evidence: Sequence[SemanticEvent], event_type: EventType) -> list[float]:
    return [event.value for event in evidence if event.event_type is event_type]


def _layers(evidence: Sequence[SemanticEvent], event_type: EventType) -> list[str]:
    """Layers of a type of event, in the order in which data flows."""
    found = {e.layer_index: e.layer for e in evidence if e.event_type is event_type and e.layer}
    return [found[index] for index in sorted(found)]


def _listed(layers: Sequence[str], most: int = 2) -> str:
    shown = ", ".join(layers[:most])
    return shown if len(layers) <= most else f"{shown} and {len(layers) - most} more"


def _factor(ratio: float) -> str:
    """A factor to one significant digit: nobody should read precision into it."""
    if not math.isfinite(ratio) or ratio > 1000:
        return "1000-fold"
    if ratio <= 1:
        return "2-fold"
    size = 10 ** math.floor(math.log10(ratio))
    return f"{max(round(ratio / size) * size, 2):.0f}-fold"
