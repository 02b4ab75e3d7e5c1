"""The leaky noisy-OR: how independent causes combine in one effect.

P(effect absent | causes) = (1 - leak) * product over present causes of (1 - strength)

Source: Pearl, Probabilistic Reasoning in Intelligent Systems (1988), section 4.3.2; the leak is
Henrion's (1989).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def noisy_or_table(strengths: Sequence[float], leak: float) -> np.ndarray:
    """The conditional probability table of a leaky noisy-OR.

    Args:
        strengths: For each parent the probability that it alone brings the effect about.
        leak: Probability of the effect without any parent.

    Returns:
        Shape (2, 2 ** parents): row 0 absent, row 1 present; columns count through the parents'
        states with the last parent changing fastest, absent before present.

    Example:
        >>> noisy_or_table([0.8, 0.5], leak=0.0)[1].round(3).tolist()
        [0.0, 0.5, 0.8, 0.9]
    """
    absent = np.array([1.0 - leak])
    for strength in strengths:
        absent = (absent[:, None] * np.array([1.0, 1.0 - strength])).ravel()
    return np.stack([absent, 1.0 - absent])
