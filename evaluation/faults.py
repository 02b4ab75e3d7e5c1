"""The faults that can be put into a healthy recipe, one a failure mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from neuraldbg.failure_modes import FailureMode

from .architectures import find_architecture
from .datasets import input_kind, load_dataset
from .mistakes import (
    ConstantWeights,
    FillActivatedBiases,
    HoldLastLayers,
    NormalWeights,
    PoisonOneSample,
    ScaleHiddenWeights,
    ScaleInputs,
)
from .recipe import Recipe


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake that people make, and how to make it in a recipe.

    Attributes:
        mode: the failure mode it brings about.
        description: how a person comes to make it.
        change: makes it, whether it suits the recipe or not.
        suits: whether it can be made in a recipe and would matter there.
    """

    mode: FailureMode
    description: str
    change: Callable[[Recipe, float], Recipe]
    suits: Callable[[Recipe], bool]

    def applies(self, recipe: Recipe) -> bool:
        """Whether the mistake can be made in this recipe and would matter there."""
        return self.suits(recipe)

    def inject(self, recipe: Recipe, severity: float = 1.0) -> Recipe:
        """The recipe with the mistake in it; the given one is left as it is.

        Args:
            recipe: a healthy recipe.
            severity: 0 mild, 1 plain, more than 1 drastic.

        Raises:
            ValueError: the fault does not apply, or the severity is negative.

        Example:
            >>> recipe = Recipe("mlp", "digits", "sgd", 0.1)
            >>> FAULTS[FailureMode.LR_BLOWUP].inject(recipe).learning_rate
            10.0
            >>> FAULTS[FailureMode.DEAD_RELU].inject(Recipe("rnn", "tones", "adam", 1e-3))
            Traceback (most recent call last):
            ...
            ValueError: dead_relu does not apply to rnn (tanh) on tones
        """
        if not severity >= 0:
            raise ValueError(f"severity={severity} must be a number of at least 0")
        if not self.applies(recipe):
            raise ValueError(
                f"{self.mode} does not apply to {recipe.architecture} "
                f"({recipe.activation_in_use}) on {recipe.dataset}"
            )
        return self.change(recipe, severity)


def _always(recipe: Recipe) -> bool:
    return True


def _weights_set_the_scale(recipe: Recipe) -> bool:
    return not find_architecture(recipe.architecture).normalised


def _small_weights_stay_small(recipe: Recipe) -> bool:
    architecture = find_architecture(recipe.architecture)
    return not architecture.normalised and architecture.family != "gated_rnn"


def _depends_on_relus(recipe: Recipe) -> bool:
    shortcuts = find_architecture(recipe.architecture).shortcuts
    return recipe.activation_in_use == "relu" and not shortcuts


def _weights_tell_units_apart(recipe: Recipe) -> bool:
    # Random embeddings reach the head of a network with shortcuts whatever its layers do.
    embedded = input_kind(recipe.dataset) == "tokens"
    return not (embedded and find_architecture(recipe.architecture).shortcuts)


def _has_tails(recipe: Recipe) -> bool:
    return recipe.activation_in_use in ("tanh", "sigmoid") and recipe.architecture != "gru"


def _deep_and_plain(recipe: Recipe) -> bool:
    deep = find_architecture(recipe.architecture).plain_and_deep
    return deep and recipe.activation_in_use != "sigmoid"


def _has_float_inputs(recipe: Recipe) -> bool:
    return input_kind(recipe.dataset) != "tokens"


def _has_inputs_to_scale(recipe: Recipe) -> bool:
    return _has_float_inputs(recipe) and recipe.architecture != "cnn_batchnorm"


def _lr_blowup(recipe: Recipe, severity: float) -> Recipe:
    return replace(recipe, learning_rate=recipe.learning_rate * 10 ** (1.3 + 0.7 * severity))


def _lr_too_low(recipe: Recipe, severity: float) -> Recipe:
    return replace(recipe, learning_rate=recipe.learning_rate * 10 ** -(1.5 + 1.5 * severity))


def _init_collapse(recipe: Recipe, severity: float) -> Recipe:
    return _with_model_step(recipe, NormalWeights(10 ** -(2 + severity)))


