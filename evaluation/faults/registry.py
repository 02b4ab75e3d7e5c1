"""All faults by failure mode, gathered from their groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neuraldbg.evaluation.faults.activation import ACTIVATION_FAULTS
from neuraldbg.evaluation.faults.data import DATA_FAULTS
from neuraldbg.evaluation.faults.distributed import DISTRIBUTED_FAULTS
from neuraldbg.evaluation.faults.fault import Fault
from neuraldbg.evaluation.faults.initialisation import INITIALISATION_FAULTS
from neuraldbg.evaluation.faults.loss import LOSS_FAULTS
from neuraldbg.evaluation.faults.optimisation import OPTIMISATION_FAULTS
from neuraldbg.evaluation.faults.precision import PRECISION_FAULTS
from neuraldbg.evaluation.faults.regularisation import REGULARISATION_FAULTS
from neuraldbg.evaluation.faults.wiring import WIRING_FAULTS
from neuraldbg.failure_modes import FailureMode

_GROUPS = (
    OPTIMISATION_FAULTS,
    INITIALISATION_FAULTS,
    ACTIVATION_FAULTS,
    LOSS_FAULTS,
    DATA_FAULTS,
    WIRING_FAULTS,
    REGULARISATION_FAULTS,
    PRECISION_FAULTS,
    DISTRIBUTED_FAULTS,
)

FAULTS: Mapping[FailureMode, Fault] = MappingProxyType(
    {fault.mode: fault for group in _GROUPS for fault in group}
)
"""All faults by failure mode."""


def find_fault(mode: FailureMode | str) -> Fault:
    """The fault for a failure mode, given as the enum or its value.

    Raises:
        ValueError: there is none; the message lists those that exist.

    Example:
        >>> find_fault("nan_input").mode
        <FailureMode.NAN_INPUT: 'nan_input'>
    """
    for fault in FAULTS.values():
        if fault.mode == mode:
            return fault
    raise ValueError(f"no fault for {str(mode)!r}; choose from {', '.join(FAULTS)}")
