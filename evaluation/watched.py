"""A program trained under the eyes of NeuralDbg."""

from __future__ import annotations

from dataclasses import dataclass

from neuraldbg import Explanations, NeuralDbg

from .program import build
from .recipe import Recipe
from .training_loop import train


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """One run of a recipe, watched.

    Attributes:
        recipe: what was trained.
        losses: the loss of every step.
        debugger: what watched it, for its series and events.
        explanations: what it said at the end.
    """

    recipe: Recipe
    losses: list[float]
    debugger: NeuralDbg
    explanations: Explanations


def watch(recipe: Recipe, seed: int) -> WatchedRun:
    """Build and train a recipe inside ``with NeuralDbg(...)`` and explain it.

    Args:
        recipe: what to train.
        seed: of weights, data and order.

    Example:
        >>> watch(Recipe("mlp", "wine", "adam", 1e-2), seed=0).explanations[0].cause.value
        'healthy'
    """
    program = build(recipe, seed)
    with NeuralDbg(program.model) as debugger:
        losses = train(program)
    return WatchedRun(recipe, losses, debugger, debugger.explain_failure())
