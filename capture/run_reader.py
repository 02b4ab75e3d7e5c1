"""Reading a run's files, also while they are being written and when some are damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import ipc, parquet

from neuraldbg.capture.run_folder import RunFolder
from neuraldbg.capture.run_format import (
    COVERS_KEY,
    FACTS_KEY,
    MERGED,
    META,
    PARTS,
    VERSION_KEY,
    UnreadableRunError,
    check_version,
    known_columns,
    part_name,
    part_number,
    rank_of_folder,
)
from neuraldbg.capture.run_lock import read_holder
from neuraldbg.capture.run_thinning import read_thinned
from neuraldbg.series import DETAIL

_TRIES = 4
"""How often a folder is read anew whose files were merged meanwhile."""


class _MovedError(Exception):
    """A file that was listed is gone: the writer has just merged it."""


@dataclass
class RankReader:
    """Reads the files of one rank.

    Attributes:
        folder: The rank's.
        problems: What could not be read, in words.
        broken: Numbers of the parts that are damaged.
    """

    folder: RunFolder
    problems: list[str] = field(default_factory=list)
    broken: set[int] = field(default_factory=set)

    def facts(self) -> dict[str, Any]:
        """What is known of the run: what stands beside its rows, or with the last of them.

        Raises:
            UnreadableRunError: it is of a later version of the schema.
        """
        meta = self._meta()
        for number in reversed(self.parts()):
            table = self._part(number)
            if table is None:
                continue
            facts = _parsed(table.schema.metadata.get(FACTS_KEY, b"{}"))
            if str(facts.get("updated", "")) > str(meta.get("updated", "")):
                meta |= facts
            break
        return meta

    def parts(self) -> list[int]:
        """Numbers of the parts that are there."""
        numbers = [part_number(name) for name in self.folder.names(PARTS)]
        return sorted(number for number in numbers if number is not None)

    def tables(self, void_before: int = 0) -> Iterator[pa.Table]:
        """The tables of all files that can be read, in order, of known columns only.

        Args:
            void_before: Number of the part before which rows do not count.

        Raises:
            UnreadableRunError: a file is of a later version of the schema.
        """
        parts = self.parts()
        covered, merged = self._merged()
        if covered >= void_before:
            yield from merged
        parts = [number for number in parts if number > covered and number >= void_before]
        if parts:
            first = max(covered + 1, void_before, 1)
            lost = sorted(set(range(first, parts[-1])) - set(parts))
            self.problems += [f"{self._named(part_name(number))} is missing" for number in lost]
        for number in parts:
            table = self._part(number)
            if table is not None:
                yield table

    def covered(self) -> int:
        """The number of the last part that was merged; 0 where none was."""
        return self._merged()[0]

    def _named(self, name: str) -> str:
        return f"{self.folder.url.rpartition('/')[2]}/{name}"

    def _meta(self) -> dict[str, Any]:
        try:
            facts = json.loads(self.folder.read(META))
        except FileNotFoundError:
            facts = None
        except (OSError, ValueError) as error:
            self.problems.append(f"{self._named(META)} is damaged ({_reason(error)})")
            return {}
        if facts is None:
            self.problems.append(f"{self._named(META)} is missing")
            return {}
        if not isinstance(facts, dict):
            self.problems.append(f"{self._named(META)} is damaged (no JSON object)")
            return {}
        check_version(facts.get("schema_version"), self.folder.url)
        return facts

    def _part(self, number: int) -> pa.Table | None:
        name = part_name(number)
        if number in self.broken:
            return None
        try:
            data = self.folder.read(name)
        except FileNotFoundError:
            raise _MovedError from None
        except OSError as error:
            self._skip(number, error)
            return None
        try:
            with ipc.open_file(pa.BufferReader(data)) as file:
                metadata = file.schema.metadata or {}
                check_version(_version(metadata), self._named(name))
                return _checked(file.read_all())
        except UnreadableRunError:
            raise
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
            self._skip(number, error)
            return None

    def _skip(self, number: int, error: Exception) -> None:
        self.broken.add(number)
        self.problems.append(f"{self._named(part_name(number))} is damaged ({_reason(error)})")

    def _merged(self) -> tuple[int, Iterator[pa.Table]]:
        """The last part in the merged file, and that file's tables."""
        try:
            data = self.folder.read(MERGED)
        except FileNotFoundError:
            return 0, iter(())
        try:
            file = parquet.ParquetFile(pa.BufferReader(data))
            metadata = file.schema_arrow.metadata or {}
            check_version(_version(metadata), self._named(MERGED))
            covered = _number(metadata.get(COVERS_KEY)) or 0
        except UnreadableRunError:
            raise
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
            self._report(error)
            return 0, iter(())
        return covered, self._row_groups(file)

    def _row_groups(self, file: parquet.ParquetFile) -> Iterator[pa.Table]:
        for group in range(file.num_row_groups):
            try:
                yield _checked(file.read_row_group(group, use_threads=False))
            except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
                self._report(error)

    def _report(self, error: Exception) -> None:
        problem = f"{self._named(MERGED)} is damaged ({_reason(error)})"
        if problem not in self.problems:
            self.problems.append(problem)


