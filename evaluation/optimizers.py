"""The optimizers and learning-rate schedules that recipes choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

Option = float | bool | tuple[float, float]
"""Value of an optimizer's argument."""

ScheduleMaker = Callable[[Optimizer, int], LRScheduler]
"""Makes a scheduler, which is stepped after every optimizer step, from their number."""

OPTIMIZERS: Mapping[str, tuple[type[Optimizer], Mapping[str, Option]]] = MappingProxyType(
    {
        "sgd": (SGD, {}),
        "momentum": (SGD, {"momentum": 0.9}),
        "adam": (Adam, {}),
        "adamw": (AdamW, {}),
        "rmsprop": (RMSprop, {}),
    }
)
"""Optimizers by name: the class, and its arguments beside the learning rate."""

ADAPTIVE = frozenset({"adam", "adamw", "rmsprop"})
"""Optimizers whose steps do not grow with the gradient."""


def make_optimizer(
    name: str,
    parameters: list[nn.Parameter],
    learning_rate: float,
    options: tuple[tuple[str, Option], ...] = (),
) -> Optimizer:
    """An optimizer of a name in ``OPTIMIZERS``.

    Raises:
        ValueError: there is no such name; the message lists those that exist.

    Example:
        >>> weights = [nn.Parameter(nn.Linear(2, 1).weight)]
        >>> make_optimizer("momentum", weights, 0.1, (("weight_decay", 0.5),)).defaults["momentum"]
        0.9
        >>> make_optimizer("sdg", weights, 0.1)
        Traceback (most recent call last):
        ...
        ValueError: no optimizer 'sdg'; choose from sgd, momentum, adam, adamw, rmsprop
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer {name!r}; choose from {', '.join(OPTIMIZERS)}")
    kind, usual = OPTIMIZERS[name]
    chosen: dict[str, Any] = {"lr": learning_rate, **usual, **dict(options)}
    return kind(parameters, **chosen)


def _constant(optimizer: Optimizer, steps: int) -> LRScheduler:
    return ConstantLR(optimizer, factor=1.0, total_iters=1)


def _warmup(optimizer: Optimizer, steps: int) -> LRScheduler:
    return LinearLR(optimizer, start_factor=0.01, total_iters=max(1, steps // 4))


def _cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=steps)


def _warmup_cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    first = max(1, steps // 10)
    return SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.01, total_iters=first),
            CosineAnnealingLR(optimizer, T_max=max(1, steps - first)),
        ],
        milestones=[first],
    )


def _step(optimizer: Optimizer, steps: int) -> LRScheduler:
    return StepLR(optimizer, step_size=max(1, steps // 3), gamma=0.3)


SCHEDULES: Mapping[str, ScheduleMaker] = MappingProxyType(
    {
        "constant": _constant,
        "warmup": _warmup,
        "cosine": _cosine,
        "warmup_cosine": _warmup_cosine,
        "step": _step,
    }
)
"""Schedules by name, stretched over the steps of the program."""


def make_schedule(schedule: str | ScheduleMaker, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The scheduler of a name in ``SCHEDULES``, or of a maker.

    Raises:
        ValueError: there is no such name; the message lists those that exist.

    Example:
        >>> optimizer = make_optimizer("sgd", [nn.Parameter(nn.Linear(2, 1).weight)], 0.1)
        >>> make_schedule("cosin", optimizer, 100)
        Traceback (most recent call last):
        ...
        ValueError: no schedule 'cosin'; choose from constant, warmup, cosine, warmup_cosine, step
    """
    if not isinstance(schedule, str):
        return schedule(optimizer, steps)
    if schedule not in SCHEDULES:
        raise ValueError(f"no schedule {schedule!r}; choose from {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule](optimizer, steps)
