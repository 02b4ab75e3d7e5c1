"""Streaming a run to files while it trains; `neuraldbg.capture.run_format` says which."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from neuraldbg.capture.run_folder import RunFolder
from neuraldbg.capture.run_format import (
    COVERS_KEY,
    MERGED,
    META,
    PARTS,
    SCHEMA,
    SCHEMA_VERSION,
    part_bytes,
    part_name,
    part_number,
    plain,
    rank_folder,
    rank_of_folder,
    stack_series,
    version_metadata,
    with_schema,
)
from neuraldbg.capture.run_lock import RunLock
from neuraldbg.capture.run_reader import RankReader
from neuraldbg.series import Kind

_ROWS_TOGETHER = 200_000
"""Rows of a row group in the merged file, and about what merging holds in memory."""


class RunExistsError(FileExistsError):
    """The folder holds a run already; the message says what to do."""


class RunSink:
    """Takes one rank's rows and facts and keeps them in its folder of the run.

    Only the process that opened it writes: one that was forked from it does nothing.

    Attributes:
        url: The folder.
        facts: What is known of the run besides its rows.
    """

    def __init__(self, folder: RunFolder, lock: RunLock, facts: Mapping[str, Any]) -> None:
        self.url = folder.url
        self.facts: dict[str, Any] = dict(facts)
        self._fresh: dict[str, Any] = {}
        self._folder = folder
        self._lock = lock
        self._last = _last_part(folder)
        self._closed = False
        self._process = os.getpid()
        self._write_meta()

    def append(self, series: pd.DataFrame) -> None:
        """Write rows as one new file, in the calling thread.

        Raises:
            OSError: they could not be written; the run is as it was before.
        """
        if self._closed or os.getpid() != self._process or series.empty:
            return
        data = part_bytes(series, self._fresh | {"updated": _now()})
        self._folder.write(part_name(self._last + 1), data)
        self._last += 1

    def restart(self) -> None:
        """Make all rows so far void: what the next `append` brings replaces them."""
        self.update_meta(void_before=self._last + 1)

    def update_meta(self, **facts: object) -> None:
        """Keep facts about the run; they are written with the next rows, or at the end."""
        told = plain(facts)
        self.facts |= told
        self._fresh |= told

    def close(self, finished: bool = True) -> None:
        """Write the facts, merge the files into one, and let others write; once is enough.

        Args:
            finished: Whether the run has ended, and not just its writing.

        Raises:
            OSError: something could not be written; the rows so far are still there.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        try:
            if finished:
                self._merge()
            self.facts |= {"finished": finished, "ended": _now() if finished else None}
            self._write_meta()
        finally:
            self._lock.release()

    def _write_meta(self) -> None:
        self.facts["updated"] = _now()
        self._folder.write(META, json.dumps(self.facts, indent=1, allow_nan=False).encode())

    def _merge(self) -> None:
        """One Parquet file instead of the parts; a part goes when its rows are in there."""
        reader = RankReader(self._folder)
        metadata = version_metadata() | {COVERS_KEY: str(self._last).encode()}
        schema = SCHEMA.with_metadata(metadata)
        with (
            self._folder.writing(MERGED) as file,
            parquet.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            held: list[pa.Table] = []
            for table in reader.tables(self.facts.get("void_before", 0)):
                held.append(table)
                if sum(len(other) for other in held) >= _ROWS_TOGETHER:
                    writer.write_table(_joined(held, schema))
                    held = []
            writer.write_table(_joined(held, schema))
        merged = {part_name(number) for number in reader.parts() if number not in reader.broken}
        for name in self._folder.names(PARTS):
            path = f"{PARTS}/{name}"
            if path in merged or name.endswith(".tmp"):
                self._folder.remove(path)
        self._folder.remove_empty(PARTS)
        self.facts["problems"] = reader.problems


def _last_part(folder: RunFolder) -> int:
    reader = RankReader(folder)
    return max([reader.covered(), *reader.parts()])


def _joined(tables: list[pa.Table], schema: pa.Schema) -> pa.Table:
    whole = [with_schema(table).replace_schema_metadata(schema.metadata) for table in tables]
    return pa.concat_tables([*whole, schema.empty_table()])


def open_run(
    url: str | os.PathLike[str],
    rank: int = 0,
    world_size: int = 1,
    *,
    overwrite: bool = False,
    resume: bool = False,
    **facts: object,
) -> RunSink:
    """Begin to write a rank's part of a run.

    Args:
        url: The run's folder: a path, or a URL that fsspec knows. It is made if it is not there.
        rank: Of this process.
        world_size: How many processes write to the run, each its own rank.
        overwrite: Delete what an earlier run left in the folder.
        resume: Go on after what is there.
        facts: What is known of the run: thresholds, models, versions.

    Raises:
        RunInUseError: another process writes there.
        RunExistsError: the folder holds an earlier run.
        OSError: the folder cannot be made or written to.
        ValueError: the URL's protocol is not known.
        ImportError: the package that serves the protocol is not installed; the message names it.

    Example:
        >>> from neuraldbg.series import build_series
        >>> sink = open_run("memory://examples/writer")
        >>> sink.append(build_series({"step": [0], "rank": [0], "layer": [None],
        ...                           "layer_index": [-1], "kind": ["loss"], "value": [0.5]}))
        >>> sink.close()
        >>> RunFolder("memory://examples/writer").exists("rank-0/series.parquet")
        True
        >>> open_run("memory://examples/writer")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        neuraldbg.capture.run_writer.RunExistsError: memory://examples/writer holds a run already...
    """
    run = RunFolder(url)
    folder = run.within(rank_folder(rank))
    folder.make(PARTS)
    lock = RunLock(folder)
    try:
        others = _ranks_beyond(run, world_size) if rank == 0 else []
        if not resume:
            _make_room(run, [folder, *others], overwrite)
        known = {"started": _now()} | (RankReader(folder).facts() if resume else {})
        known |= {"format": "neuraldbg run", "schema_version": SCHEMA_VERSION, "rank": rank}
        known |= {"world_size": world_size, "ended": None, "finished": False}
        return RunSink(folder, lock, known | plain(facts))
    except BaseException:
        lock.release()
        raise


def _ranks_beyond(run: RunFolder, world_size: int) -> list[RunFolder]:
    """Folders of ranks that an earlier run had and this one has not."""
    names = [name for name in run.names() if (rank_of_folder(name) or 0) >= world_size]
    return [run.within(name) for name in names]


def _make_room(run: RunFolder, folders: list[RunFolder], overwrite: bool) -> None:
    """See to it that the folders hold no rows of an earlier run."""
    used = [folder for folder in folders if _holds_run(folder)]
    if used and not overwrite:
        raise RunExistsError(
            f"{run.url} holds a run already (in {used[0].url.rpartition('/')[2]}): choose another "
            "folder, delete that one, or pass overwrite=True to replace the run"
        )
    for folder in used:
        lock = RunLock(folder) if folder is not folders[0] else None
        try:
            for name in folder.names(PARTS):
                folder.remove(f"{PARTS}/{name}")
            folder.remove(MERGED)
            folder.remove(META)
        finally:
            if lock is not None:
                lock.release()
                folder.remove_empty(PARTS)
                folder.remove_empty()


def _holds_run(folder: RunFolder) -> bool:
    parts = any(part_number(name) for name in folder.names(PARTS))
    return parts or folder.exists(MERGED) or _is_finished(folder)


def _is_finished(folder: RunFolder) -> bool:
    try:
        return bool(json.loads(folder.read(META)).get("finished"))
    except (OSError, ValueError, AttributeError):
        return False


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# Streaming -----------------------------------------------------------------------------------

FIRST_INTERVAL = 2.0
LONGEST_INTERVAL = 60.0
_SHARE_OF_AGE = 0.005
"""The next file comes after this share of the run's time: long runs stay at few files."""
_SHARE_OF_TIME = 0.005
"""Of the run's time, what writing may take: slow stores are written to less often."""
_MOST_UNDRAINED = 4_096
"""Frames and steps that wait to be written at most, however short the time."""
_MOST_FAILURES = 3
"""Failed writes in a row after which a run is no longer written to."""


class RowSource(Protocol):
    """What rows come from: `neuraldbg.capture.run_log.RunLog`."""

    streaming: bool

    @property
    def undrained(self) -> int:
        """Frames and steps logged since the last drain."""

    def drain_rows(self) -> pd.DataFrame:
        """The rows logged since the last call."""


class SeriesStreamer:
    """Moves rows from a run's log to its sink, now and then, by the clock.

    Rows that could not be written wait for the next time; after a few failures in a row it gives
    up, and the rows in memory are all there is from then on.

    Args:
        source: The log; it is told to keep rows for streaming.
        sink: Where rows go.
        facts: Gives what is to be known of the run with each write.
        clock: Gives seconds.

    Attributes:
        failures: How often writing has failed.
    """

    def __init__(
        self,
        source: RowSource,
        sink: RunSink,
        facts: Callable[[], Mapping[str, object]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._source = source
        self._sink = sink
        self._facts = facts
        self._clock = clock
        self._waiting: pd.DataFrame | None = None
        self._newest = -1
        self.failures = 0
        self._in_a_row = 0
        self._began = clock()
        self._due = self._began  # the first step at once: a run killed early opens with it
        source.streaming = True

    @property
    def gave_up(self) -> bool:
        """Whether writing failed so often that no more is written."""
        return self._in_a_row >= _MOST_FAILURES

    @property
    def is_due(self) -> bool:
        """Whether it is time to `flush`; to be asked after each step."""
        undrained = self._source.undrained
        return undrained > 0 and (self._clock() >= self._due or undrained >= _MOST_UNDRAINED)

    def flush(self) -> None:
        """Write what has come since the last time.

        Raises:
            OSError: the rows could not be written. They are tried again at the next call.
        """
        if self.gave_up:
            return
        begin = self._clock()
        try:
            self._write()
        except Exception:
            self.failures += 1
            self._in_a_row += 1
            if self._in_a_row >= _MOST_FAILURES:
                self._source.streaming = False
                self._source.drain_rows()
                self._waiting = None
            raise
        finally:
            now = self._clock()
            wait = max((now - begin) / _SHARE_OF_TIME, (now - self._began) * _SHARE_OF_AGE)
            self._due = now + min(max(wait, FIRST_INTERVAL), LONGEST_INTERVAL)
        self._in_a_row = 0

    def close(self, finished: bool = True, **facts: object) -> None:
        """Write what is left and close the sink.

        Args:
            finished: Whether the run has ended.
            facts: More of what is to be known of it.

        Raises:
            OSError: something could not be written.
        """
        try:
            self.flush()
        finally:
            self._source.streaming = False
            incomplete = self.gave_up or self._waiting is not None
            self._sink.update_meta(incomplete=incomplete, **{**self._facts(), **facts})
            self._sink.close(finished)

    def _write(self) -> None:
        rows = self._source.drain_rows()
        steps = rows["step"][rows["kind"] == Kind.OPTIMIZER.value]  # one each step, in order
        # Backward calls that turn out to be micro-batches of the first step are counted anew.
        if len(steps) and int(steps.min()) < self._newest:
            self._sink.restart()
            self._waiting = None
        if self._waiting is not None:
            rows = stack_series([self._waiting, rows])
        self._waiting = rows
        self._newest = int(steps.max()) if len(steps) else self._newest
        self._sink.update_meta(**self._facts())
        self._sink.append(rows)
        self._waiting = None
