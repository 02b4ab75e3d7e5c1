"""Event detectors: each turns one sign in a series into events.

A detector is a function of a series' panels and the thresholds that yields events; a new one is a
file here and an entry in `DETECTORS`. These see a run up to its first non-finite step;
`detect_non_finite` alone sees all of it.
"""

from neuraldbg.capture.detectors.dead_units import detect_dead_units
from neuraldbg.capture.detectors.gradient_direction import detect_gradient_direction
from neuraldbg.capture.detectors.gradient_flow import detect_gradient_flow
from neuraldbg.capture.detectors.initial_weights import detect_initial_weights
from neuraldbg.capture.detectors.input_scale import detect_input_scale
from neuraldbg.capture.detectors.loss_course import detect_loss_course
from neuraldbg.capture.detectors.non_finite import detect_non_finite
from neuraldbg.capture.detectors.saturation import detect_saturation
from neuraldbg.capture.detectors.signal_propagation import detect_signal_propagation
from neuraldbg.capture.detectors.update_size import detect_update_size
from neuraldbg.capture.detectors.weight_growth import detect_weight_growth
from neuraldbg.capture.detectors.wiring import detect_gradient_not_reset, detect_update_missing

DETECTORS = (
    detect_initial_weights,
    detect_input_scale,
    detect_signal_propagation,
    detect_saturation,
    detect_dead_units,
    detect_loss_course,
    detect_gradient_not_reset,
    detect_gradient_flow,
    detect_gradient_direction,
    detect_update_missing,
    detect_update_size,
    detect_weight_growth,
)

__all__ = [
    "DETECTORS",
    "detect_dead_units",
    "detect_gradient_direction",
    "detect_gradient_flow",
    "detect_gradient_not_reset",
    "detect_initial_weights",
    "detect_input_scale",
    "detect_loss_course",
    "detect_non_finite",
    "detect_saturation",
    "detect_signal_propagation",
    "detect_update_missing",
    "detect_update_size",
    "detect_weight_growth",
]
