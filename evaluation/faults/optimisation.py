"""Mistakes in the learning rate, its schedule and the optimizer."""

from __future__ import annotations

from dataclasses import replace

from neuraldbg.evaluation.faults.fault import Fault
from neuraldbg.evaluation.recipe import Recipe
from neuraldbg.failure_modes import FailureMode


def _lr_blowup(recipe: Recipe, severity: float) -> Recipe:
    return replace(recipe, learning_rate=recipe.learning_rate * 10 ** (1.3 + 0.7 * severity))


def _lr_too_low(recipe: Recipe, severity: float) -> Recipe:
    return replace(recipe, learning_rate=recipe.learning_rate * 10 ** -(1.5 + 1.5 * severity))


OPTIMISATION_FAULTS: tuple[Fault, ...] = (
    Fault(
        FailureMode.LR_BLOWUP,
        "a learning rate copied from another program, ten to a thousand times too high",
        _lr_blowup,
    ),
    Fault(
        FailureMode.LR_TOO_LOW,
        "a learning rate for fine-tuning used to train from nothing",
        _lr_too_low,
    ),
)
