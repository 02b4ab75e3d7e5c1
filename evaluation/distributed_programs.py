"""Programs that several processes run together, for torchrun, and what they leave behind.

``python -m torch.distributed.run --nproc-per-node 2 -m neuraldbg.evaluation.distributed_programs
FOLDER NAME ...`` trains each named program on the CPU over gloo. Every rank leaves its series as
``<name>-<rank>.csv`` and what it measured of itself as ``<name>-<rank>.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule
from neuraldbg.series import build_series

EVERY_STEP = Schedule(dense_steps=1_000_000)
_BATCH = 16
_FEATURES = 5
_CLASSES = 3


@dataclass(frozen=True, slots=True)
class DistributedProgram:
    """A training program of several ranks.

    Attributes:
        sharded: The parts of the model whose parameters are split over the ranks (FSDP2), group
            by group, "" for the rest; none where each rank has all of them (DDP).
        after_wrapping: Done to the bare model once it is wrapped, given the rank.
        before_step: Done to the bare model before a step, given the step and the rank.
        bypasses_wrapper: Whether the loop calls the bare model, so that gradients stay local.
        micro_batches: Backward passes of a step, all but the last without synchronisation.
        steps: Optimizer steps.
        clips: Whether gradients are clipped, at a norm above all that occur.
        watches_wrapper: Whether `NeuralDbg` is given the wrapper, not the bare model.
    """

    sharded: tuple[str, ...] = ()
    after_wrapping: Callable[[nn.Module, int], None] | None = None
    before_step: Callable[[nn.Module, int, int], None] | None = None
    bypasses_wrapper: bool = False
    micro_batches: int = 1
    steps: int = 12
    clips: bool = False
    watches_wrapper: bool = False


class Blocks(nn.Module):
    """A classifier of layers whose rows do not divide evenly among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Sequential(nn.Linear(_FEATURES, 14), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(14, 7), nn.LayerNorm(7), nn.Tanh())
        self.head = nn.Linear(7, _CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """From shape (samples, features) to (samples, classes)."""
        scores: Tensor = self.head(self.body(self.entry(inputs)))
        return scores


def _restart(model: nn.Module, rank: int) -> None:
    """Draw weights anew on every rank but the first, after those of the first went to all."""
    if rank:
        torch.manual_seed(1_000 + rank)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


def _scale_on_last_rank(model: nn.Module, step: int, rank: int) -> None:
    """Shrink one layer's weights before step 6, on the last rank alone."""
    if step == 6 and rank == torch.distributed.get_world_size() - 1:
        with torch.no_grad():
            model.get_parameter("body.0.weight").mul_(0.9)


def _die_on_last_rank(model: nn.Module, step: int, rank: int) -> None:
    """End the last rank's process before step 6, at once and without a word to the others.

    It reports success, since torchrun kills the others when one fails.
    """
    if step == 6 and rank == torch.distributed.get_world_size() - 1:
        os._exit(0)


PROGRAMS: Mapping[str, DistributedProgram] = MappingProxyType(
    {
        "replicated": DistributedProgram(watches_wrapper=True),
        "accumulating": DistributedProgram(micro_batches=3),
        "bypassed": DistributedProgram(bypasses_wrapper=True),
        "unequal_start": DistributedProgram(after_wrapping=_restart),
        "scaled_on_one_rank": DistributedProgram(before_step=_scale_on_last_rank),
        "sharded": DistributedProgram(sharded=("body", ""), clips=True),
        "sharded_as_one": DistributedProgram(sharded=("",)),
        "rank_dies": DistributedProgram(before_step=_die_on_last_rank),
    }
)
"""Programs by name: healthy ones, ones whose replicas part, and one that loses a rank."""


@dataclass(slots=True)
class Outcome:
    """What a rank measured of one training.

    Attributes:
        weights: Digest of the final weights, of the local shards where they are split.
        collectives: Collectives that the whole group started during the training.
        statistics: Of each weight before each step, of the whole tensor: name to numbers; only
            where asked for.
        error: What the training failed with, empty where it did not.
    """

    weights: str = ""
    collectives: int = 0
    statistics: list[dict[str, dict[str, float]]] = field(default_factory=list)
    error: str = ""


def train_program(
    program: DistributedProgram, watched: bool, with_statistics: bool = False
) -> tuple[Outcome, NeuralDbg | None]:
    """Train a program on this rank; the process group is initialised.

    Args:
        program: Which.
        watched: Whether `NeuralDbg` watches.
        with_statistics: Whether to take statistics of whole tensors at every step, which costs
            collectives of its own.
    """
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    bare = Blocks()
    wrapped = _wrapped(bare, program.sharded)
    if program.after_wrapping:
        program.after_wrapping(bare, rank)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02, momentum=0.9)
    batches = _batches(rank, program.steps * program.micro_batches)
    outcome = Outcome()
    debugger = None
    if watched:
        model = wrapped if program.watches_wrapper else bare
        debugger = NeuralDbg(model, schedule=EVERY_STEP)
    before = _collectives()
    with ExitStack() as stack:
        try:
            if debugger is not None:
                stack.enter_context(debugger)
            for step in range(program.steps):
                if program.before_step:
                    program.before_step(bare, step, rank)
                optimizer.zero_grad()
                _accumulate(program, bare, wrapped, batches)
                if program.clips:
                    nn.utils.clip_grad_norm_(wrapped.parameters(), 100.0)
                if with_statistics:
                    outcome.statistics.append(_statistics_of(bare))
                optimizer.step()
        except RuntimeError as error:  # another rank is gone
            outcome.error = str(error)
    outcome.collectives = _collectives() - before
    outcome.weights = _digest(bare)
    return outcome, debugger


