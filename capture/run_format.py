"""The files of a run on disk: names, schema, and tables to bytes and back.

A run is a folder with one folder for each rank. Rows of the series come as small Arrow files, one
for each flush, numbered from 1; a run that ended has them merged into one Parquet file. Nothing is
ever appended to a file, so that object stores can hold a run, and no file holds code.

    runs/today/rank-0/meta.json
                      lock.json                    while somebody writes
                      series/part-000001.arrow
                      series.parquet               once ended, instead of the parts

Files carry the version of the schema. Columns and facts may be added to a version: readers leave
out those they do not know, and those that a file lacks were not observed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import ipc

from neuraldbg.series import DETAIL, FLAGS, STATISTICS, Kind, build_series, empty_series

SCHEMA_VERSION = 1
META = "meta.json"
LOCK = "lock.json"
PARTS = "series"
MERGED = "series.parquet"

VERSION_KEY = b"neuraldbg.schema_version"
FACTS_KEY = b"neuraldbg.facts"
"""What was known of the run when a part was written, as JSON."""
COVERS_KEY = b"neuraldbg.covers"
"""In the merged file: the number of the last part that went into it."""

_TEXT = ("layer", "kind", DETAIL)
_NUMBERS = {"step": pa.int64(), "rank": pa.int16(), "layer_index": pa.int32()} | {
    name: pa.float32() for name in (*STATISTICS, *FLAGS)
}
_WORD = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [(name, kind) for name, kind in _NUMBERS.items()] + [(name, _WORD) for name in _TEXT]
)
"""All columns; a part leaves out those that hold no number."""


class UnreadableRunError(ValueError):
    """There is no run that this version can read; the message says why and what to do."""


def rank_folder(rank: int) -> str:
    """The folder of one rank.

    >>> rank_folder(3)
    'rank-3'
    """
    return f"rank-{rank}"


def rank_of_folder(name: str) -> int | None:
    """The rank that a folder is of, None for other folders.

    >>> rank_of_folder("rank-12"), rank_of_folder("plots")
    (12, None)
    """
    match = re.fullmatch(r"rank-(\d{1,6})", name)
    return int(match[1]) if match else None


def part_name(number: int) -> str:
    """The file of one flush.

    >>> part_name(1)
    'series/part-000001.arrow'
    """
    return f"{PARTS}/part-{number:06}.arrow"


def part_number(name: str) -> int | None:
    """The number of a part's file, None for other files.

    >>> part_number("part-000017.arrow"), part_number("part-000017.arrow.x1.tmp")
    (17, None)
    """
    match = re.fullmatch(r"part-(\d{6,12})\.arrow", name)
    return int(match[1]) if match else None


def to_arrow(series: pd.DataFrame) -> pa.Table:
    """A series as an Arrow table, without columns that hold nothing.

    Example:
        >>> table = build_series({"step": [0], "rank": [0], "layer": ["fc"], "layer_index": [0],
        ...                       "kind": ["output"], "rms": [1.5]})
        >>> to_arrow(table).column_names
        ['step', 'rank', 'layer_index', 'rms', 'layer', 'kind']
    """
    columns: dict[str, pa.Array] = {}
    for name, kind in _NUMBERS.items():
        values = series[name].to_numpy()
        if kind != pa.float32() or not np.isnan(values).all():
            columns[name] = pa.array(values, type=kind)
    for name in _TEXT:
        words = series[name].cat
        codes = words.codes.to_numpy().astype(np.int32)
        if name != DETAIL or (codes >= 0).any():
            names = pa.array([str(word) for word in words.categories], type=pa.string())
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), names)
    return pa.table(columns)


def from_arrow(table: pa.Table) -> pd.DataFrame:
    """The series that an Arrow table holds; columns it lacks were not observed.

    Raises:
        ValueError: a column has a type that its values do not fit, or a key is missing.

    Example:
        >>> table = build_series({"step": [0], "rank": [0], "layer": [None], "layer_index": [-1],
        ...                       "kind": ["loss"], "value": [0.5]})
        >>> from_arrow(to_arrow(table)).equals(table)
        True
    """
    columns: dict[str, Any] = {}
    known = known_columns(table)
    for name in known.column_names:
        column = known.column(name)
        columns[name] = _words(column) if name in _TEXT else column.to_numpy()
    kinds = columns.get("kind")
    if kinds is not None and not set(kinds.categories) <= {kind.value for kind in Kind}:
        told = np.asarray(kinds.isin([kind.value for kind in Kind]))  # kinds of a later release
        columns = {name: values[told] for name, values in columns.items()}
    return build_series(columns)


def known_columns(table: pa.Table) -> pa.Table:
    """The columns that this release knows, in their types.

    Raises:
        ValueError: a column has a type that its values do not fit, or a key is missing.
    """
    columns = {
        name: table.column(name).cast(kind)
        for name, kind in _NUMBERS.items()
        if name in table.column_names
    }
    # By way of plain text: types of somebody else's making go no further.
    columns |= {
        name: table.column(name).cast(pa.string()).dictionary_encode()
        for name in _TEXT
        if name in table.column_names
    }
    for name in ("step", "rank", "layer_index", "kind"):
        if name not in columns or columns[name].null_count:
            raise ValueError(f"the column {name} is missing or lacks values")
    return pa.table(columns, metadata=table.schema.metadata)


def _words(column: pa.ChunkedArray) -> pd.Categorical:
    encoded = column.unify_dictionaries().combine_chunks()
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    # Sorted, as they are in a series that was not stored.
    names = np.array(encoded.dictionary.to_pylist(), dtype=object)
    order = np.argsort(names)
    ranks = np.empty(len(names) + 1, dtype=np.int64)
    ranks[order], ranks[-1] = np.arange(len(names)), -1
    return pd.Categorical.from_codes(ranks[codes], categories=pd.Index(names[order]))


def stack_series(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Series tables one below the other; their layers need not be the same.

    Example:
        >>> tables = [build_series({"step": [0], "rank": [0], "layer": [name], "layer_index": [0],
        ...                         "kind": ["output"]}) for name in ("b", "a")]
        >>> stack_series(tables)["layer"].tolist()
        ['b', 'a']
    """
    if not tables:
        return empty_series()
    columns: dict[str, pd.Series | pd.Categorical] = {}
    for name in tables[0].columns:
        given = [table[name] for table in tables]
        if name in ("layer", DETAIL):
            words = np.concatenate([np.asarray(column, dtype=object) for column in given])
            columns[name] = pd.Categorical(words)
        else:
            columns[name] = pd.concat(given, ignore_index=True)
    return pd.DataFrame(columns)


