"""What NeuralDBG costs apart from the steps: importing it, and asking it for an explanation.

Run as `python -m neuraldbg.evaluation.latency`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from neuraldbg import NeuralDbg
from neuraldbg.failure_modes import FailureMode

from .demo import demo_recipe
from .faults import FAULTS
from .program import build
from .training_loop import train


def measure_import(repeats: int = 7) -> float:
    """Median of interleaved pairs: importing torch and neuraldbg over importing torch alone."""
    ratios = []
    for _ in range(repeats):
        alone = _time_import("import torch")
        ratios.append(_time_import("import torch, neuraldbg") / alone)
    return statistics.median(ratios)


def measure_explanation(repeats: int = 15) -> tuple[float, float]:
    """Seconds that explaining the demo's faulty run takes: the first time, and later.

    Later calls are timed each after one more step, so that nothing is kept from the call before.
    """
    mode = FailureMode.LR_BLOWUP
    program = build(FAULTS[mode].inject(demo_recipe(mode)), seed=0)
    with NeuralDbg(program.model) as dbg:
        train(program)
        first = _time_explanation(dbg)
        later = []
        for inputs, targets in program.batches[:repeats]:
            program.optimizer.zero_grad()
            program.loss_fn(program.model(inputs), targets).backward()
            program.optimizer.step()
            later.append(_time_explanation(dbg))
    return first, statistics.median(later)


def _time_import(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)  # noqa: S603 - our own words
    return time.perf_counter() - started


def _time_explanation(dbg: NeuralDbg) -> float:
    started = time.perf_counter()
    dbg.explain_failure()
    return time.perf_counter() - started


def main() -> None:
    """Print the import's ratio and the explanation's seconds."""
    console = Console()
    table = Table("what", "measured")
    for _ in track(range(1), "importing", console=console, transient=True):
        table.add_row("import torch, neuraldbg / import torch", f"{measure_import():.3f}")
    first, later = measure_explanation()
    table.add_row("explain_failure(), first call, pgmpy's import included", f"{first:.2f} s")
    table.add_row("explain_failure(), later, median", f"{1000 * later:.0f} ms")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