def _wrapped(bare: nn.Module, sharded: Sequence[str]) -> nn.Module:
    if not sharded:
        return DistributedDataParallel(bare)
    from torch.distributed.fsdp import fully_shard

    for name in sharded:
        fully_shard(bare.get_submodule(name))
    return bare


def _accumulate(
    program: DistributedProgram,
    bare: nn.Module,
    wrapped: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
) -> None:
    called = bare if program.bypasses_wrapper else wrapped
    for number in range(program.micro_batches):
        last = number == program.micro_batches - 1
        with nullcontext() if last else _without_averaging(wrapped):
            inputs, targets = next(batches)
            loss = nn.functional.cross_entropy(called(inputs), targets) / program.micro_batches
            torch.autograd.backward(loss)


def _without_averaging(wrapped: nn.Module) -> AbstractContextManager[object]:
    assert isinstance(wrapped, DistributedDataParallel)
    local: AbstractContextManager[object] = wrapped.no_sync()
    return local


def _batches(rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a rank's own: which feature is largest decides about the class."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        inputs = torch.randn(_BATCH, _FEATURES, generator=generator)
        yield inputs, inputs[:, :_CLASSES].argmax(1)


def _collectives() -> int:
    group: Any = torch.distributed.group.WORLD
    return int(group._get_sequence_number_for_group())


def _local(parameter: Tensor) -> Tensor:
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


def _digest(model: nn.Module) -> str:
    with torch.no_grad():
        parts = [_local(p).contiguous().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@torch.no_grad()
def _statistics_of(model: nn.Module) -> dict[str, dict[str, float]]:
    """Statistics of whole weights and gradients that are split, gathered from all ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        gathered: Any = parameter
        gradient: Any = parameter.grad
        whole = gathered.full_tensor().double()
        values = gradient.full_tensor()
        found[name] = {
            "mean": float(whole.mean()),
            "std": float(whole.std(correction=0)),
            "rms": float(whole.square().mean().sqrt()),
            "max_abs": float(whole.abs().max()),
            "zero_fraction": float((whole == 0).double().mean()),
            "gradient_square": float(values.double().square().sum()),
        }
    return found


def read_series(folder: Path, name: str) -> pd.DataFrame:
    """The series of all ranks that left one, as one table.

    Args:
        folder: Where the program's ranks wrote.
        name: The program's.
    """
    parts = [pd.read_csv(path) for path in sorted(folder.glob(f"{name}-*.csv"))]
    table = pd.concat(parts, ignore_index=True).astype({"layer": object, "detail": object})
    table = table.where(table.notna(), None)
    return build_series({str(column): table[column].to_numpy() for column in table})


def _leave(folder: Path, name: str, rank: int, told: object, debugger: NeuralDbg) -> None:
    debugger.series.to_csv(folder / f"{name}-{rank}.csv", index=False, float_format="%.9g")
    (folder / f"{name}-{rank}.json").write_text(json.dumps(told))


def main(arguments: Sequence[str]) -> None:
    """Run programs on this rank: the folder to write to, then names."""
    folder, names = Path(arguments[0]), arguments[1:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for name in names:
        program = PROGRAMS[name]
        bare = None
        if name != "rank_dies":
            bare, _ = train_program(program, watched=False)
        watched, debugger = train_program(program, watched=True)
        assert debugger is not None
        told = {
            "weights": [bare.weights if bare else "", watched.weights],
            "collectives": [bare.collectives if bare else 0, watched.collectives],
            "error": watched.error,
            "faults": [message for _, message in debugger.faults],
            "coverage": debugger.coverage.set_index("what")["reason"].get("other ranks", ""),
            "steps": int(debugger.cost.steps),
        }
        if watched.error:
            told["causes"] = len(debugger.explain_failure())
        if program.sharded:
            measured, _ = train_program(program, watched=False, with_statistics=True)
            told["statistics"] = measured.statistics
        _leave(folder, name, rank, told, debugger)
    if "rank_dies" not in names:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
