"""Semantic events: labelled spans in a layer's series, and the states they lead between."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ActivationHealth(StrEnum):
    """State of a layer's activations."""

    NORMAL = "normal"
    SATURATED = "saturated"
    DEAD = "dead"
    ANOMALOUS = "anomalous"


class GradientHealth(StrEnum):
    """State of a layer's gradient; saturated: cut off by units in their flat tails."""

    HEALTHY = "healthy"
    VANISHING = "vanishing"
    EXPLODING = "exploding"
    SATURATED = "saturated"


class EventType(StrEnum):
    """What can happen to a layer, the loss or the wiring of a run.

    The order of the members is the order within one step in which such events arise: weights as
    they start, data, forward pass, loss, backward pass, update, weights after it.

    >>> EventType.GRADIENT_VANISHING.phase < EventType.UPDATE_MISSING.phase
    True
    """

    WEIGHTS_SMALL_AT_START = "weights_small_at_start"
    WEIGHTS_LARGE_AT_START = "weights_large_at_start"
    UNITS_IDENTICAL = "units_identical"
    PARAMETERS_FROZEN = "parameters_frozen"
    PARAMETERS_UNREGISTERED = "parameters_unregistered"
    MODULE_NEVER_CALLED = "module_never_called"
    EVALUATION_MODE = "evaluation_mode"
    DROPOUT_STRONG = "dropout_strong"
    INPUT_NON_FINITE = "input_non_finite"
    TARGET_NON_FINITE = "target_non_finite"
    INPUT_OFF_SCALE = "input_off_scale"
    TARGET_OFF_SCALE = "target_off_scale"
    LABELS_IMBALANCED = "labels_imbalanced"
    BATCHES_ORDERED = "batches_ordered"
    BATCH_TOO_SMALL = "batch_too_small"
    ACTIVATION_NON_FINITE = "activation_non_finite"
    ACTIVATION_NEAR_OVERFLOW = "activation_near_overflow"
    ACTIVATION_FADING = "activation_fading"
    ACTIVATION_BLOWUP = "activation_blowup"
    ACTIVATION_SATURATED = "activation_saturated"
    ACTIVATION_DEAD = "activation_dead"
    ACTIVATIONS_ALIKE = "activations_alike"
    STATISTICS_LAGGING = "statistics_lagging"
    OUTPUT_OUT_OF_DOMAIN = "output_out_of_domain"
    REDUCTION_OVER_WRONG_AXIS = "reduction_over_wrong_axis"
    SHAPES_BROADCAST = "shapes_broadcast"
    OPERATION_UNDEFINED = "operation_undefined"
    LOSS_NON_FINITE = "loss_non_finite"
    LOSS_HIGH_AT_START = "loss_high_at_start"
    LOSS_RISING = "loss_rising"
    LOSS_SPIKING = "loss_spiking"
    LOSS_PERIODIC = "loss_periodic"
    LOSS_FLAT = "loss_flat"
    LOSS_STILL_FALLING = "loss_still_falling"
    GRADIENT_NOT_RESET = "gradient_not_reset"
    GRADIENT_RESET_EARLY = "gradient_reset_early"
    MICRO_BATCHES_SUMMED = "micro_batches_summed"
    GRADIENT_CUT = "gradient_cut"
    GRADIENT_NON_FINITE = "gradient_non_finite"
    GRADIENT_UNDERFLOW = "gradient_underflow"
    GRADIENT_VANISHING = "gradient_vanishing"
    GRADIENT_EXPLODING = "gradient_exploding"
    GRADIENT_SPIKING = "gradient_spiking"
    GRADIENT_NOISY = "gradient_noisy"
    GRADIENTS_OPPOSED = "gradients_opposed"
    GRADIENTS_ALIGNED = "gradients_aligned"
    GRADIENT_CLIPPED = "gradient_clipped"
    GRADIENT_CLIPPED_SCALED = "gradient_clipped_scaled"
    STEP_SKIPPED = "step_skipped"
    LEARNING_RATE_FALLING = "learning_rate_falling"
    LEARNING_RATE_STARTS_HIGH = "learning_rate_starts_high"
    EPSILON_LOST = "epsilon_lost"
    WEIGHT_DECAY_DOMINANT = "weight_decay_dominant"
    UPDATE_MISSING = "update_missing"
    UPDATE_TOO_SMALL = "update_too_small"
    UPDATE_TOO_LARGE = "update_too_large"
    UPDATE_SPIKING = "update_spiking"
    WEIGHTS_GROWING = "weights_growing"
    WEIGHTS_SHRINKING = "weights_shrinking"
    WEIGHTS_NON_FINITE = "weights_non_finite"
    VALIDATION_LOSS_RISING = "validation_loss_rising"
    EVALUATION_GAP = "evaluation_gap"
    RANKS_DIFFER = "ranks_differ"
    CAPTURE_FAULT = "capture_fault"

    @property
    def phase(self) -> int:
        """Position within one step: lower comes first."""
        return _PHASES[self]

    @classmethod
    def parse(cls, event_type: EventType | str) -> EventType:
        """The member for an enum member or its value.

        Raises:
            ValueError: the value names no event type; the message lists those that exist.

        Example:
            >>> EventType.parse("loss_rising")
            <EventType.LOSS_RISING: 'loss_rising'>
            >>> EventType.parse("loss_raising")  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ...
            ValueError: 'loss_raising' is no event type; choose one of weights_small_at_start, ...
        """
        try:
            return cls(event_type)
        except ValueError:
            choices = ", ".join(member.value for member in cls)
            raise ValueError(f"{event_type!r} is no event type; choose one of {choices}") from None


_PHASES = {event_type: position for position, event_type in enumerate(EventType)}


@dataclass(frozen=True, slots=True)
class SemanticEvent:
    """One labelled span: a layer's (or the loss's) statistic was in a state from step to step.

    Attributes:
        event_id: Row number in the event table, from 0.
        event_type: What happened.
        layer: Qualified module name; None for the loss, the optimizer and other whole-run events.
        layer_index: Position in the order in which data flows; -1 where there is no layer.
        step_start: First step of the span, from 0.
        step_end: Last step of the span, inclusive.
        from_state: State before.
        to_state: State during the span.
        severity: 0 to 1, how far beyond the threshold, on a scale of the event type's own.
        value: The statistic that crossed the threshold: at its most extreme, save for updates,
            where the first is what began the rest.
        threshold: What it was compared with.
        rank: Process rank in distributed training, 0 otherwise.
        detail: What no number says: the operation, the shapes, the batch; empty where nothing.
    """

    event_id: int
    event_type: EventType
    layer: str | None
    layer_index: int
    step_start: int
    step_end: int
    from_state: str
    to_state: str
    severity: float
    value: float
    threshold: float
    rank: int = 0
    detail: str = ""

    @property
    def moment(self) -> tuple[int, int, int]:
        """Sort key for causal order: step, phase in the step, place in the flow of data.

        Gradients flow from the last layer to the first, so their place counts backwards.
        """
        backward = EventType.GRADIENT_NON_FINITE.phase <= self.event_type.phase
        return (
            self.step_start,
            self.event_type.phase,
            -self.layer_index if backward else self.layer_index,
        )
