"""Mistakes in what a network is fed."""

from __future__ import annotations

from dataclasses import replace

from neuraldbg.evaluation.datasets import input_kind, load_dataset
from neuraldbg.evaluation.faults.fault import Fault
from neuraldbg.evaluation.mistakes import PoisonOneSample, ScaleInputs
from neuraldbg.evaluation.recipe import Recipe
from neuraldbg.failure_modes import FailureMode


def _has_float_inputs(recipe: Recipe) -> bool:
    return input_kind(recipe.dataset) != "tokens"


def _has_inputs_to_scale(recipe: Recipe) -> bool:
    return _has_float_inputs(recipe) and recipe.architecture != "cnn_batchnorm"


def _unnormalised_input(recipe: Recipe, severity: float) -> Recipe:
    scale = float(load_dataset(recipe.dataset).raw_inputs.square().mean().sqrt())
    units = ScaleInputs(scale ** (severity - 1))
    return replace(recipe, standardised=False, prepare_batch=(units, *recipe.prepare_batch))


def _nan_input(recipe: Recipe, severity: float) -> Recipe:
    poison = PoisonOneSample(step=recipe.steps // 3, share=min(1.0, 0.25 * severity))
    return replace(recipe, prepare_batch=(*recipe.prepare_batch, poison))


DATA_FAULTS: tuple[Fault, ...] = (
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
)
