"""A fault: a mistake that people make, and how to make it in a healthy recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from neuraldbg.evaluation.recipe import ModelStep, Recipe
from neuraldbg.failure_modes import FailureMode


def anywhere(_recipe: Recipe) -> bool:
    """A fault that can be made in every recipe."""
    return True


def as_it_is(recipe: Recipe) -> Recipe:
    """A fault that is made in any healthy recipe as it is."""
    return recipe


def with_model_step(recipe: Recipe, step: ModelStep) -> Recipe:
    """The recipe with one more thing done to its model."""
    return replace(recipe, prepare_model=(*recipe.prepare_model, step))


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake that people make, and how to make it in a recipe.

    Attributes:
        mode: the failure mode it brings about.
        description: how a person comes to make it.
        change: makes it, whether it suits the recipe or not.
        suits: whether it can be made in a recipe and would matter there.
        ground: the healthy program that the mistake is made in, from any healthy one: one with a
            warmup to leave out, say. It is the twin that the faulty run is judged against.
        located: whether one layer is to blame.
    """

    mode: FailureMode
    description: str
    change: Callable[[Recipe, float], Recipe]
    suits: Callable[[Recipe], bool] = anywhere
    ground: Callable[[Recipe], Recipe] = as_it_is
    located: bool = False

    def applies(self, recipe: Recipe) -> bool:
        """Whether the mistake can be made in this recipe and would matter there."""
        return self.suits(recipe)

    def inject(self, recipe: Recipe, severity: float = 1.0) -> Recipe:
        """The fault's ground with the mistake in it; the given recipe is left as it is.

        Args:
            recipe: a healthy recipe.
            severity: 0 mild, 1 plain, more than 1 drastic.

        Raises:
            ValueError: the fault does not apply, or the severity is negative.

        Example:
            >>> from neuraldbg.evaluation.faults import FAULTS
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
        return self.change(self.ground(recipe), severity)
