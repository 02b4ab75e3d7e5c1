"""Recipes of training programs, the programs made from them, and the loop that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from .architectures import build_architecture, find_architecture
from .datasets import Batch, Task, load_dataset

ModelStep = Callable[[nn.Module], None]
"""Something done to a model after it was made: another initialisation, a replaced layer."""

BatchStep = Callable[[int, Tensor, Tensor], Batch]
"""Something done to a batch before the model sees it, given the step's number."""

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = (
    MappingProxyType(
        {
            "sgd": lambda held, rate: torch.optim.SGD(held, lr=rate),
            "momentum": lambda held, rate: torch.optim.SGD(held, lr=rate, momentum=0.9),
            "adam": lambda held, rate: torch.optim.Adam(held, lr=rate),
            "adamw": lambda held, rate: torch.optim.AdamW(held, lr=rate),
            "rmsprop": lambda held, rate: torch.optim.RMSprop(held, lr=rate),
        }
    )
)
"""Makers of optimizers by name, each from the parameters to hold and the learning rate."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that defines a training program but its seed.

    The first block is what a healthy program chooses; the second is what faults act on.

    Attributes:
        architecture: a name in ``ARCHITECTURES``.
        dataset: a name in ``DATASETS``.
        optimizer: a name in ``OPTIMIZERS``.
        learning_rate: of the optimizer, constant.
        batch_size: samples of a batch.
        steps: optimizer steps.
        activation: None for the architecture's usual one.
        standardised: whether the inputs are standardised.
        prepare_model: done to the model, in order, before the optimizer is made.
        prepare_batch: done to every batch, in order.
        held_parameters: which parameters the optimizer is given; None for all.
        zero_grad_every: steps between two resets of the gradients; 0 for never.

    Example:
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

    standardised: bool = True
    prepare_model: tuple[ModelStep, ...] = ()
    prepare_batch: tuple[BatchStep, ...] = ()
    held_parameters: Callable[[nn.Module], list[nn.Parameter]] | None = None
    zero_grad_every: int = 1

    @property
    def activation_in_use(self) -> str:
        """The activation, the architecture's usual one where none is named.

        >>> Recipe("transformer", "tokens", "adam", 1e-3).activation_in_use
        'gelu'
        """
        return self.activation or find_architecture(self.architecture).activations[0]


@dataclass(frozen=True, slots=True)
class Program:
    """What an ordinary training script has in hand before its loop starts.

    Attributes:
        recipe: what it was made from.
        seed: fixes weights, data and their order.
        model: in training mode.
        optimizer: holding the parameters that the recipe gives it.
        loss_fn: takes the model's output and the targets.
        batches: one (inputs, targets) pair a step.
        task: classification or regression.
    """

    recipe: Recipe
    seed: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: nn.Module
    batches: list[Batch]
    task: Task


def build(recipe: Recipe, seed: int) -> Program:
    """Make the program; torch's global random state is left as it was.

    Raises:
        ValueError: a name of the recipe is not among the choices, which the message lists.

    Example:
        >>> build(Recipe("mlp", "wine", "sdg", 0.1), seed=0)
        Traceback (most recent call last):
        ...
        ValueError: no optimizer 'sdg'; choose from sgd, momentum, adam, adamw, rmsprop
    """
    if recipe.optimizer not in OPTIMIZERS:
        raise ValueError(f"no optimizer {recipe.optimizer!r}; choose from {', '.join(OPTIMIZERS)}")
    dataset = load_dataset(recipe.dataset, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_architecture(
            recipe.architecture, dataset.shape, dataset.outputs, recipe.activation
        )
        for prepare_model in recipe.prepare_model:
            prepare_model(model)
    held = list((recipe.held_parameters or all_parameters)(model))
    drawn = dataset.batches(recipe.batch_size, recipe.steps, seed, recipe.standardised)
    return Program(
        recipe=recipe,
        seed=seed,
        model=model,
        optimizer=OPTIMIZERS[recipe.optimizer](held, recipe.learning_rate),
        loss_fn=nn.CrossEntropyLoss() if dataset.task == "classification" else nn.MSELoss(),
        batches=[_prepared(recipe, step, batch) for step, batch in enumerate(drawn)],
        task=dataset.task,
    )


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the model: what an optimizer should hold."""
    return list(model.parameters())


def _prepared(recipe: Recipe, step: int, batch: Batch) -> Batch:
    for prepare_batch in recipe.prepare_batch:
        batch = prepare_batch(step, *batch)
    return batch


def train(program: Program) -> list[float]:
    """Run the program's loop to its end.

    The loop is the usual one. Dropout draws from torch's global generator, seeded for the run
    and put back afterwards.

    Returns:
        The loss of every step, before its update.
    """
    every = program.recipe.zero_grad_every
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(program.seed)
        for step, (inputs, targets) in enumerate(program.batches):
            if every and step % every == 0:
                program.optimizer.zero_grad()
            loss = program.loss_fn(program.model(inputs), targets)
            loss.backward()
            program.optimizer.step()
            losses.append(loss.item())
    return losses
