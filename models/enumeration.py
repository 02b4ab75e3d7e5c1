"""Exact posteriors by enumerating sets of causes: the second route, without pgmpy.

Every observation has one mechanism for its parent, so that given a set of causes the mechanisms
are independent, and the likelihood of a run is one product over mechanisms:

    P(evidence | set) = product over mechanisms of
        P(m absent | set) * L_absent(m) + P(m present | set) * L_present(m)

with L the product over the mechanism's observed signs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from neuraldbg.models.posterior import Posterior, posterior_from_joint
from neuraldbg.models.specification import Mechanism, Specification

MAX_CAUSES = 20
"""Causes up to which all sets are enumerated: about a million sets."""


def enumerate_causes(specification: Specification, evidence: Mapping[str, str]) -> Posterior:
    """The posterior of all causes, over all sets of them.

    Args:
        specification: The network.
        evidence: Observation to state.

    Raises:
        ValueError: there are more than `MAX_CAUSES` causes.

    Example:
        >>> from neuraldbg.models.specification import default_specification
        >>> enumerate_causes(default_specification(), {"gradient_reset": "kept"})
        Traceback (most recent call last):
        ...
        ValueError: 39 causes have too many sets; at most 20 can be enumerated
    """
    causes = [cause.mode for cause in specification.causes]
    if len(causes) > MAX_CAUSES:
        raise ValueError(f"{len(causes)} causes have too many sets; at most {MAX_CAUSES} can be "
                         "enumerated")  # fmt: skip
    joint = np.ones((2,) * len(causes))
    for axis, cause in enumerate(specification.causes):
        joint = joint * _along(axis, len(causes), 1.0 - cause.prior, cause.prior)
    for mechanism in specification.mechanisms:
        absent, present = sign_likelihoods(specification, mechanism, evidence)
        if absent == present == 1.0:
            continue
        missing = np.full((1,) * len(causes), 1.0 - mechanism.leak)
        for axis, mode in enumerate(causes):
            strength = mechanism.strengths.get(mode, 0.0)
            if strength:
                missing = missing * _along(axis, len(causes), 1.0, 1.0 - strength)
        joint = joint * (missing * absent + (1.0 - missing) * present)
    return posterior_from_joint(joint / joint.sum(), causes, evidence)


def _along(axis: int, axes: int, absent: float, present: float) -> np.ndarray:
    """A factor over one cause, shaped to multiply along its axis."""
    shape = [1] * axes
    shape[axis] = 2
    return np.array([absent, present]).reshape(shape)


def sign_likelihoods(
    specification: Specification, mechanism: Mechanism, evidence: Mapping[str, str]
) -> tuple[float, float]:
    """Probability of a mechanism's observed signs without it, and with it.

    Args:
        specification: The network.
        mechanism: One of its mechanisms.
        evidence: Observation to state.
    """
    absent = present = 1.0
    for observation in specification.observations:
        if observation.mechanism == mechanism.name and observation.name in evidence:
            state = observation.state(evidence[observation.name])
            absent *= state.p_absent
            present *= state.p_present
    return absent, present
