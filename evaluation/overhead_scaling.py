"""How the cost of capture grows with layers, batch and parameters, as a figure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule
from neuraldbg.evaluation.overhead_workloads import Workload, mlp, random_batch, training_loop


@dataclass(frozen=True, slots=True)
class Axis:
    """One way for a network to grow.

    Attributes:
        sizes: Along the horizontal axis.
        workloads: One for each size.
    """

    sizes: Sequence[int]
    workloads: Sequence[Workload]


def _parameters(width: int) -> int:
    return 64 * width + 4 * width * width + 10 * width


def _axes(quick: bool) -> Mapping[str, Axis]:
    layers = (10, 30) if quick else (10, 30, 100, 300, 1000)
    batches = (8, 64) if quick else (8, 32, 128, 512, 1024)
    widths = (64, 256) if quick else (480, 960, 1920, 4320, 8640)
    return {
        "layers (width 64, batch 64)": Axis(
            layers, [Workload(partial(mlp, n, 64), random_batch(64, 64)) for n in layers]
        ),
        "batch (5 layers of 256)": Axis(
            batches, [Workload(mlp, random_batch(n, 64)) for n in batches]
        ),
        "parameters (5 layers, batch 64)": Axis(
            [_parameters(w) for w in widths],
            [Workload(partial(mlp, 5, w), random_batch(64, 64)) for w in widths],
        ),
    }


def measure_step(workload: Workload, steps: int = 12) -> tuple[float, float, float]:
    """Milliseconds of a bare step, of capture in a captured step, and in one that is not.

    The bare step is timed without any watcher; what capture takes is by its own clock, median
    over steps that alternate between captured and not.
    """
    loop = training_loop(workload)
    loop.step()
    bare = []
    for _ in range(steps):
        started = time.perf_counter()
        loop.step()
        bare.append(time.perf_counter() - started)
    spent: dict[bool, list[float]] = {True: [], False: []}
    with NeuralDbg(loop.model, schedule=Schedule(dense_steps=2, periods=((2, 2),))) as dbg:
        for step in range(2 * steps):
            before = dbg.cost.seconds
            loop.step()
            if step >= steps // 2:
                spent[step % 2 == 0].append(dbg.cost.seconds - before)
    times = (bare, spent[True], spent[False])
    return tuple(1e3 * statistics.median(t) for t in times)  # type: ignore[return-value]


def draw_scaling(path: Path, quick: bool, console: Console) -> None:
    """Measure along each axis and draw one panel for it.

    Args:
        path: The figure's file; its ending names the format.
        quick: Few and small sizes.
        console: Where progress is shown and the numbers are printed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes = _axes(quick)
    figure, panels = plt.subplots(1, len(axes), figsize=(4.2 * len(axes), 3.6), sharey=True)
    labels = ("bare step", "capture, captured step", "capture, other steps")
    for panel, (title, axis) in zip(panels, axes.items(), strict=True):
        measured = [
            measure_step(workload)
            for workload in track(axis.workloads, title, console=console, transient=True)
        ]
        for label, times in zip(labels, zip(*measured, strict=True), strict=True):
            panel.plot(axis.sizes, times, marker="o", label=label)
            console.print(f"{title}: {label}: {[round(t, 3) for t in times]} ms")
        panel.set(xscale="log", yscale="log", xlabel=title)
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("milliseconds a step")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
