"""Recipes: everything that defines a training program but its seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .architectures import find_architecture
from .datasets import Batch
from .optimizers import Option, ScheduleMaker

ModelStep = Callable[[nn.Module], None]
"""Something done to a model after it was made: another initialisation, a replaced layer."""

DataStep = Callable[[Tensor, Tensor, torch.Generator], Batch]
"""Something done to the training samples before they are drawn in batches."""

BatchStep = Callable[[int, Tensor, Tensor], Batch]
"""Something done to a batch before the model sees it, given the step's number."""

LossMaker = Callable[[], nn.Module]
"""Makes a loss function: a module called with the model's output and the targets."""

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoopHabits:
    """How a loop is written; the defaults are how it should be.

    Attributes:
        zero_grad_every: steps between two resets of the gradients; 0 for never.
        divide_loss: whether the loss of a micro-batch is divided by their number.
        reset_each_micro_batch: whether gradients are reset before every micro-batch.
        unscale_before_clip: whether gradients are unscaled before they are clipped.
        update_scaler: whether the gradient scaler's scale is updated after a step.
        scaled: whether the loss is scaled at all; False leaves the scaler out.
        train_mode: whether the model is put into training mode.
        evaluate_in_eval_mode: whether it is put into evaluation mode to be evaluated.
    """

    zero_grad_every: int = 1
    divide_loss: bool = True
    reset_each_micro_batch: bool = False
    unscale_before_clip: bool = True
    update_scaler: bool = True
    scaled: bool = True
    train_mode: bool = True
    evaluate_in_eval_mode: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that defines a training program but its seed.

    The first block is what a healthy program chooses; the second is what faults act on.

    Attributes:
        architecture: a name in ``ARCHITECTURES``.
        dataset: a name in ``DATASETS``.
        optimizer: a name in ``OPTIMIZERS``.
        learning_rate: of the optimizer, at its highest.
        batch_size: samples of a batch.
        steps: optimizer steps.
        activation: None for the architecture's usual one.
        optimizer_options: further arguments of the optimizer, as pairs.
        schedule: a name in ``SCHEDULES``, or what makes a scheduler.
        dropout: probability with which hidden values are dropped.
        clip_norm: threshold of the gradient's norm; None for no clipping.
        micro_batches: pieces that a batch is split into, one backward pass each.
        precision: float32, or the format of an autocast (with a gradient scaler for float16).
        evaluate_every: steps between two evaluations on held-out samples; 0 for none.
        train_samples: how many samples there are to train on; None for all.

        standardised: whether the inputs are standardised.
        shuffled: whether the samples of an epoch are drawn in random order.
        prepare_model: done to the model, in order, before the optimizer is made.
        prepare_data: done to the training samples, in order.
        prepare_batch: done to every batch, those to evaluate on included, in order.
        held_parameters: which parameters the optimizer is given; None for all.
        loss: makes the loss function; None for the usual one of the task.
        habits: how the loop is written.

    Example:
        >>> from neuraldbg.evaluation import build, train
        >>> recipe = Recipe("mlp", "wine", "adam", 1e-2)
        >>> len(train(build(recipe, seed=0)))
        120
    """

    architecture: str
    dataset: str
    optimizer: str
    learning_rate: float
    batch_size: int = 32
    steps: int = 120
    activation: str | None = None
    optimizer_options: tuple[tuple[str, Option], ...] = ()
    schedule: str | ScheduleMaker = "constant"
    dropout: float = 0.0
    clip_norm: float | None = None
    micro_batches: int = 1
    precision: Precision = "float32"
    evaluate_every: int = 0
    train_samples: int | None = None

    standardised: bool = True
    shuffled: bool = True
    prepare_model: tuple[ModelStep, ...] = ()
    prepare_data: tuple[DataStep, ...] = ()
    prepare_batch: tuple[BatchStep, ...] = ()
    held_parameters: Callable[[nn.Module], list[nn.Parameter]] | None = None
    loss: LossMaker | None = None
    habits: LoopHabits = LoopHabits()

    @property
    def activation_in_use(self) -> str:
        """The activation, the architecture's usual one where none is named.

        >>> Recipe("transformer", "tokens", "adam", 1e-3).activation_in_use
        'gelu'
        """
        return self.activation or find_architecture(self.architecture).activations[0]