def with_schema(table: pa.Table) -> pa.Table:
    """The table with all columns of the schema, those that it lacks empty."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in SCHEMA
    ]
    return pa.table(columns, schema=SCHEMA)


def version_metadata() -> dict[bytes, bytes]:
    """What every table says about itself."""
    return {VERSION_KEY: str(SCHEMA_VERSION).encode()}


def part_bytes(series: pd.DataFrame, facts: Mapping[str, Any]) -> bytes:
    """One flush as the bytes of an Arrow file.

    Args:
        series: Its rows.
        facts: Plain values to go with them.
    """
    metadata = version_metadata() | {FACTS_KEY: json.dumps(facts).encode()}
    table = to_arrow(series).replace_schema_metadata(metadata)
    # Threads of Arrow's would take cores from the training.
    codec = "lz4" if pa.Codec.is_available("lz4") else None
    options = ipc.IpcWriteOptions(compression=codec, use_threads=False)
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def check_version(version: object, what: str) -> None:
    """Refuse what a later release wrote.

    Raises:
        UnreadableRunError: the version is newer than this release knows, or none.

    Example:
        >>> check_version(2, "runs/today")
        Traceback (most recent call last):
        ...
        neuraldbg.capture.run_format.UnreadableRunError: runs/today has schema version 2, and this \
release reads up to 1: upgrade with `pip install --upgrade neuraldbg`
    """
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UnreadableRunError(f"{what} has no schema version: it is no run of NeuralDBG's")
    if version > SCHEMA_VERSION:
        raise UnreadableRunError(
            f"{what} has schema version {version}, and this release reads up to {SCHEMA_VERSION}: "
            "upgrade with `pip install --upgrade neuraldbg`"
        )


def plain(value: Any) -> Any:
    """A value as JSON holds it; numbers that are not finite become words, other things too.

    Example:
        >>> plain({"limits": (1, float("inf")), "model": int})
        {'limits': [1, 'Infinity'], 'model': "<class 'int'>"}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if value is None or isinstance(value, bool | int | float) else str(value)
