"""Judging a faulty run against its healthy twin: the same seed with the fault removed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from neuraldbg.failure_modes import FailureMode

from .faults import find_fault
from .program import build
from .recipe import Recipe
from .training_loop import train

HARM_LIMIT = 0.1
"""Share of the twin's progress that must be lost before a fault counts as doing harm."""


@dataclass(frozen=True, slots=True)
class TwinComparison:
    """The losses of a faulty run and of its twin.

    Example:
        >>> TwinComparison(healthy=(2.0, 1.0, 0.0), faulty=(2.0, 1.5, 1.5)).lost_progress
        0.75
        >>> TwinComparison(healthy=(2.0, 1.0, 0.0), faulty=(2.0, float("nan"))).lost_progress
        inf
    """

    healthy: tuple[float, ...]
    faulty: tuple[float, ...]

    @property
    def lost_progress(self) -> float:
        """What the fault cost: the rise of the final loss over what the twin gained.

        0 means no harm, 1 that nothing was learned, more that the run ended worse than an
        untrained twin; infinite when the loss is no longer a number.
        """
        healthy_end, faulty_end = final_loss(self.healthy), final_loss(self.faulty)
        if not math.isfinite(faulty_end):
            return math.inf
        return (faulty_end - healthy_end) / (self.healthy[0] - healthy_end)

    @property
    def harmed(self) -> bool:
        """Whether the fault did measurable harm; a fault that did not is masked."""
        return self.lost_progress > HARM_LIMIT


def final_loss(losses: tuple[float, ...]) -> float:
    """The mean loss over the last tenth of a run.

    Example:
        >>> final_loss((2.0, 1.0, 0.5))
        0.5
    """
    return fmean(losses[-max(1, len(losses) // 10) :])


def compare_with_twin(
    recipe: Recipe, mode: FailureMode | str, severity: float = 1.0, seed: int = 0
) -> TwinComparison:
    """Train a healthy recipe as it is and with a fault, from the same seed.

    Raises:
        ValueError: the mode has no fault, or the fault does not apply to the recipe.

    Example:
        >>> recipe = Recipe("mlp", "wine", "sgd", 0.1)
        >>> compare_with_twin(recipe, "lr_too_low").harmed
        True
    """
    faulty = find_fault(mode).inject(recipe, severity)
    return TwinComparison(
        healthy=tuple(train(build(recipe, seed))), faulty=tuple(train(build(faulty, seed)))
    )
