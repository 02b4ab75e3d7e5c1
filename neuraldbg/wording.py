"""Events in words."""

from __future__ import annotations

from collections.abc import Mapping

from neuraldbg.events import EventType, SemanticEvent

_T = EventType

_SENTENCES: Mapping[EventType, str] = {
    _T.WEIGHTS_SMALL_AT_START: "weights of {layer} start at gain {value:.2g} (usual: 0.2 to 2)",
    _T.WEIGHTS_LARGE_AT_START: "weights of {layer} start at gain {value:.2g} (usual: 0.2 to 2)",
    _T.UNITS_IDENTICAL: "all units of {layer} are copies of each other",
    _T.INPUT_NON_FINITE: "the input of {layer} holds NaN or infinite values",
    _T.TARGET_NON_FINITE: "the target holds NaN or infinite values",
    _T.INPUT_OFF_SCALE: "the input of {layer} is {value:.3g} times off scale",
    _T.ACTIVATION_NON_FINITE: "{layer} puts out NaN or infinite values",
    _T.ACTIVATION_FADING: "the signal shrinks to {value:.2g} of itself at each layer",
    _T.ACTIVATION_BLOWUP: "activations of {layer} grow {value:.3g}-fold",
    _T.ACTIVATION_SATURATED: "{value:.0%} of {layer}'s values sit in its flat tails",
    _T.ACTIVATION_DEAD: "{value:.0%} of {layer}'s units are dead",
    _T.LOSS_NON_FINITE: "the loss is NaN or infinite",
    _T.LOSS_HIGH_AT_START: "the first loss is {value:.3g} times what an untrained model scores",
    _T.LOSS_RISING: "the loss rises to {value:.3g} times its start",
    _T.LOSS_FLAT: "the loss falls by {value:.1%} only",
    _T.GRADIENT_NOT_RESET: "steps begin with the last step's gradients in place",
    _T.GRADIENT_NON_FINITE: "the gradient of {layer} is NaN or infinite",
    _T.GRADIENT_VANISHING: "the gradient of {layer} vanishes ({value:.1g})",
    _T.GRADIENT_EXPLODING: "the gradient of {layer} explodes ({value:.3g})",
    _T.GRADIENTS_OPPOSED: "each gradient points back against the last (cosine {value:.2f})",
    _T.GRADIENTS_ALIGNED: "successive gradients are nearly the same (cosine {value:.2f})",
    _T.UPDATE_MISSING: "{layer} has a gradient and is never updated",
    _T.UPDATE_TOO_SMALL: "updates are {value:.1g} of the weights",
    _T.UPDATE_TOO_LARGE: "one update of {layer} is {value:.2g} of its weights",
    _T.WEIGHTS_GROWING: "weights of {layer} grow {value:.3g}-fold",
    _T.WEIGHTS_NON_FINITE: "weights of {layer} are NaN or infinite",
    _T.CAPTURE_FAULT: "NeuralDBG could not observe a part of the run ({to_state})",
}


def describe_event(event: SemanticEvent) -> str:
    """An event as one clause with its step.

    Example:
        >>> event = SemanticEvent(0, EventType.ACTIVATION_DEAD, "relu1", 1, 12, 90, "normal",
        ...                       "dead", 0.8, 0.9, 0.5)
        >>> describe_event(event)
        "step 12: 90% of relu1's units are dead"
    """
    sentence = _SENTENCES[event.event_type].format(
        layer=event.layer or "the model", value=event.value, to_state=event.to_state
    )
    return f"step {event.step_start}: {sentence}"
