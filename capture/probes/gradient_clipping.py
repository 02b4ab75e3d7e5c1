"""Gradient clipping: the threshold, and the norm before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from torch.optim import Optimizer

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.clipping_watch import Clipping, clipping_is_seen, watch_clipping
from neuraldbg.capture.late_number import is_late, late
from neuraldbg.capture.probe import Deferred, Facts, Probe, RunView
from neuraldbg.capture.scaler_watch import ScalerTracker
from neuraldbg.series import Kind

_MOST_CALLS = 32
"""Calls of one step that are told apart; some programs clip each parameter on its own."""


class GradientClipping(Probe):
    """Leaves threshold, norm before it and two flags on the optimizer's row.

    Of several calls in one step the one that cuts most counts.
    """

    rarely = False
    facts_at_rest = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._scalers = ScalerTracker(run.guard.wrap)
        self._calls: list[tuple[Clipping, bool]] = []
        self._stop = _nothing

    def attach(self) -> None:  # noqa: D102
        self._scalers.attach()
        self._stop = watch_clipping(self.run.guard.wrap(self._note, "clipping"))

    def detach(self) -> None:  # noqa: D102
        self._stop()
        self._stop = _nothing
        self._scalers.detach()
        self._calls.clear()

    def coverage(self) -> Mapping[tuple[str, str | None], str]:  # noqa: D102
        if clipping_is_seen():
            return {}
        return {("gradient clipping", None): "this version of PyTorch does not let it be seen"}

    def _note(self, call: Clipping) -> None:
        parameter = call.parameter
        if parameter is not None and parameter not in self.run.watched_parameters:
            return
        if len(self._calls) < _MOST_CALLS:
            self._calls.append((call, self._scalers.is_scaled(parameter)))

    def _of(self, optimizer: Optimizer) -> list[tuple[Clipping, bool]]:
        """The calls of this step that concern an optimizer."""
        return [noted for noted in self._calls if _concerns(noted[0], optimizer)]

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        if self._calls:
            layers = [
                layer
                for layer in self.run.layers_with_parameters
                if any(p.grad is not None for p in layer.parameters)
            ]
            clipped = np.ones(len(layers))
            yield Deferred.of([Block(0, Kind.GRADIENT, layers, {"clipped": clipped})])

    def optimizer_facts(self, optimizer: Optimizer | None) -> Facts:  # noqa: D102
        if optimizer is None or not self._calls:
            return {}
        calls = self._of(optimizer)
        self._calls = [noted for noted in self._calls if noted not in calls]
        if not calls:
            return {}
        call, scaled = max(calls, key=lambda noted: _cut_on_host(noted[0]))
        facts = {"clip_threshold": call.threshold, "clipped_scaled": float(scaled)}
        if is_late(call.norm) or not math.isnan(call.norm):
            facts["norm_before_clip"] = call.norm
            facts["clipped"] = _late(call)
        return facts


def _concerns(call: Clipping, optimizer: Optimizer) -> bool:
    """Whether an optimizer holds what was clipped; its first parameter, as a rule."""
    return call.parameter is None or any(
        p is call.parameter for group in optimizer.param_groups for p in group["params"]
    )


def _cut_on_host(call: Clipping) -> float:
    """How far the norm is above the threshold, 0 where that is not known yet."""
    if is_late(call.norm) or not call.threshold > 0 or math.isnan(call.norm):
        return 0.0
    return call.norm / call.threshold


def _late(call: Clipping) -> float:
    if is_late(call.norm):
        return late(lambda: float(float(call.norm) > call.threshold))
    return float(call.norm > call.threshold)


def _nothing() -> None:
    """Nobody watches yet."""
