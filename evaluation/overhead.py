"""What capture costs: step time with it against the bare loop, side by side in one process.

Run as `python -m neuraldbg.evaluation.overhead`; `--scaling FILE` draws how the cost grows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from neuraldbg import NeuralDbg
from neuraldbg.evaluation.observers import OBSERVERS, Observer
from neuraldbg.evaluation.overhead_workloads import WORKLOADS, Loop, Workload, training_loop

PAIRS = 7
STEPS_PER_BLOCK = 64
"""At least; a block holds at least two captured steps."""


def measure_overhead(
    workload: Workload, observer: Observer = OBSERVERS["defaults"], pairs: int = PAIRS
) -> float:
    """Median over interleaved blocks of the step time when watched over that without.

    Two equal models train on the same batch, one bare and one watched; blocks of steps alternate
    between them, and each ratio is of neighbouring blocks, so that a machine that speeds up or
    slows down between them does not count. Half-way the two change places, so that where their
    memory happens to lie does not count either; the result is the geometric mean of both halves.

    Args:
        workload: What to train.
        observer: How it is watched.
        pairs: Pairs of blocks in each half.

    Raises:
        RuntimeError: the capture failed on the way, so that its cost would mean nothing.
    """
    first, second = (training_loop(workload, observer.compiled) for _ in range(2))
    halves = [
        _measure_half(bare, watched, observer, pairs)
        for bare, watched in ((first, second), (second, first))
    ]
    return math.sqrt(halves[0] * halves[1])


def _measure_half(bare: Loop, watched: Loop, observer: Observer, pairs: int) -> float:
    with observer.watch(watched.model) as dbg:
        for _ in range(observer.warm_up):
            watched.step()
        bare.step()
        steps = STEPS_PER_BLOCK
        if isinstance(dbg, NeuralDbg):
            steps = max(steps, 2 * dbg.cost.period)
        ratios = []
        for pair in range(pairs):
            # Which of the two goes first alternates, against drift within a pair.
            order = (bare, watched) if pair % 2 else (watched, bare)
            times = {id(loop): _time_block(loop.step, steps) for loop in order}
            ratios.append(times[id(watched)] / times[id(bare)])
    if isinstance(dbg, NeuralDbg) and dbg.faults:
        raise RuntimeError(f"capture failed, so its cost means nothing: {dbg.faults}")
    return statistics.median(ratios)


def _time_block(step: Callable[[], None], steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - started


def main(
    pairs: Annotated[int, typer.Option(help="Pairs of blocks in each half.")] = PAIRS,
    quick: Annotated[bool, typer.Option(help="The smallest network and no compiler.")] = False,
    scaling: Annotated[
        Path | None, typer.Option(help="Draw how the cost grows with a network into this file.")
    ] = None,
) -> None:
    """Print step time over that of the bare loop for each network and way of watching it."""
    torch.set_num_threads(1)
    console = Console()
    if scaling is not None:
        from neuraldbg.evaluation.overhead_scaling import draw_scaling

        draw_scaling(scaling, quick, console)
        return
    workloads = dict(list(WORKLOADS.items())[:1]) if quick else dict(WORKLOADS)
    observers = {name: o for name, o in OBSERVERS.items() if not (quick and o.compiled)}
    table = Table("step time / bare", *observers)
    for name in track(workloads, "measuring", console=console, transient=True):
        ratios = [measure_overhead(workloads[name], o, pairs) for o in observers.values()]
        table.add_row(name, *(f"{ratio:.3f}" for ratio in ratios))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
