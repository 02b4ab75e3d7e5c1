"""Event detectors: each turns one sign in a series into events.

A detector is a function of a series' panels and the thresholds that yields events; a new one is a
file here and an entry in `DETECTORS`. These see a run up to its first non-finite step;
`detect_non_finite`, `detect_activation_near_overflow`, `detect_epsilon_lost` and
`detect_step_skipped` see all of it.
"""

from neuraldbg.capture.detectors.accumulation import (
    detect_gradient_reset_early,
    detect_micro_batches_summed,
)
from neuraldbg.capture.detectors.alike_activations import detect_activations_alike
from neuraldbg.capture.detectors.batch_statistics import (
    detect_batch_too_small,
    detect_statistics_lagging,
)
from neuraldbg.capture.detectors.clipping import detect_clipping
from neuraldbg.capture.detectors.dead_units import detect_dead_units
from neuraldbg.capture.detectors.dropout import detect_dropout_strong
from neuraldbg.capture.detectors.evaluation_gap import detect_evaluation_gap
from neuraldbg.capture.detectors.frozen import detect_parameters_frozen
from neuraldbg.capture.detectors.gradient_direction import detect_gradient_direction
from neuraldbg.capture.detectors.gradient_flow import detect_gradient_flow
from neuraldbg.capture.detectors.gradient_noise import detect_gradient_noise
from neuraldbg.capture.detectors.graph_cut import detect_gradient_cut
from neuraldbg.capture.detectors.initial_weights import detect_initial_weights
from neuraldbg.capture.detectors.input_scale import detect_input_scale
from neuraldbg.capture.detectors.labels import detect_imbalance, detect_order
from neuraldbg.capture.detectors.learning_rate import (
    detect_learning_rate_falling,
    detect_learning_rate_starts_high,
)
from neuraldbg.capture.detectors.loss_course import detect_loss_course
from neuraldbg.capture.detectors.loss_period import detect_loss_period
from neuraldbg.capture.detectors.loss_scaling import detect_step_skipped
from neuraldbg.capture.detectors.loss_spikes import detect_loss_spikes
from neuraldbg.capture.detectors.loss_trend import detect_loss_trend
from neuraldbg.capture.detectors.module_modes import detect_evaluation_mode
from neuraldbg.capture.detectors.never_called import detect_module_never_called
from neuraldbg.capture.detectors.non_finite import detect_non_finite
from neuraldbg.capture.detectors.number_formats import (
    detect_activation_near_overflow,
    detect_gradient_underflow,
    detect_update_lost,
)
from neuraldbg.capture.detectors.optimizer_precision import detect_epsilon_lost
from neuraldbg.capture.detectors.output_domain import detect_output_domain
from neuraldbg.capture.detectors.overfitting import detect_overfitting
from neuraldbg.capture.detectors.rank_departure import detect_rank_departure
from neuraldbg.capture.detectors.saturation import detect_saturation
from neuraldbg.capture.detectors.signal_propagation import detect_signal_propagation
from neuraldbg.capture.detectors.structure import detect_broadcast, detect_wrong_axis
from neuraldbg.capture.detectors.target_scale import detect_target_scale
from neuraldbg.capture.detectors.unregistered import detect_parameters_unregistered
from neuraldbg.capture.detectors.update_size import detect_update_size
from neuraldbg.capture.detectors.update_spikes import (
    detect_gradient_spiking,
    detect_update_spiking,
)
from neuraldbg.capture.detectors.weight_decay import detect_weight_decay
from neuraldbg.capture.detectors.weight_growth import detect_weight_growth
from neuraldbg.capture.detectors.wiring import detect_gradient_not_reset, detect_update_missing

DETECTORS = (
    detect_initial_weights,
    detect_input_scale,
    detect_target_scale,
    detect_imbalance,
    detect_order,
    detect_output_domain,
    detect_wrong_axis,
    detect_broadcast,
    detect_signal_propagation,
    detect_saturation,
    detect_dead_units,
    detect_activations_alike,
    detect_loss_course,
    detect_loss_spikes,
    detect_loss_period,
    detect_loss_trend,
    detect_overfitting,
    detect_evaluation_gap,
    detect_gradient_not_reset,
    detect_gradient_flow,
    detect_gradient_direction,
    detect_gradient_noise,
    detect_update_missing,
    detect_update_size,
    detect_weight_growth,
    detect_batch_too_small,
    detect_statistics_lagging,
    detect_dropout_strong,
    detect_parameters_frozen,
    detect_gradient_cut,
    detect_evaluation_mode,
    detect_module_never_called,
    detect_gradient_underflow,
    detect_update_lost,
    detect_parameters_unregistered,
    detect_gradient_reset_early,
    detect_micro_batches_summed,
    detect_clipping,
    detect_learning_rate_falling,
    detect_learning_rate_starts_high,
    detect_gradient_spiking,
    detect_update_spiking,
    detect_weight_decay,
)

__all__ = [
    "DETECTORS",
    "detect_activation_near_overflow",
    "detect_activations_alike",
    "detect_batch_too_small",
    "detect_broadcast",
    "detect_clipping",
    "detect_dead_units",
    "detect_dropout_strong",
    "detect_epsilon_lost",
    "detect_evaluation_gap",
    "detect_evaluation_mode",
    "detect_gradient_cut",
    "detect_gradient_direction",
    "detect_gradient_flow",
    "detect_gradient_noise",
    "detect_gradient_not_reset",
    "detect_gradient_reset_early",
    "detect_gradient_spiking",
    "detect_gradient_underflow",
    "detect_imbalance",
    "detect_initial_weights",
    "detect_input_scale",
    "detect_learning_rate_falling",
    "detect_learning_rate_starts_high",
    "detect_loss_course",
    "detect_loss_period",
    "detect_loss_spikes",
    "detect_loss_trend",
    "detect_micro_batches_summed",
    "detect_module_never_called",
    "detect_non_finite",
    "detect_order",
    "detect_output_domain",
    "detect_overfitting",
    "detect_parameters_frozen",
    "detect_parameters_unregistered",
    "detect_rank_departure",
    "detect_saturation",
    "detect_signal_propagation",
    "detect_statistics_lagging",
    "detect_step_skipped",
    "detect_target_scale",
    "detect_update_lost",
    "detect_update_missing",
    "detect_update_size",
    "detect_update_spiking",
    "detect_weight_decay",
    "detect_weight_growth",
    "detect_wrong_axis",
]
