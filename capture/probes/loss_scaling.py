"""Loss scaling: the scale, steps that the scaler skips, gradients that are still scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.late_number import is_late, late, number_of
from neuraldbg.capture.optimizer_watch import watch_optimizers
from neuraldbg.capture.probe import Deferred, Facts, Probe, RunView
from neuraldbg.capture.scaler_watch import ScalerTracker
from neuraldbg.series import Kind


class LossScaling(Probe):
    """Leaves scale and flags on the optimizer's row, and closes steps that a scaler skips.

    No optimizer hook fires at a skipped step. A fused optimizer is called nevertheless, with
    scaled gradients and a number (`found_inf`) that keeps it from applying the step.
    """

    rarely = False
    facts_at_rest = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._scalers = ScalerTracker(run.guard.wrap, self._before_scaler, self._after_scaler)
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._skipping = False
        self._fused_seen = False
        self._scaled_layers: list[Optimizer] = []
        self._stop: Callable[[], None] | None = None

    def attach(self) -> None:  # noqa: D102
        self._scalers.attach()
        self._stop = watch_optimizers(self.run.guard.wrap(self._note_step, "scaling"), _ignore)

    def detach(self) -> None:  # noqa: D102
        if self._stop is not None:
            self._stop()
            self._stop = None
        self._scalers.detach()
        self._stepped.clear()
        self._scaled_layers.clear()

    def _note_step(self, optimizer: Optimizer, has_closure: bool) -> None:  # noqa: ARG002
        if self._scalers.scale is not None:
            self._stepped.add(optimizer)

    def _before_scaler(self, optimizer: Optimizer) -> None:
        self._stepped.discard(optimizer)

    def _after_scaler(self, optimizer: Optimizer) -> None:
        if optimizer in self._stepped:
            self._stepped.discard(optimizer)
            return
        self._skipping = True
        try:
            self.run.skip_step(optimizer)
        finally:
            self._skipping = False

    def before_step(self, optimizer: Optimizer) -> None:  # noqa: D102
        if self._scalers.is_scaled(_first_parameter(optimizer)):
            self._scaled_layers.append(optimizer)

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        optimizers, self._scaled_layers = self._scaled_layers, []
        held = {p for o in optimizers for group in o.param_groups for p in group["params"]}
        layers = [
            layer
            for layer in self.run.layers_with_parameters
            if any(p in held and p.grad is not None for p in layer.parameters)
        ]
        if layers:
            scaled = np.ones(len(layers))
            yield Deferred.of([Block(0, Kind.GRADIENT, layers, {"loss_scaled": scaled})])

    def optimizer_facts(self, optimizer: Optimizer | None) -> Facts:  # noqa: D102
        scale = self._scalers.scale
        if optimizer is None or scale is None:
            return {}
        facts = {
            "loss_scale": number_of(scale),
            "loss_scaled": float(self._scalers.is_scaled(_first_parameter(optimizer))),
        }
        found_inf = getattr(optimizer, "found_inf", None)
        self._fused_seen = self._fused_seen or isinstance(found_inf, Tensor)
        if self._fused_seen:
            facts["step_applied"] = 0.0 if self._skipping else _applied(found_inf)
        return facts


def _applied(found_inf: Tensor | None) -> float:
    """1 where a fused optimizer applies its step; a `LateNumber` where that lies on a device."""
    if found_inf is None:
        return 1.0
    found = number_of(found_inf)
    if is_late(found):
        return late(lambda: float(float(found) == 0.0))
    return float(found == 0.0)


def _first_parameter(optimizer: Optimizer) -> Tensor | None:
    return next((p for group in optimizer.param_groups for p in group["params"]), None)


def _ignore(optimizer: Optimizer) -> None:
    """Nothing to do once an optimizer has stepped."""
