"""A run on disk, finished or still being written, as if it had been watched here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from neuraldbg.capture import Cost, detect_events
from neuraldbg.capture.run_format import stack_series
from neuraldbg.capture.run_reader import RankRecord, read_run
from neuraldbg.diagnosis import Diagnosable
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

if TYPE_CHECKING:
    from neuraldbg.models import FailureNetwork


class DamagedRunWarning(UserWarning):
    """A part of a stored run could not be read; the rest was."""


class StoredRun(Diagnosable):
    """A run as its files tell it: what `load` returns.

    Args:
        url: Where it was read from.
        records: What each rank left.
        thresholds: Limits at which statistics become events.
        network: The Bayesian network to reason with; the shipped one if left out.

    Attributes:
        url: Where it was read from.
        thresholds: Limits at which statistics become events.
        metas: For each rank what is known besides its rows.
        problems: What of the run could not be read, in words; empty if all could.
    """

    def __init__(
        self,
        url: str,
        records: Sequence[RankRecord],
        thresholds: Thresholds,
        network: FailureNetwork | None = None,
    ) -> None:
        self.url = url
        self.thresholds = thresholds
        self.metas: dict[int, Mapping[str, Any]] = {r.rank: r.facts for r in records}
        self.problems = _problems(records)
        self._network = network
        self._rows = [record.series for record in records]
        self._being_written = any(record.being_written for record in records)

    @property
    def meta(self) -> Mapping[str, Any]:
        """What is known of the run besides its rows, as the first rank tells it.

        Among it: ``started``, ``updated`` and ``ended`` (UTC), ``models``, ``torch``, ``steps``,
        ``thresholds``, ``faults``, ``coverage``, ``cost``, ``rank`` and ``world_size``. What was
        not written (yet) is missing.
        """
        return self.metas[min(self.metas)]

    @property
    def finished(self) -> bool:
        """Whether the run was left in order, and not killed or still going on."""
        return all(bool(meta.get("finished")) for meta in self.metas.values())

    @property
    def state(self) -> str:
        """``finished``, ``running``, or ``broken off`` where the process that wrote it is dead."""
        if self.finished:
            return "finished"
        return "running" if self._being_written else "broken off"

    @property
    def ranks(self) -> list[int]:
        """The ranks that left something."""
        return sorted(self.metas)

    @cached_property
    def series(self) -> pd.DataFrame:
        """Statistics over steps: one row per step, rank, layer and kind.

        Of a run with more than a million rows a rank, evenly fewer steps between its start and its
        end; they carry the extremes of the others.
        """
        return stack_series([rows for rows in self._rows if len(rows)])

    @cached_property
    def events(self) -> pd.DataFrame:
        """The event table: one row per labelled span, in causal order."""
        return detect_events(self.series, self.thresholds, self.faults)

    @property
    def steps(self) -> int:
        """Steps of the run that were written."""
        series = self.series
        steps = series["step"][series["kind"] == Kind.OPTIMIZER.value]  # one each step
        return int(steps.max()) + 1 if len(steps) else 0

    @property
    def faults(self) -> list[tuple[int, str]]:
        """Faults of NeuralDBG's own during the run, as (step, message)."""
        told = [meta.get("faults") for meta in self.metas.values()]
        return [
            (fault[0], str(fault[1]))
            for faults in told
            for fault in (faults if isinstance(faults, list) else [])
            if isinstance(fault, list) and len(fault) == 2 and isinstance(fault[0], int)
        ]

    @property
    def coverage(self) -> pd.DataFrame:
        """What of the run was observed, what was not, and why; of a run that ended."""
        names = ("rank", "what", "layer", "observed", "of", "reason")
        rows = [
            (rank, *(row.get(name) for name in names[1:]))
            for rank, meta in self.metas.items()
            for row in _dicts(meta.get("coverage"))
        ]
        table = pd.DataFrame(rows, columns=list(names))
        table["layer"] = pd.Series([row[2] for row in rows], dtype=object)
        return table

    @property
    def cost(self) -> Cost | None:
        """What capture had cost the first rank when it last wrote; None where that is not known."""
        return _cost(self.meta.get("cost"))


