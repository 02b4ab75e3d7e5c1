"""Mistakes that kill, saturate or starve units."""

from __future__ import annotations

from dataclasses import replace

from neuraldbg.evaluation.architectures import find_architecture
from neuraldbg.evaluation.faults.fault import Fault, with_model_step
from neuraldbg.evaluation.mistakes import FillActivatedBiases, ScaleHiddenWeights
from neuraldbg.evaluation.recipe import Recipe
from neuraldbg.failure_modes import FailureMode


def _depends_on_relus(recipe: Recipe) -> bool:
    shortcuts = find_architecture(recipe.architecture).shortcuts
    return recipe.activation_in_use == "relu" and not shortcuts


def _has_tails(recipe: Recipe) -> bool:
    return recipe.activation_in_use in ("tanh", "sigmoid") and recipe.architecture != "gru"


def _deep_and_plain(recipe: Recipe) -> bool:
    deep = find_architecture(recipe.architecture).plain_and_deep
    return deep and recipe.activation_in_use != "sigmoid"


def _dead_relu(recipe: Recipe, severity: float) -> Recipe:
    return with_model_step(recipe, FillActivatedBiases(-(0.5 + 2.5 * severity)))


def _saturated_activation(recipe: Recipe, severity: float) -> Recipe:
    tail = 2.0 if recipe.activation_in_use == "tanh" else 4.0
    return with_model_step(recipe, FillActivatedBiases(tail * (1 + 2 * severity)))


def _vanishing_depth(recipe: Recipe, severity: float) -> Recipe:
    compensation = 4.0 ** max(0.0, 1 - severity)
    return with_model_step(replace(recipe, activation="sigmoid"), ScaleHiddenWeights(compensation))


ACTIVATION_FAULTS: tuple[Fault, ...] = (
    Fault(
        FailureMode.DEAD_RELU,
        "a bias before the ReLUs set far below zero to make them sparse",
        _dead_relu,
        _depends_on_relus,
    ),
    Fault(
        FailureMode.SATURATED_ACTIVATION,
        "a bias before tanh or sigmoid set high, as for a gate that should start open",
        _saturated_activation,
        _has_tails,
    ),
    Fault(
        FailureMode.VANISHING_DEPTH,
        "sigmoid as the activation of a deep network without shortcuts or norms",
        _vanishing_depth,
        _deep_and_plain,
    ),
)
