"""Mistakes in the weights a network starts with."""

from __future__ import annotations

from neuraldbg.evaluation.architectures import find_architecture
from neuraldbg.evaluation.datasets import input_kind
from neuraldbg.evaluation.faults.fault import Fault, with_model_step
from neuraldbg.evaluation.mistakes import ConstantWeights, NormalWeights
from neuraldbg.evaluation.recipe import Recipe
from neuraldbg.failure_modes import FailureMode


def _weights_set_the_scale(recipe: Recipe) -> bool:
    return not find_architecture(recipe.architecture).normalised


def _small_weights_stay_small(recipe: Recipe) -> bool:
    architecture = find_architecture(recipe.architecture)
    return not architecture.normalised and architecture.family != "gated_rnn"


def _weights_tell_units_apart(recipe: Recipe) -> bool:
    # Random embeddings reach the head of a network with shortcuts whatever its layers do.
    embedded = input_kind(recipe.dataset) == "tokens"
    return not (embedded and find_architecture(recipe.architecture).shortcuts)


def _init_collapse(recipe: Recipe, severity: float) -> Recipe:
    return with_model_step(recipe, NormalWeights(10 ** -(2 + severity)))


def _init_blowup(recipe: Recipe, severity: float) -> Recipe:
    return with_model_step(recipe, NormalWeights(10 ** (0.5 * severity - 0.5)))


def _symmetric_init(recipe: Recipe, severity: float) -> Recipe:
    return with_model_step(recipe, ConstantWeights(0.05, share=min(1.0, 0.5 + 0.5 * severity)))


INITIALISATION_FAULTS: tuple[Fault, ...] = (
    Fault(
        FailureMode.INIT_COLLAPSE,
        "nn.init.normal_(weight, std=1e-3) on every weight, to start out small",
        _init_collapse,
        _small_weights_stay_small,
    ),
    Fault(
        FailureMode.INIT_BLOWUP,
        "torch.randn for every weight, without a factor for the number of inputs",
        _init_blowup,
        _weights_set_the_scale,
    ),
    Fault(
        FailureMode.SYMMETRIC_INIT,
        "nn.init.constant_(weight, 0.05) and zero biases: all units of a layer alike",
        _symmetric_init,
        _weights_tell_units_apart,
    ),
)
