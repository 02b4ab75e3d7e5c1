"""The healthy programs of the benchmark, and how each varies with the seed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from neuraldbg.evaluation.benchmark.record import Difficulty
from neuraldbg.evaluation.hard_recipes import HARD_RECIPES
from neuraldbg.evaluation.healthy_recipes import HEALTHY_RECIPES
from neuraldbg.evaluation.recipe import Recipe

_RATE_DECADES = 0.15
_LENGTHS = (0.8, 1.3)


@cache
def program_names() -> tuple[str, ...]:
    """Names of all healthy programs, easy ones and hard ones."""
    return (*HEALTHY_RECIPES, *HARD_RECIPES)


def difficulty_of(program: str) -> Difficulty:
    """Whether a program looks as healthy as it is.

    >>> difficulty_of("mlp-digits-sgd")
    'easy'
    """
    return "hard" if program in HARD_RECIPES else "easy"


def vary(program: str, seed: int) -> Recipe:
    """A healthy program as one of many people would set it up: other rates, lengths, batches.

    The learning rate varies by up to a factor of 1.4 either way, the length of the run from 0.8
    to 1.3 of the recipe's.

    Args:
        program: one of ``program_names()``.
        seed: fixes the variation.

    Raises:
        KeyError: there is no such program.

    Example:
        >>> vary("mlp-digits-sgd", seed=3) == vary("mlp-digits-sgd", seed=3)
        True
    """
    recipe = HARD_RECIPES[program] if program in HARD_RECIPES else HEALTHY_RECIPES[program]
    draw = np.random.default_rng(seed)
    rate = recipe.learning_rate * 10 ** draw.uniform(-_RATE_DECADES, _RATE_DECADES)
    steps = round(recipe.steps * draw.uniform(*_LENGTHS))
    return replace(recipe, learning_rate=float(f"{rate:.3g}"), steps=steps)
