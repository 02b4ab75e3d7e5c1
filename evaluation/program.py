"""Programs made from recipes: what a training script has in hand before its loop starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from .architectures import build_architecture
from .datasets import Batch, Dataset, draw_batches, load_dataset
from .optimizers import make_optimizer, make_schedule
from .recipe import Recipe
from .tasks import TASKS


@dataclass(frozen=True, slots=True)
class Program:
    """What an ordinary training script has in hand before its loop starts.

    Attributes:
        recipe: what it was made from.
        seed: fixes weights, data and their order.
        model: in training mode unless the recipe's habits say otherwise.
        optimizer: holding the parameters that the recipe gives it.
        schedule: stepped after every step of the optimizer.
        loss_fn: takes the model's output and the targets.
        batches: one (inputs, targets) pair a step.
        evaluation: held-out samples, as the program feeds them to the model.
        dataset: where the samples are from.
    """

    recipe: Recipe
    seed: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    loss_fn: nn.Module
    batches: list[Batch]
    evaluation: Batch
    dataset: Dataset


def build(recipe: Recipe, seed: int) -> Program:
    """Make the program; torch's global random state is left as it was.

    Raises:
        ValueError: a name of the recipe is not among the choices, which the message lists.

    Example:
        >>> program = build(Recipe("mlp", "wine", "sgd", 0.1, steps=30), seed=0)
        >>> len(program.batches), tuple(program.evaluation[0].shape)
        (30, (36, 13))
        >>> build(Recipe("mlp", "wine", "sdg", 0.1), seed=0)
        Traceback (most recent call last):
        ...
        ValueError: no optimizer 'sdg'; choose from sgd, momentum, adam, adamw, rmsprop
    """
    dataset = load_dataset(recipe.dataset, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_architecture(
            recipe.architecture, dataset.shape, dataset.outputs, recipe.activation, recipe.dropout
        )
        for prepare_model in recipe.prepare_model:
            prepare_model(model)
    held = list((recipe.held_parameters or all_parameters)(model))
    optimizer = make_optimizer(
        recipe.optimizer, held, recipe.learning_rate, recipe.optimizer_options
    )
    return Program(
        recipe=recipe,
        seed=seed,
        model=model,
        optimizer=optimizer,
        schedule=make_schedule(recipe.schedule, optimizer, recipe.steps),
        loss_fn=(recipe.loss or TASKS[dataset.task].loss)(),
        batches=_training_batches(recipe, dataset, seed),
        evaluation=as_fed(recipe, dataset.held_out(seed, recipe.standardised)),
        dataset=dataset,
    )


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the model: what an optimizer should hold."""
    return list(model.parameters())


def _training_batches(recipe: Recipe, dataset: Dataset, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    samples = dataset.training(seed, recipe.standardised)
    if recipe.train_samples is not None:
        samples = samples[0][: recipe.train_samples], samples[1][: recipe.train_samples]
    for prepare_data in recipe.prepare_data:
        samples = prepare_data(*samples, generator)
    drawn = draw_batches(samples, recipe.batch_size, recipe.steps, generator, recipe.shuffled)
    return [as_fed(recipe, batch, step) for step, batch in enumerate(drawn)]


def as_fed(recipe: Recipe, batch: Batch, step: int = -1) -> Batch:
    """A batch as the recipe feeds it to the model.

    Args:
        recipe: gives what is done to every batch.
        batch: inputs and targets.
        step: the batch's number; -1 stands for samples that are not trained on.
    """
    for prepare_batch in recipe.prepare_batch:
        batch = prepare_batch(step, *batch)
    return batch
