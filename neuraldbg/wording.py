"""Events in words."""

from __future__ import annotations

from collections.abc import Mapping

from neuraldbg.events import EventType, SemanticEvent

_T = EventType

_SENTENCES: Mapping[EventType, str] = {
    _T.WEIGHTS_SMALL_AT_START: "weights of {layer} start at gain {value:.2g} (usual: 0.2 to 2)",
    _T.WEIGHTS_LARGE_AT_START: "weights of {layer} start at gain {value:.2g} (usual: 0.2 to 2)",
    _T.UNITS_IDENTICAL: "all units of {layer} are copies of each other",
    _T.INPUT_NON_FINITE: "the input of {layer} holds NaN or infinite values{in_detail}",
    _T.TARGET_NON_FINITE: "the target holds NaN or infinite values{in_detail}",
    _T.INPUT_OFF_SCALE: "the input of {layer} is {value:.3g} times off scale",
    _T.ACTIVATION_NON_FINITE: "{layer} puts out NaN or infinite values{in_detail}",
    _T.ACTIVATION_FADING: "the signal shrinks to {value:.2g} of itself at each layer",
    _T.ACTIVATION_BLOWUP: "activations of {layer} grow {value:.3g}-fold",
    _T.ACTIVATION_SATURATED: "{value:.0%} of {layer}'s values sit in its flat tails",
    _T.ACTIVATION_DEAD: "{value:.0%} of {layer}'s units are dead",
    _T.LOSS_NON_FINITE: "the loss is NaN or infinite{in_detail}",
    _T.LOSS_HIGH_AT_START: "the first loss is {value:.3g} times what an untrained model scores",
    _T.LOSS_RISING: "the loss rises to {value:.3g} times its start",
    _T.LOSS_FLAT: "the loss falls by {value:.1%} only",
    _T.GRADIENT_NOT_RESET: "steps begin with the last step's gradients in place",
    _T.GRADIENT_NON_FINITE: "the gradient of {layer} is NaN or infinite{in_detail}",
    _T.GRADIENT_VANISHING: "the gradient of {layer} vanishes ({value:.1g})",
    _T.GRADIENT_EXPLODING: "the gradient of {layer} explodes ({value:.3g})",
    _T.GRADIENTS_OPPOSED: "each gradient points back against the last (cosine {value:.2f})",
    _T.GRADIENTS_ALIGNED: "successive gradients are nearly the same (cosine {value:.2f})",
    _T.UPDATE_MISSING: "{layer} has a gradient and is never updated",
    _T.UPDATE_TOO_SMALL: "updates are {value:.1g} of the weights",
    _T.UPDATE_TOO_LARGE: "one update of {layer} is {value:.2g} of its weights",
    _T.WEIGHTS_GROWING: "weights of {layer} grow {value:.3g}-fold",
    _T.WEIGHTS_NON_FINITE: "weights of {layer} are NaN or infinite",
    _T.PARAMETERS_FROZEN: "{layer} holds random weights that require no gradient",
    _T.PARAMETERS_UNREGISTERED: "the loss reaches an unregistered parameter ({detail})",
    _T.MODULE_NEVER_CALLED: "{layer} is registered and never called",
    _T.EVALUATION_MODE: "{layer} trains in eval mode",
    _T.DROPOUT_STRONG: "{layer} drops {value:.0%} of its values",
    _T.TARGET_OFF_SCALE: "the target is {value:.3g} times the scale of the output",
    _T.LABELS_IMBALANCED: "one class holds {value:.0%} of the labels",
    _T.BATCHES_ORDERED: "batches vary {value:.0%} as much as in random order",
    _T.BATCH_TOO_SMALL: "{layer} normalises over batches of {value:.0f}, which differ widely",
    _T.ACTIVATION_NEAR_OVERFLOW: "{layer} comes to {value:.0%} of what {detail} can hold",
    _T.ACTIVATIONS_ALIKE: "{layer} puts out the same for every sample, to {value:.1g} of its size",
    _T.STATISTICS_LAGGING: "running statistics of {layer} are {value:.2g} deviations off the batch",
    _T.OUTPUT_OUT_OF_DOMAIN: "the output does not suit the loss ({detail})",
    _T.REDUCTION_OVER_WRONG_AXIS: "one axis is taken for another ({detail})",
    _T.SHAPES_BROADCAST: "prediction and target broadcast against each other ({detail})",
    _T.OPERATION_UNDEFINED: "an operation is undefined at its value ({detail})",
    _T.LOSS_SPIKING: "the loss jumps to {value:.3g} times its course and comes back",
    _T.LOSS_PERIODIC: "the loss repeats itself every {value:.0f} steps",
    _T.LOSS_STILL_FALLING: "the loss still falls at the end, by {value:.1%} over its last tenth",
    _T.GRADIENT_RESET_EARLY: "gradients are lost: {to_state}",
    _T.MICRO_BATCHES_SUMMED: "{value:.0f} micro-batches are summed and not averaged",
    _T.GRADIENT_CUT: "{layer} requires a gradient that never arrives ({detail})",
    _T.GRADIENT_UNDERFLOW: "{value:.0%} of gradient or update of {layer} is lost in its format",
    _T.GRADIENT_SPIKING: "the gradient jumps to {value:.3g} times its usual norm",
    _T.GRADIENT_NOISY: "gradients are {value:.3g} times more noise than signal",
    _T.GRADIENT_CLIPPED: "clipping cuts the gradient {value:.3g}-fold at nearly every step",
    _T.GRADIENT_CLIPPED_SCALED: "the gradient is clipped while it is multiplied by the loss scale",
    _T.STEP_SKIPPED: "{value:.0%} of the optimizer steps are skipped",
    _T.LEARNING_RATE_FALLING: "the learning rate falls to {value:.1g} of its largest",
    _T.LEARNING_RATE_STARTS_HIGH: "the first updates are {value:.3g} times those that follow",
    _T.EPSILON_LOST: "the optimizer's eps of {value:.1g} is zero in its number format{in_detail}",
    _T.WEIGHT_DECAY_DOMINANT: "weight decay outweighs the gradient of {layer} {value:.3g}-fold",
    _T.UPDATE_SPIKING: "an update jumps {value:.3g}-fold though its gradient is ordinary",
    _T.WEIGHTS_SHRINKING: "weights of {layer} shrink to {value:.2g} of their start",
    _T.VALIDATION_LOSS_RISING: "the validation loss rises to {value:.3g} times its best",
    _T.EVALUATION_GAP: "outputs in eval mode differ from those in training ({value:.3g}-fold)",
    _T.RANKS_DIFFER: "rank {rank} departs from the others in {layer}{in_detail}",
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
        layer=event.layer or "the model",
        value=event.value,
        to_state=event.to_state,
        detail=event.detail,
        in_detail=f" ({event.detail})" if event.detail else "",
        rank=event.rank,
    )
    return f"step {event.step_start}: {sentence}"
