"""How well a program's model does its task, and what a fault cost it against its healthy twin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuraldbg.evaluation.datasets import Batch
from neuraldbg.evaluation.program import Program, as_fed
from neuraldbg.evaluation.tasks import TASKS

HARM_LIMIT = 0.1
"""Share of the twin's progress that must be lost before a fault counts as doing harm."""
LEARNED_LIMIT = 0.8
"""Error below which a program counts as one that learns; 1 is that of a constant answer."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """How well a model does what it is trained for, in evaluation mode and on clean data.

    Attributes:
        error: on held-out samples: 0 perfect, 1 no better than a constant; infinite when the
            output is no number.
        loss: on the training samples, by the usual loss of the task.
    """

    error: float
    loss: float


def assess(program: Program) -> Assessment:
    """Assess a program's model as it is now; nothing of the program is changed.

    The samples are fed as the program feeds them, but without what its faults did to the
    training samples and with the usual loss, so that a faulty program and its twin are measured
    by the same rule.

    Example:
        >>> from neuraldbg.evaluation import Recipe, build, train
        >>> program = build(Recipe("mlp", "wine", "adam", 1e-2), seed=0)
        >>> train(program)[-1] < 0.1, assess(program).error < 0.1
        (True, True)
    """
    recipe, task = program.recipe, TASKS[program.dataset.task]
    training = as_fed(recipe, program.dataset.training(program.seed, recipe.standardised))
    was_training = [(module, module.training) for module in program.model.modules()]
    program.model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            held_out = _answer(program.model, program.evaluation)
            error = task.error(*held_out) if held_out is not None else math.inf
            answered = _answer(program.model, training)
            loss = float(task.loss()(*answered)) if answered is not None else math.inf
    finally:
        for module, mode in was_training:
            module.training = mode
    return Assessment(
        error if math.isfinite(error) else math.inf, loss if math.isfinite(loss) else math.inf
    )


Answer = Tensor | tuple[Tensor, ...]


def _answer(model: nn.Module, batch: Batch) -> tuple[Answer, Tensor] | None:
    """A model's output and the targets, in float32 and in one shape; None if it is no number."""
    inputs, targets = batch
    output = model(inputs)
    parts = (output,) if isinstance(output, Tensor) else tuple(output)
    parts = tuple(part.float() for part in parts)
    if not all(bool(part.isfinite().all()) for part in parts):
        return None
    if targets.is_floating_point():
        targets = targets.float()
        if parts[0].numel() == targets.numel():
            targets = targets.reshape(parts[0].shape)
    return (parts[0] if isinstance(output, Tensor) else parts), targets


def harm_done(untrained: Assessment, twin: Assessment, faulty: Assessment) -> float:
    """Share of the twin's progress that a fault cost, in error or in loss, whichever is more.

    0 means none, 1 that nothing was learned, more that the model ended worse than an untrained
    one; infinite when its output is no longer a number.

    Args:
        untrained: the twin before its first step.
        twin: the healthy twin at its end.
        faulty: the faulty program at its end.

    Example:
        >>> start = Assessment(1.0, 2.3)
        >>> harm_done(start, twin=Assessment(0.0, 0.3), faulty=Assessment(0.5, 0.5))
        0.5
    """
    lost_error = _lost(1.0, twin.error, faulty.error)
    return max(0.0, lost_error, _lost(untrained.loss, twin.loss, faulty.loss))


def _lost(start: float, healthy: float, faulty: float) -> float:
    progress = start - healthy
    if not math.isfinite(faulty):
        return math.inf
    return (faulty - healthy) / progress if progress > 0 else 0.0
