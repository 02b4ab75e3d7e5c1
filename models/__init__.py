"""The Bayesian network: causes, mechanisms and observed events, and the posterior of a run."""

if __name__ == "models":
    raise ImportError(
        "this folder is the package neuraldbg.models: import neuraldbg.models, not models"
    )

from neuraldbg.models.enumeration import enumerate_causes
from neuraldbg.models.evidence import read_evidence
from neuraldbg.models.network import FailureNetwork, default_network
from neuraldbg.models.posterior import Posterior
from neuraldbg.models.specification import (
    Cause,
    Mechanism,
    NetworkFormatError,
    Observation,
    Specification,
    State,
    default_specification,
)

__all__ = [
    "Cause",
    "FailureNetwork",
    "Mechanism",
    "NetworkFormatError",
    "Observation",
    "Posterior",
    "Specification",
    "State",
    "default_network",
    "default_specification",
    "enumerate_causes",
    "read_evidence",
]
