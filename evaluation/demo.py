"""The healthy recipes on which each fault is shown: all on the handwritten digits."""

from __future__ import annotations

from neuraldbg.failure_modes import FailureMode

from .faults import find_fault
from .recipe import Recipe

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
