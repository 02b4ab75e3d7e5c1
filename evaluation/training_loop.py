"""The loop that trains a program, written as most people write theirs."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from .datasets import Batch
from .program import Program


def train(program: Program) -> list[float]:
    """Run the program's loop to its end.

    Dropout draws from torch's global generator, seeded for the run and put back afterwards.

    Returns:
        The loss of every step, before its update.

    Example:
        >>> from neuraldbg.evaluation import Recipe, build
        >>> losses = train(build(Recipe("mlp", "wine", "adam", 1e-2, micro_batches=4), seed=0))
        >>> len(losses), losses[-1] < 0.1 * losses[0]
        (120, True)
    """
    recipe, habits = program.recipe, program.recipe.habits
    scaler = None
    if recipe.precision == "float16" and habits.scaled:
        scaler = torch.amp.GradScaler("cpu")
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(program.seed)
        program.model.train(habits.train_mode)
        for step, batch in enumerate(program.batches):
            if habits.zero_grad_every and step % habits.zero_grad_every == 0:
                program.optimizer.zero_grad()
            losses.append(_accumulate(program, batch, scaler))
            if recipe.clip_norm is not None:
                if scaler is not None and habits.unscale_before_clip:
                    scaler.unscale_(program.optimizer)
                nn.utils.clip_grad_norm_(program.model.parameters(), recipe.clip_norm)
            _step(program, scaler)
            program.schedule.step()
            if recipe.evaluate_every and (step + 1) % recipe.evaluate_every == 0:
                _evaluate(program)
    return losses


def _accumulate(program: Program, batch: Batch, scaler: torch.amp.GradScaler | None) -> float:
    """The mean loss of a batch, its gradient gathered from micro-batches."""
    pieces = program.recipe.micro_batches
    habits = program.recipe.habits
    total = 0.0
    for inputs, targets in zip(*(part.chunk(pieces) for part in batch), strict=True):
        if habits.reset_each_micro_batch:
            program.optimizer.zero_grad()
        with _autocast(program):
            loss = program.loss_fn(program.model(inputs), targets)
        if pieces > 1 and habits.divide_loss:
            loss = loss / pieces
        total += loss.item() * (1.0 if habits.divide_loss else 1.0 / pieces)
        backward: Tensor = loss if scaler is None else scaler.scale(loss)
        backward.backward()  # type: ignore[no-untyped-call]
    return total


def _step(program: Program, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is None:
        program.optimizer.step()
        return
    scaler.step(program.optimizer)
    if program.recipe.habits.update_scaler:
        scaler.update()


def _evaluate(program: Program) -> None:
    """The loss on held-out samples, as a script logs it."""
    habits = program.recipe.habits
    program.model.train(not habits.evaluate_in_eval_mode)
    inputs, targets = program.evaluation
    with torch.no_grad(), _autocast(program):
        program.loss_fn(program.model(inputs), targets)
    program.model.train(habits.train_mode)


def _autocast(program: Program) -> AbstractContextManager[object]:
    precision = program.recipe.precision
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, precision))
