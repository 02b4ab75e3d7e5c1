"""Mistakes in how model, loss and optimizer are put together."""

from __future__ import annotations

from dataclasses import replace

from neuraldbg.evaluation.faults.fault import Fault
from neuraldbg.evaluation.mistakes import HoldLastLayers
from neuraldbg.evaluation.recipe import Recipe
from neuraldbg.failure_modes import FailureMode


def _missing_zero_grad(recipe: Recipe, severity: float) -> Recipe:
    steps_between = 0 if severity >= 1 else round(10 / (1 - severity))
    return replace(recipe, habits=replace(recipe.habits, zero_grad_every=steps_between))


def _param_not_in_optimizer(recipe: Recipe, severity: float) -> Recipe:
    return replace(recipe, held_parameters=HoldLastLayers(missed=min(1.0, 0.5 + 0.5 * severity)))


WIRING_FAULTS: tuple[Fault, ...] = (
    Fault(
        FailureMode.MISSING_ZERO_GRAD,
        "optimizer.zero_grad() forgotten, or called once an epoch",
        _missing_zero_grad,
    ),
    Fault(
        FailureMode.PARAM_NOT_IN_OPTIMIZER,
        "an optimizer given only the head's parameters, or layers kept in a plain list",
        _param_not_in_optimizer,
    ),
)
