"""Which optimizers step, when, and which parameters they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from neuraldbg.capture.late_number import late
from neuraldbg.capture.parameter_sampler import norms


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
    _norms: list[tuple[list[int], Tensor]] = field(default_factory=list)

    def gradient_kept(self) -> float:
        """1 where most gradients of the last step were still there at every backward since."""
        known = self.backward_calls > 0 and self.backward_seen == self.backward_calls
        if not self.steps or not known or not self.held:
            return float("nan")
        few = len(self.held) / 2
        if not self._norms:
            return float(len(self.unset_since_step) < few)
        absent, seen = {id(p) for p in self.unset_since_step}, self._norms

        def kept() -> float:
            zero = {
                p for ids, found in seen for p, n in zip(ids, found.tolist(), strict=True) if not n
            }
            return float(len(absent | zero) < few)

        return late(kept)

    def note_unset(self, unset: Callable[[set[Parameter]], set[Parameter]]) -> None:
        """Find out which gradients were reset; of those on an accelerator, when asked for."""
        self.backward_seen += 1
        left = self.held - self.unset_since_step
        elsewhere = [p for p in left if p.grad is not None and not p.grad.is_cpu]
        if elsewhere:
            found = norms([p.grad for p in elsewhere if p.grad is not None])
            self._norms.append(([id(p) for p in elsewhere], found))
            left = left.difference(elsewhere)
        self.unset_since_step |= unset(left)

    def close_step(self) -> None:
        """Count a step and start afresh for the next."""
        self.steps += 1
        self.backward_calls = self.backward_seen = 0
        self.unset_since_step = set()
        self._norms = []


def parameters_of(optimizer: Optimizer) -> set[Parameter]:
    """All parameters in an optimizer's groups."""
    return {p for group in optimizer.param_groups for p in group["params"]}


def learning_rate(optimizer: Optimizer) -> float:
    """The largest learning rate among an optimizer's groups, NaN where groups name none."""
    rates = [_on_host(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    return max(rates, default=float("nan"))


def _on_host(rate: Any) -> float:
    """A rate as a number, NaN where reading it would make a device wait."""
    if isinstance(rate, Tensor) and not rate.is_cpu:
        return float("nan")
    return float(rate)


class OptimizerRegistry:
    """The optimizers that matter to the watched models, and whose turn it is.

    A step ends when an optimizer that has stepped steps again: generator and discriminator step
    once each in the same step.
    """

    def __init__(self) -> None:
        self._records: WeakKeyDictionary[Optimizer, OptimizerRecord] = WeakKeyDictionary()
        self._stepped: set[int] = set()

    def __len__(self) -> int:
        return len(self._records)

    def get(self, optimizer: Optimizer) -> OptimizerRecord | None:
        """The record of an optimizer, None if it is not known."""
        return self._records.get(optimizer)

    def add(self, optimizer: Optimizer, held: set[Parameter]) -> OptimizerRecord:
        """Take up an optimizer; one that holds another's parameters replaces that one."""
        number = len(self._records)
        for other, record in list(self._records.items()):
            if len(held & record.held) > len(held) / 2:
                del self._records[other]
                number = record.number
        record = self._records[optimizer] = OptimizerRecord(number, held)
        return record

    def clear(self) -> None:
        """Forget all of them."""
        self._records.clear()
        self._stepped.clear()

    def begins_step(self, record: OptimizerRecord) -> bool:
        """Note that an optimizer steps; whether that begins a step after the last one."""
        begins = record.number in self._stepped
        if begins:
            self._stepped.clear()
        self._stepped.add(record.number)
        return begins

    @property
    def all_stepped(self) -> bool:
        """Whether every optimizer has stepped since the step began."""
        return bool(self._records) and len(self._stepped) == len(self._records)

    def note_backward(self, unset: Callable[[set[Parameter]], set[Parameter]] | None) -> None:
        """Count a backward pass for each, and find out which gradients were reset before it.

        Args:
            unset: Gives those of some parameters whose gradient is absent or zero; None where
                that is not to be looked at now.
        """
        for record in self._records.values():
            record.backward_calls += 1
            if record.steps and unset is not None:
                record.note_unset(unset)

    def held(self) -> set[Parameter]:
        """The watched parameters that some optimizer holds."""
        return {p for record in self._records.values() for p in record.held}

    def held_by_others(self, record: OptimizerRecord | None) -> set[Parameter]:
        """The watched parameters that only other optimizers hold."""
        others = {p for r in self._records.values() if r is not record for p in r.held}
        return others - record.held if record is not None else others
