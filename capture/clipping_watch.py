"""Seeing PyTorch's gradient clipping: which gradients, the threshold, the norm before it.

`clip_grad_norm_` looks the function that scales the gradients up in its module when it is called,
so that a replacement there also sees callers who imported `clip_grad_norm_` by name long before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from neuraldbg.capture.call_watch import (
    Arguments,
    CallWatcher,
    Keywords,
    WatchedFunction,
    argument,
)
from neuraldbg.capture.late_number import number_of

_BY_NORM = (
    WatchedFunction(clip_grad, "_clip_grads_with_norm_"),
    WatchedFunction(torch.nn.utils, "clip_grads_with_norm_"),
)
_BY_VALUE = (
    WatchedFunction(clip_grad, "clip_grad_value_"),
    WatchedFunction(torch.nn.utils, "clip_grad_value_"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Clipping:
    """One call of a clipping function, told before it changes anything.

    Attributes:
        parameter: The first whose gradient is clipped, None where that cannot be told without
            using an iterator up.
        threshold: What the norm (or each value) is clipped to, NaN where it lies on a device.
        norm: Of all gradients together; NaN where each value is clipped on its own. A
            `LateNumber` where it lies on a device.
    """

    parameter: Tensor | None
    threshold: float
    norm: float


def watch_clipping(callback: Callable[[Clipping], None]) -> Callable[[], None]:
    """Call back before each clipping; returns the function that ends it.

    Example:
        >>> seen, weight = [], torch.ones(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> stop = watch_clipping(seen.append)
        >>> norm = torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
        >>> stop()
        >>> seen[0].threshold, seen[0].norm, seen[0].parameter is weight
        (1.0, 5.0, True)
    """

    def by_norm(args: Arguments, kwargs: Keywords) -> None:
        norm = argument(args, kwargs, 2, "total_norm")
        found = number_of(norm) if isinstance(norm, Tensor) else float("nan")
        callback(Clipping(_first(args, kwargs), _threshold(args, kwargs, "max_norm"), found))

    def by_value(args: Arguments, kwargs: Keywords) -> None:
        threshold = _threshold(args, kwargs, "clip_value")
        callback(Clipping(_first(args, kwargs), threshold, float("nan")))

    stops = [f.watch(CallWatcher(by_norm)) for f in _BY_NORM if f.exists]
    stops += [f.watch(CallWatcher(by_value)) for f in _BY_VALUE if f.exists]

    def stop() -> None:
        for end in stops:
            end()

    return stop


def clipping_is_seen() -> bool:
    """Whether this version of PyTorch lets clipping by norm be seen."""
    return _BY_NORM[0].exists


def _first(args: Arguments, kwargs: Keywords) -> Tensor | None:
    parameters = argument(args, kwargs, 0, "parameters")
    if isinstance(parameters, (list, tuple)) and parameters:
        parameters = parameters[0]
    return parameters if isinstance(parameters, Tensor) else None


def _threshold(args: Arguments, kwargs: Keywords, name: str) -> float:
    given = argument(args, kwargs, 1, name)
    if isinstance(given, Tensor):
        return number_of(given) if given.is_cpu else float("nan")
    return float(given) if isinstance(given, (int, float)) else float("nan")
