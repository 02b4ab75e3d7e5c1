"""Gradient accumulation: whether micro-batches are averaged, and whether all of them count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.late_number import late
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.loss_factor import graph_signature, loss_factor
from neuraldbg.capture.parameter_sampler import norms
from neuraldbg.capture.probe import Facts, Probe, RunView
from neuraldbg.capture.sampling import strided_sample
from neuraldbg.capture.scaler_watch import ScalerTracker

_MARKED = 4
"""Parameters that are looked at to tell whether gradients were reset: the smallest ones."""
_Number = Callable[[], float]


class Accumulation(Probe):
    """Leaves `loss_factor`, `gradient_rescaled` and `gradient_reset` on the optimizer's row.

    With several optimizers backward passes of one fill the gradients of the others, which those
    rightly reset: nothing is told then. Passes inside a step (closures) do not count, nor do
    those that see the same batch again or need its gradient (sharpness-aware steps, attacks).
    """

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._scalers = ScalerTracker(run.guard.wrap)
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._in_step = False
        self._clear()

    def _clear(self) -> None:
        self._factors: list[float] = []
        self._signatures: set[tuple[str, ...]] = set()
        self._entry: Tensor | None = None
        self._entered = False
        self._entries: list[Tensor | None] = []
        self._attacked = False
        self._marked: list[Parameter] = []
        self._norm: _Number | None = None
        self._kept: list[_Number] = []
        self._at_step: _Number | None = None

    def attach(self) -> None:  # noqa: D102
        self._scalers.attach()

    def detach(self) -> None:  # noqa: D102
        self._scalers.detach()
        self._optimizers = WeakSet()
        self._clear()

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: ARG002, D102
        if self._entered or self._in_step:
            return
        self._entered = True
        value = first_tensor(args)
        if value is None:  # tokens
            value = next((given for given in args if isinstance(given, Tensor)), None)
        if value is not None:
            self._attacked = self._attacked or value.requires_grad
            self._entry = strided_sample(value.detach(), max(value.dim() - 1, 0)).clone()

    def before_backward(self, roots: Sequence[Tensor]) -> None:  # noqa: D102
        if self._in_step or not roots:
            return
        if self._marked:
            self._kept.append(_ratio(_norm_now(self._marked), self._norm))
        self._factors.append(loss_factor(roots[0], self._scalers.scale))
        self._signatures.add(graph_signature(roots[0]))
        self._entries.append(self._entry)
        self._entry, self._entered = None, False

    def after_backward(self) -> None:  # noqa: D102
        if self._in_step or not self._factors:
            return
        if len(self._marked) < _MARKED:
            present = [
                p
                for layer in self.run.layers_with_parameters
                for p in layer.parameters
                if p.grad is not None
            ]
            self._marked = sorted(present, key=Parameter.numel)[:_MARKED]
        self._norm = _norm_now(self._marked)

    def before_step(self, optimizer: Optimizer) -> None:  # noqa: D102
        self._optimizers.add(optimizer)
        if self._marked:
            self._at_step = _ratio(_norm_now(self._marked), self._norm)
        self._in_step = True

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002, D102
        self._in_step = False

    def optimizer_facts(self, optimizer: Optimizer | None) -> Facts:  # noqa: D102
        if optimizer is None:
            return {}
        self._optimizers.add(optimizer)
        facts = {} if len(self._optimizers) > 1 else self._facts()
        self._clear()
        return facts

    def _facts(self) -> dict[str, float]:
        facts: dict[str, float] = {}
        if self._at_step is not None:
            facts["gradient_rescaled"] = _float(self._at_step)
        if len(self._factors) < 2 or self._attacked or None in self._entries:
            return facts
        differ = _all_differ([entry for entry in self._entries if entry is not None])
        if len(self._signatures) == 1:
            facts["loss_factor"] = _float(_where(differ, _known(min(self._factors))))
        if len(self._kept) == len(self._factors) - 1:
            facts["gradient_reset"] = _float(_where(differ, _all_zero(self._kept)))
        return facts


def _all_differ(samples: list[Tensor]) -> Callable[[], bool]:
    """Whether each backward pass saw another batch than the one before it."""

    def differ() -> bool:
        return not any(
            first.shape == second.shape and first.equal(second)
            for first, second in itertools.pairwise(samples)
        )

    return differ


def _where(condition: Callable[[], bool], number: _Number) -> _Number:
    return lambda: number() if condition() else math.nan


def _known(value: float) -> _Number:
    return lambda: value


def _norm_now(parameters: list[Parameter]) -> _Number:
    """Norm of the gradients as they are now, to be fetched later where it lies on a device."""
    present = [p.grad for p in parameters if p.grad is not None]
    if not present:
        return lambda: 0.0
    total = norms(present).norm()
    if total.is_cpu:
        value = float(total)
        return lambda: value
    return lambda: float(total)


def _ratio(now: _Number, before: _Number | None) -> _Number:
    def ratio() -> float:
        whole = math.nan if before is None else before()
        return now() / whole if 0 < whole < math.inf else math.nan

    return ratio


def _all_zero(ratios: list[_Number]) -> _Number:
    def zero() -> float:
        found = [ratio() for ratio in ratios]
        return math.nan if any(math.isnan(r) for r in found) else float(not any(found))

    return zero


def _float(number: _Number) -> float:
    """A number for the series: fetched when the series is made."""
    return late(number)
