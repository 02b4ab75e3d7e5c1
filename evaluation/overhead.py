"""What capture costs: step time with it against the bare loop, side by side in one process.

Run as `python -m neuraldbg.evaluation.overhead`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from neuraldbg import NeuralDbg

BLOCKS = 5
STEPS_PER_BLOCK = 64
"""Twice the distance of captured steps, so that every block holds the same number of them."""
WARM_UP_STEPS = 200
"""Steps before the first block: the dense start of a run is over and caches are warm."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, one batch for it, and how its optimizer is made."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]


class _SequenceClassifier(nn.Module):
    """A 4-layer transformer encoder of width 256 over 32 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Shape (batch, time, 32) to logits of shape (batch, 10)."""
        logits: Tensor = self.head(self.encoder(self.embed(inputs)).mean(dim=1))
        return logits


def _mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def _cnn() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def _batch(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(*shape), torch.randint(10, shape[:1]))


WORKLOADS: Mapping[str, Workload] = {
    "MLP 5x256, batch 64": Workload(_mlp, _batch(64, 64)),
    "CNN 32x32, batch 32": Workload(_cnn, _batch(32, 3, 32, 32)),
    "transformer 4x256, batch 8": Workload(_SequenceClassifier, _batch(8, 32, 32)),
}


def measure_overhead(workload: Workload, blocks: int = BLOCKS) -> float:
    """Median over interleaved blocks of the step time with capture over that without.

    Two equal models train on the same batch, one bare and one watched; blocks of steps alternate
    between them, and each ratio is of neighbouring blocks, so that a machine that speeds up or
    slows down between them does not count. Half-way the two change places, so that where their
    memory happens to lie does not count either; the result is the geometric mean of both halves.

    Args:
        workload: What to train.
        blocks: Pairs of blocks in each half.

    Raises:
        RuntimeError: the capture failed on the way, so that its cost would mean nothing.
    """
    first, second = _training_step(workload), _training_step(workload)
    halves = [
        _measure_half(bare, watched, blocks) for bare, watched in ((first, second), (second, first))
    ]
    return math.sqrt(halves[0] * halves[1])


def _measure_half(bare: _Loop, watched: _Loop, blocks: int) -> float:
    with NeuralDbg(watched.model) as dbg:
        for _ in range(WARM_UP_STEPS):
            watched.step()
        ratios = []
        for pair in range(blocks):
            # Which of the two goes first alternates, against drift within a pair.
            order = (bare, watched) if pair % 2 else (watched, bare)
            times = {id(loop): _time_block(loop.step) for loop in order}
            ratios.append(times[id(watched)] / times[id(bare)])
    if dbg.faults:
        raise RuntimeError(f"capture failed, so its cost means nothing: {dbg.faults}")
    return statistics.median(ratios)


@dataclass(frozen=True, slots=True)
class _Loop:
    model: nn.Module
    step: Callable[[], None]


def _training_step(workload: Workload) -> _Loop:
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = workload.make_batch()

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return _Loop(model, step)


def _time_block(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(STEPS_PER_BLOCK):
        step()
    return time.perf_counter() - started


def main(blocks: int = BLOCKS) -> None:
    """Print the ratio for each workload, on one thread."""
    torch.set_num_threads(1)
    console = Console()
    table = Table("workload", "step time with capture / bare")
    for name in track(WORKLOADS, "measuring", console=console, transient=True):
        table.add_row(name, f"{measure_overhead(WORKLOADS[name], blocks):.3f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
