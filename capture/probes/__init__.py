"""Probes: each gathers one kind of evidence along the steps of a run.

A new one is a file here, a subclass of `Probe`, and an entry in `PROBES`.
"""

from neuraldbg.capture.probe import Probe
from neuraldbg.capture.probes.accumulation import Accumulation
from neuraldbg.capture.probes.batch_normalisation import BatchNormalisation
from neuraldbg.capture.probes.evaluation_phase import EvaluationPhase
from neuraldbg.capture.probes.gradient_clipping import GradientClipping
from neuraldbg.capture.probes.labels import Labels
from neuraldbg.capture.probes.loss_anatomy import LossAnatomy
from neuraldbg.capture.probes.loss_scaling import LossScaling
from neuraldbg.capture.probes.metrics import Metrics
from neuraldbg.capture.probes.module_modes import ModuleModes
from neuraldbg.capture.probes.non_finite import NonFinite
from neuraldbg.capture.probes.number_formats import NumberFormats
from neuraldbg.capture.probes.optimizer_settings import OptimizerSettings
from neuraldbg.capture.probes.output_gradient import OutputGradient
from neuraldbg.capture.probes.parameter_wiring import ParameterWiring

PROBES: tuple[type[Probe], ...] = (
    EvaluationPhase,
    Metrics,
    NonFinite,
    LossAnatomy,
    Labels,
    ParameterWiring,
    ModuleModes,
    BatchNormalisation,
    OutputGradient,
    NumberFormats,
    OptimizerSettings,
    GradientClipping,
    LossScaling,
    Accumulation,
)

__all__ = ["PROBES"]