def _checked(table: pa.Table) -> pa.Table:
    table.validate(full=True)  # a file may be anybody's
    return known_columns(table)


def _version(metadata: Mapping[bytes, bytes]) -> int:
    version = _number(metadata.get(VERSION_KEY))
    if version is None:
        raise ValueError("it has no schema version")
    return version


def _number(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _reason(error: Exception) -> str:
    """The first line of what an error says, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank left.

    Attributes:
        rank: Its number.
        facts: What is known besides the rows.
        series: Its rows; of a very long run those of evenly fewer steps.
        problems: What could not be read, in words.
        being_written: Whether a process writes there that is not known to be dead.
    """

    rank: int
    facts: Mapping[str, Any]
    series: pd.DataFrame
    problems: tuple[str, ...]
    being_written: bool


def read_run(url: str | os.PathLike[str]) -> list[RankRecord]:
    """What the ranks of a run left so far, in the order of their numbers.

    Raises:
        FileNotFoundError: there is no such folder, or nothing in it.
        UnreadableRunError: the folder holds no run, or one of a later version of the schema.
        ValueError: the URL's protocol is not known.
        ImportError: the package that serves the protocol is not installed; the message names it.
    """
    run = RunFolder(url)
    names = run.names()
    if not names:
        raise FileNotFoundError(f"there is no run at {run.url}: the folder does not exist")
    ranks = {rank: name for name in names if (rank := rank_of_folder(name)) is not None}
    if not ranks:
        raise UnreadableRunError(
            f"{run.url} holds no run: a run's folder has a folder rank-0 in it, and here are only "
            f"{', '.join(names[:5])}"
        )
    return [_read_rank(run.within(ranks[rank]), rank) for rank in sorted(ranks)]


def _read_rank(folder: RunFolder, rank: int) -> RankRecord:
    for _ in range(_TRIES):
        reader = RankReader(folder)
        try:
            facts = reader.facts()
            void_before = facts.get("void_before")
            first = void_before if isinstance(void_before, int) else 0
            series = read_thinned(partial(reader.tables, first))
        except _MovedError:
            continue
        series = in_order(series).assign(rank=np.int16(rank))
        holder = read_holder(folder)
        writing = holder is not None and not holder.is_surely_dead
        return RankRecord(rank, facts, series, tuple(reader.problems), writing)
    raise UnreadableRunError(f"{folder.url} changes too quickly to be read: try again")


_ORDER = ["step", "kind", "layer_index"]
_SAME = ["step", "layer", "kind", "target", "evaluation"]


def in_order(series: pd.DataFrame) -> pd.DataFrame:
    """Rows in a series' order, those of the same step, layer and kind united.

    Two flushes may each have seen a part of a step: of each column the last known value stays.
    """
    keys = pd.DataFrame(
        {
            "step": series["step"],
            "layer": series["layer"].cat.codes,
            "kind": series["kind"].cat.codes,
            "target": series["target"].fillna(0.0),
            "evaluation": series["evaluation"].fillna(0.0),
        }
    )
    again = keys.duplicated(keep=False)
    if again.any():
        groups = keys[again].groupby(_SAME, sort=False).ngroup()
        texts = {name: series[name].dtype for name in ("layer", "kind", DETAIL)}
        rows = series[again].astype(dict.fromkeys(texts, object))
        united = rows.groupby(groups.to_numpy()).last()
        series = pd.concat([series[~again].astype(dict.fromkeys(texts, object)), united])
        series = series.astype(texts)
    return series.sort_values(_ORDER, kind="stable").reset_index(drop=True)
