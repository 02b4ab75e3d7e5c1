"""The demo: a small network on the handwritten digits, healthy and with a fault."""

from __future__ import annotations

from dataclasses import dataclass

from neuraldbg import Explanations
from neuraldbg.failure_modes import FailureMode

from .faults import find_fault
from .recipe import Recipe
from .watched import watch

_PLAIN = Recipe("mlp", "digits", "momentum", 0.02, steps=150)
_RECIPES = {
    FailureMode.SATURATED_ACTIVATION: Recipe(
        "mlp", "digits", "momentum", 0.02, steps=150, activation="tanh"
    ),
    FailureMode.VANISHING_DEPTH: Recipe("deep_mlp", "digits", "momentum", 0.01, steps=200),
}


def demo_recipe(mode: FailureMode | str = FailureMode.HEALTHY) -> Recipe:
    """The healthy recipe on which the fault of that mode is shown in a few seconds.

    Args:
        mode: a mode with a fault, or healthy.

    Raises:
        ValueError: there is no fault for the mode; the message lists those that exist.

    Example:
        >>> demo_recipe("vanishing_depth").architecture
        'deep_mlp'
        >>> demo_recipe().architecture
        'mlp'
    """
    if mode == FailureMode.HEALTHY:
        return _PLAIN
    return _RECIPES.get(find_fault(mode).mode, _PLAIN)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run of the demo.

    Attributes:
        description: what was trained, in words.
        losses: the loss of every step.
        explanations: what NeuralDbg said of it.
    """

    description: str
    losses: list[float]
    explanations: Explanations


def run_demo(mode: FailureMode | str, faulty: bool, seed: int = 0) -> DemoRun:
    """Train the recipe on which a fault is shown, with or without the fault, and explain it.

    Args:
        mode: a mode with a fault.
        faulty: whether the fault is in it.
        seed: of weights and batches.

    Raises:
        ValueError: there is no fault for the mode; the message lists those that exist.

    Example:
        >>> run = run_demo("nan_input", faulty=True)
        >>> run.explanations[0].cause.value, run.explanations[0].step
        ('nan_input', 50)
    """
    fault = find_fault(mode)
    recipe = demo_recipe(mode)
    description = (
        f"{recipe.architecture} ({recipe.activation_in_use}) on {recipe.dataset}, "
        f"{recipe.optimizer} at {recipe.learning_rate:g}"
    )
    if faulty:
        recipe = fault.inject(recipe)
        description += f", with {fault.description}"
    run = watch(recipe, seed)
    return DemoRun(description, run.losses, run.explanations)
