"""What `explain_failure` returns: hypotheses about the cause of a run's failure."""

from __future__ import annotations

from dataclasses import dataclass

from neuraldbg.events import SemanticEvent
from neuraldbg.failure_modes import FailureMode


@dataclass(frozen=True, slots=True)
class Finding:
    """One observed node of the network, and how it weighs on a hypothesis.

    Attributes:
        observation: Name of the observed node.
        state: State it was seen in.
        wording: The same in words.
        weight: Natural log of how much more likely the state is with the cause than without.
        directness: Probability that the cause alone brings about the mechanism that it is a sign
            of: near 1 for the signs that define the cause.
    """

    observation: str
    state: str
    wording: str
    weight: float
    directness: float


@dataclass(frozen=True, slots=True)
class CausalHypothesis:
    """One possible cause of what was seen, how probable it is and why.

    Attributes:
        cause: The failure mode, or ``healthy`` or ``unknown``.
        probability: Posterior probability that it is present, 0 to 1. Causes can coincide, so
            the probabilities of several may add up to more than 1.
        layer: Qualified name of the module where it originated, or None.
        step: First step at which it showed (its onset), or None.
        evidence: Events that speak for it.
        against: Observations that speak against it.
        chain: Events it brought about, in causal order.
        remedy: What to change.
        findings: Observations that speak for it, with their weights.
    """

    cause: FailureMode
    probability: float
    layer: str | None
    step: int | None
    evidence: tuple[SemanticEvent, ...]
    against: tuple[Finding, ...]
    chain: tuple[SemanticEvent, ...]
    remedy: str
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class RootCause:
    """Where a failure first originated.

    Attributes:
        cause: The failure mode.
        probability: Its posterior probability.
        layer: Qualified name of the module, or None where no layer is to blame.
        step: First step at which it showed, or None.
    """

    cause: FailureMode
    probability: float
    layer: str | None
    step: int | None
