"""Which optimizers step, when, and which parameters they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def watch_optimizers(
    before: Callable[[Optimizer, bool], None], after: Callable[[Optimizer], None]
) -> Callable[[], None]:
    """Call back around every step of every optimizer; returns the function that ends it.

    Args:
        before: Called with the optimizer and whether it was given a closure, in which case the
            forward and backward passes run inside the step.
        after: Called with the optimizer when its step is done.
    """

    def pre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure", args[0] if args else None)
        before(optimizer, callable(closure))

    def post(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        after(optimizer)

    handles = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


@dataclass(slots=True)
class OptimizerRecord:
    """An optimizer that stepped, and the watched parameters it holds.

    Attributes:
        number: In the order of first steps, from 0.
        held: The watched parameters in its groups.
        unset_since_step: Those of them found without a gradient at some backward pass since its
            last step: somebody reset them.
        backward_calls: Backward passes since its last step.
        backward_seen: Those of them before which the gradients were looked at.
        steps: Steps taken.
    """

    number: int
    held: set[Parameter]
    unset_since_step: set[Parameter] = field(default_factory=set)
    backward_calls: int = 0
    backward_seen: int = 0
    steps: int = 0

    def gradient_kept(self) -> float:
        """1 where most gradients of the last step were still there at every backward since."""
        known = self.backward_calls > 0 and self.backward_seen == self.backward_calls
        if not self.steps or not known or not self.held:
            return float("nan")
        return float(len(self.unset_since_step) < len(self.held) / 2)

    def close_step(self) -> None:
        """Count a step and start afresh for the next."""
        self.steps += 1
        self.backward_calls = self.backward_seen = 0
        self.unset_since_step = set()


def parameters_of(optimizer: Optimizer) -> set[Parameter]:
    """All parameters in an optimizer's groups."""
    return {p for group in optimizer.param_groups for p in group["params"]}


def learning_rate(optimizer: Optimizer) -> float:
    """The largest learning rate among an optimizer's groups, NaN where groups name none."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    return max(rates, default=float("nan"))
