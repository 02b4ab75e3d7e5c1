"""How much memory capture takes over a long run: growth when watched, beside the bare loop.

Run as `python -m neuraldbg.evaluation.memory`.
"""

from __future__ import annotations

import gc
import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from neuraldbg import NeuralDbg

STEPS = 200_000
_FIRST = 2_000
"""Steps before the growth is counted from: the first calls of everything are over."""


def resident_megabytes() -> float:
    """Memory of this process that lies in RAM, in 10^6 bytes.

    Where the system does not tell (outside Linux) it is the largest it ever was.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return pages * resource.getpagesize() / 1e6


def measure_growth(steps: int, watched: bool, console: Console | None = None) -> float:
    """Megabytes by which the process grows while a small network trains.

    Args:
        steps: Steps of the run; at least 2,000 more than are counted.
        watched: Whether it is watched, with the defaults.
        console: Where progress is shown, if anywhere.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(16, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    start = 0.0
    title = "watched" if watched else "bare"
    counter = track(range(steps), title, console=console, transient=True, disable=console is None)
    with NeuralDbg(model) if watched else nullcontext():
        for step in counter:
            if step == min(_FIRST, steps - 1):
                gc.collect()
                start = resident_megabytes()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        gc.collect()
        return resident_megabytes() - start


def main(steps: Annotated[int, typer.Option(help="Steps of each run.")] = STEPS) -> None:
    """Print by how much a long run grows, bare and watched."""
    torch.set_num_threads(1)
    console = Console()
    table = Table("run", f"growth over {steps:,} steps")
    for watched in (False, True):
        grown = measure_growth(steps, watched, console)
        table.add_row("watched" if watched else "bare", f"{grown:.1f} MB")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
