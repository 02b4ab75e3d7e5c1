"""Following gradient scalers: when losses are scaled, gradients unscaled, steps skipped.

The methods of `torch.amp.GradScaler` are replaced in the class while somebody watches, which also
sees the scalers of training frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from neuraldbg.capture.call_watch import (
    Arguments,
    CallWatcher,
    Keywords,
    WatchedFunction,
    argument,
)

try:
    from torch.amp.grad_scaler import GradScaler
except ImportError:  # a version of PyTorch without it
    GradScaler = None  # type: ignore[assignment, misc]

_METHODS = {name: WatchedFunction(GradScaler, name) for name in ("scale", "unscale_", "step",
            "update")}  # fmt: skip


class ScalerTracker:
    """What gradient scalers have done since the last update of their scale.

    Args:
        wrap: Makes a callback unable to raise.
        before_step: Called with the optimizer that an enabled scaler is about to let step.
        after_step: Called with it when the scaler has let it step, or has not.

    Attributes:
        scale: The tensor that holds the scale now in force, None while no loss is scaled.

    Example:
        >>> import torch
        >>> tracker = ScalerTracker(lambda callback, place: callback)
        >>> weight = torch.ones(1, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        >>> tracker.attach()
        >>> scaler.scale(weight.sum()).backward()
        >>> tracker.is_scaled(weight), weight.grad.item()
        (True, 8.0)
        >>> scaler.unscale_(optimizer)
        >>> tracker.is_scaled(weight), weight.grad.item()
        (False, 1.0)
        >>> tracker.detach()
    """

    def __init__(
        self,
        wrap: Callable[[Callable[..., None], str], Callable[..., None]],
        before_step: Callable[[Optimizer], None] | None = None,
        after_step: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self.scale: Tensor | None = None
        self._wrap = wrap
        self._before_step, self._after_step = before_step, after_step
        self._unscaled: list[Optimizer] = []
        self._stops: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Start following."""
        scaled = CallWatcher(after=self._wrap(self._note_scale, "scale"))
        watchers = {
            "scale": scaled,
            "unscale_": CallWatcher(after=self._wrap(self._note_unscale, "unscale")),
            "step": CallWatcher(
                self._wrap(self._note_step, "scaler_step"),
                self._wrap(self._note_stepped, "scaler_stepped"),
            ),
            "update": CallWatcher(after=self._wrap(self._note_update, "scaler_update")),
        }
        self._stops = [
            _METHODS[name].watch(watcher)
            for name, watcher in watchers.items()
            if _METHODS[name].exists
        ]

    def detach(self) -> None:
        """Stop, and let go of what belongs to the training."""
        for stop in self._stops:
            stop()
        self._stops.clear()
        self._unscaled.clear()
        self.scale = None

    def is_scaled(self, parameter: Tensor | None) -> bool:
        """Whether a parameter's gradient, made since the last update, is still scaled."""
        if self.scale is None:
            return False
        if parameter is None:
            return not self._unscaled
        return not any(_holds(optimizer, parameter) for optimizer in self._unscaled)

    def _note_scale(self, args: Arguments, kwargs: Keywords) -> None:  # noqa: ARG002
        scaler = args[0]
        if _enabled(scaler):
            self.scale = scaler._scale

    def _note_unscale(self, args: Arguments, kwargs: Keywords) -> None:
        optimizer = argument(args, kwargs, 1, "optimizer")
        if _enabled(args[0]) and optimizer not in self._unscaled:
            self._unscaled.append(optimizer)

    def _note_step(self, args: Arguments, kwargs: Keywords) -> None:
        if _enabled(args[0]) and self._before_step is not None:
            self._before_step(argument(args, kwargs, 1, "optimizer"))

    def _note_stepped(self, args: Arguments, kwargs: Keywords) -> None:
        if _enabled(args[0]) and self._after_step is not None:
            self._after_step(argument(args, kwargs, 1, "optimizer"))

    def _note_update(self, args: Arguments, kwargs: Keywords) -> None:  # noqa: ARG002
        self.scale = None
        self._unscaled.clear()


def _enabled(scaler: Any) -> bool:
    return bool(getattr(scaler, "_enabled", False))


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])
