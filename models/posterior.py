"""The posterior of all causes of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from neuraldbg.failure_modes import FailureMode


@dataclass(frozen=True, slots=True)
class Posterior:
    """What the evidence says of every cause.

    Attributes:
        causes: Probability that each cause is present, ``unknown`` among them.
        healthy: Probability that none is.
        evidence: The evidence that was used, observation to state.
    """

    causes: Mapping[FailureMode, float]
    healthy: float
    evidence: Mapping[str, str]

    def ranked(self) -> list[tuple[FailureMode, float]]:
        """Causes and ``healthy``, most probable first; ties in the causes' own order.

        >>> posterior = Posterior({FailureMode.LR_BLOWUP: 0.2}, 0.8, {})
        >>> [(cause.value, probability) for cause, probability in posterior.ranked()]
        [('healthy', 0.8), ('lr_blowup', 0.2)]
        """
        everything = [*self.causes.items(), (FailureMode.HEALTHY, self.healthy)]
        return sorted(everything, key=lambda item: -item[1])


def posterior_from_joint(
    joint: np.ndarray, causes: Sequence[FailureMode], evidence: Mapping[str, str]
) -> Posterior:
    """The marginals of a joint distribution over sets of causes.

    Args:
        joint: Shape (2,) * len(causes), one axis a cause in the given order, absent before
            present; sums to 1.
        causes: The causes of the axes.
        evidence: What it was conditioned on.

    Example:
        >>> joint = np.array([[0.5, 0.1], [0.3, 0.1]])
        >>> pair = [FailureMode.LR_BLOWUP, FailureMode.UNKNOWN]
        >>> posterior = posterior_from_joint(joint, pair, {})
        >>> {cause.value: round(p, 3) for cause, p in posterior.causes.items()}, posterior.healthy
        ({'lr_blowup': 0.4, 'unknown': 0.2}, 0.5)
    """
    marginals = {cause: float(joint.take(1, axis=axis).sum()) for axis, cause in enumerate(causes)}
    return Posterior(marginals, float(joint[(0,) * len(causes)]), dict(evidence))