def _init_blowup(recipe: Recipe, severity: float) -> Recipe:
    return _with_model_step(recipe, NormalWeights(10 ** (0.5 * severity - 0.5)))


def _symmetric_init(recipe: Recipe, severity: float) -> Recipe:
    return _with_model_step(recipe, ConstantWeights(0.05, share=min(1.0, 0.5 + 0.5 * severity)))


def _dead_relu(recipe: Recipe, severity: float) -> Recipe:
    return _with_model_step(recipe, FillActivatedBiases(-(0.5 + 2.5 * severity)))


def _saturated_activation(recipe: Recipe, severity: float) -> Recipe:
    tail = 2.0 if recipe.activation_in_use == "tanh" else 4.0
    return _with_model_step(recipe, FillActivatedBiases(tail * (1 + 2 * severity)))


def _vanishing_depth(recipe: Recipe, severity: float) -> Recipe:
    compensation = 4.0 ** max(0.0, 1 - severity)
    return _with_model_step(replace(recipe, activation="sigmoid"), ScaleHiddenWeights(compensation))


def _unnormalised_input(recipe: Recipe, severity: float) -> Recipe:
    scale = float(load_dataset(recipe.dataset).raw_inputs.square().mean().sqrt())
    units = ScaleInputs(scale ** (severity - 1))
    return replace(recipe, standardised=False, prepare_batch=(units, *recipe.prepare_batch))


def _nan_input(recipe: Recipe, severity: float) -> Recipe:
    poison = PoisonOneSample(step=recipe.steps // 3, share=min(1.0, 0.25 * severity))
    return replace(recipe, prepare_batch=(*recipe.prepare_batch, poison))


def _missing_zero_grad(recipe: Recipe, severity: float) -> Recipe:
    steps_between = 0 if severity >= 1 else round(10 / (1 - severity))
    return replace(recipe, habits=replace(recipe.habits, zero_grad_every=steps_between))


def _param_not_in_optimizer(recipe: Recipe, severity: float) -> Recipe:
    return replace(recipe, held_parameters=HoldLastLayers(missed=min(1.0, 0.5 + 0.5 * severity)))


def _with_model_step(recipe: Recipe, step: Callable[..., None]) -> Recipe:
    return replace(recipe, prepare_model=(*recipe.prepare_model, step))


FAULTS: Mapping[FailureMode, Fault] = MappingProxyType(
    {
        fault.mode: fault
        for fault in (
            Fault(
                FailureMode.LR_BLOWUP,
                "a learning rate copied from another program, ten to a thousand times too high",
                _lr_blowup,
                _always,
            ),
            Fault(
                FailureMode.LR_TOO_LOW,
                "a learning rate for fine-tuning used to train from nothing",
                _lr_too_low,
                _always,
            ),
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
            Fault(
                FailureMode.UNNORMALISED_INPUT,
                "features or pixels fed in the units they were stored in",
                _unnormalised_input,
                _has_inputs_to_scale,
            ),
            Fault(
                FailureMode.NAN_INPUT,
                "a missing value in one record, read as NaN and never checked",
                _nan_input,
                _has_float_inputs,
            ),
            Fault(
                FailureMode.MISSING_ZERO_GRAD,
                "optimizer.zero_grad() forgotten, or called once an epoch",
                _missing_zero_grad,
                _always,
            ),
            Fault(
                FailureMode.PARAM_NOT_IN_OPTIMIZER,
                "an optimizer given only the head's parameters, or layers kept in a plain list",
                _param_not_in_optimizer,
                _always,
            ),
        )
    }
)
"""All faults by failure mode."""


def find_fault(mode: FailureMode | str) -> Fault:
    """The fault for a failure mode, given as the enum or its value.

    Raises:
        ValueError: there is none; the message lists those that exist.

    Example:
        >>> find_fault("nan_input").mode
        <FailureMode.NAN_INPUT: 'nan_input'>
    """
    for fault in FAULTS.values():
        if fault.mode == mode:
            return fault
    raise ValueError(f"no fault for {str(mode)!r}; choose from {', '.join(FAULTS)}")
