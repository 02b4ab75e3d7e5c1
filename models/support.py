"""How each piece of evidence weighs on each cause."""

from __future__ import annotations

import math
from collections.abc import Mapping

from neuraldbg.failure_modes import FailureMode
from neuraldbg.hypotheses import Finding
from neuraldbg.models.specification import Mechanism, Observation, Specification


def weigh_evidence(
    specification: Specification, cause: FailureMode, evidence: Mapping[str, str]
) -> list[Finding]:
    """What every piece of evidence says of a cause, the heaviest first.

    The weight is the natural log of P(state | only this cause) / P(state | no cause): the weight
    of evidence of Good (1950) for that pair of hypotheses.

    Args:
        specification: The network.
        cause: A cause of it; other modes get no findings.
        evidence: Observation to state.

    Example:
        >>> from neuraldbg.models.specification import default_specification
        >>> finding = weigh_evidence(default_specification(), FailureMode.NAN_INPUT,
        ...                          {"batch_values": "non_finite", "units_later": "alive"})[0]
        >>> finding.observation, round(finding.weight, 2)
        ('batch_values', 6.47)
    """
    findings = []
    for name, state_name in evidence.items():
        observation = specification.observation(name)
        mechanism = specification.mechanism(observation.mechanism)
        if cause in mechanism.strengths:
            state = observation.state(state_name)
            weight = _weight(mechanism, observation, state_name, cause)
            directness = mechanism.strengths[cause]
            findings.append(Finding(name, state_name, state.wording, weight, directness))
    return sorted(findings, key=lambda finding: -abs(finding.weight))


def _weight(
    mechanism: Mechanism, observation: Observation, state_name: str, cause: FailureMode
) -> float:
    state = observation.state(state_name)
    without = mechanism.leak
    with_cause = 1.0 - (1.0 - mechanism.leak) * (1.0 - mechanism.strengths[cause])
    likelihoods = [
        present * state.p_present + (1.0 - present) * state.p_absent
        for present in (with_cause, without)
    ]
    return math.log(likelihoods[0] / likelihoods[1])