def _cost(told: object) -> Cost | None:
    if not isinstance(told, dict):
        return None
    values = (told.get(field.name) for field in fields(Cost))
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) != len(fields(Cost)):
        return None
    seconds, run_seconds, *counts = numbers
    try:
        return Cost(float(seconds), float(run_seconds), *(int(count) for count in counts))
    except (ValueError, OverflowError):  # a file may be anybody's
        return None


def _dicts(told: object) -> list[dict[str, Any]]:
    return [row for row in told if isinstance(row, dict)] if isinstance(told, list) else []


def load(
    run: str | os.PathLike[str],
    *,
    thresholds: Thresholds | None = None,
    network: FailureNetwork | None = None,
) -> StoredRun:
    """Read a run that was written with ``NeuralDbg(model, run=...)``.

    It may have ended, still go on, or have been killed: what was written is there. Nothing in a
    run's files is code. Parts that are damaged are left out, with a warning.

    Args:
        run: Its folder: a path, or a URL that fsspec knows, such as ``s3://bucket/runs/today``.
        thresholds: Limits at which statistics become events; those of the run if left out.
        network: The Bayesian network to reason with; the shipped one if left out.

    Raises:
        FileNotFoundError: there is no such folder.
        UnreadableRunError: the folder holds no run, or one that a later release wrote.
        ValueError: the URL's protocol is not known.
        ImportError: the package that serves the protocol is not installed; the message names it.

    Example:
        >>> import torch
        >>> from neuraldbg import NeuralDbg
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with NeuralDbg(model, run="memory://examples/today", overwrite=True):
        ...     for _ in range(60):
        ...         x = torch.randn(16, 3)
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        ...         optimizer.step()
        >>> run = load("memory://examples/today")
        >>> run.steps, run.finished, run.explain_failure()[0].cause.value
        (60, True, 'healthy')
    """
    records = read_run(run)
    problems: list[str] = []
    if thresholds is None:
        thresholds = _thresholds(records[0].facts.get("thresholds"), problems)
    stored = StoredRun(os.fspath(run), records, thresholds, network)
    stored.problems = (*stored.problems, *problems)
    if stored.problems:
        warnings.warn(
            f"{stored.url} was read but for this: {'; '.join(stored.problems)}",
            DamagedRunWarning,
            stacklevel=2,
        )
    return stored


def _problems(records: Sequence[RankRecord]) -> tuple[str, ...]:
    found: list[str] = []
    for record in records:
        found += record.problems
        told = record.facts.get("problems")
        found += [str(problem) for problem in told] if isinstance(told, list) else []
        if record.facts.get("incomplete") is True:
            found.append(
                f"rank-{record.rank} could not write all of its rows: the run went on after them"
            )
    sizes = [record.facts.get("world_size") for record in records]
    expected = max((size for size in sizes if isinstance(size, int)), default=0)
    present = {record.rank for record in records}
    missing = [str(rank) for rank in range(min(expected, 1_000)) if rank not in present]
    if missing:
        found.append(f"nothing is there of rank {', '.join(missing)} of {expected}")
    return tuple(dict.fromkeys(found))


def _thresholds(told: object, problems: list[str]) -> Thresholds:
    """The limits that a run was watched with; those this release does not know are left out."""
    if not isinstance(told, dict):
        return Thresholds()
    known = {field.name for field in fields(Thresholds)}
    whole = {field.name for field in fields(Thresholds) if field.type == "int"}
    limits: dict[str, Any] = {name: value for name, value in told.items() if name in known}
    try:
        for name, value in limits.items():
            limits[name] = int(value) if name in whole else float(value)
        return Thresholds(**limits)
    except (TypeError, ValueError, OverflowError) as error:
        problems.append(f"its thresholds are damaged ({error}), the defaults are used instead")
        return Thresholds()
