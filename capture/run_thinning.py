"""Long runs read in bounded memory: of their steps evenly fewer, which carry the others' extremes.

The log of a run that is being watched is thinned with age (`neuraldbg.capture.thinning`); what was
streamed to disk is complete, and is thinned in the same spirit when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import pyarrow as pa

from neuraldbg.capture.run_format import from_arrow
from neuraldbg.series import Kind, empty_series

MOST_ROWS = 1_000_000
"""Rows of one rank that are read: about 350 MB as a series."""
_FEWEST_STEPS = 48
_STEP_KINDS = (Kind.LOSS.value, Kind.OPTIMIZER.value)
_KEYS = ["step", "kind", "layer"]


def read_thinned(
    read: Callable[[], Iterable[pa.Table]], most_rows: int = MOST_ROWS
) -> pd.DataFrame:
    """A series of at most about so many rows.

    The first eighth of the rows that may stay and the last quarter are complete, the steps between
    are thinned evenly: captured steps, and the losses of all steps, each by themselves. A step that
    stays takes the ``lowest`` and ``highest`` of those that went after it. Rows of evaluations and
    metrics all stay.

    Args:
        read: Gives the tables of the run in order; called a second time if they hold too much.
        most_rows: How many rows may stay.
    """
    census = _Census()
    tables: list[pa.Table] = []
    for table in read():
        census.count(table)
        tables.append(table)
        if census.rows > most_rows:
            tables.clear()
    if census.rows <= most_rows:
        return _stacked(tables)
    thinning = _Thinning(census.kept_steps(most_rows))
    series = _stacked([thinning.keep(table) for table in read()])
    return thinning.hand_over(series)


def thin_evenly(steps: np.ndarray, most: int) -> np.ndarray:
    """At most so many of the steps: all of the start and the end, evenly fewer between.

    >>> thin_evenly(np.arange(40), 16).tolist()
    [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 36, 37, 38, 39]
    """
    if len(steps) <= most:
        return steps
    head, tail = most // 8, len(steps) - most // 4
    room = most - head - most // 4
    stride = 1
    while -(-(tail - head) // stride) > room:
        stride *= 2
    return np.concatenate([steps[:head], steps[head:tail:stride], steps[tail:]])


@dataclass
class _Census:
    """Which steps there are, and how many rows each sort of them takes."""

    rows: int = 0
    _rows_of: list[int] = field(default_factory=lambda: [0, 0, 0])
    _steps_of: list[list[np.ndarray]] = field(default_factory=lambda: [[], [], []])

    def count(self, table: pa.Table) -> None:
        self.rows += len(table)
        steps, sorts = _steps(table), _sorts(table)
        for sort in range(3):
            chosen = steps[sorts == sort]
            self._rows_of[sort] += len(chosen)
            self._steps_of[sort].append(np.unique(chosen))

    def kept_steps(self, most_rows: int) -> list[np.ndarray | None]:
        """The steps that stay: of evaluations (None: all), of losses, of captured steps."""
        kept: list[np.ndarray | None] = [None]
        for sort, share in ((1, 0.25), (2, 0.75)):
            steps = np.unique(np.concatenate(self._steps_of[sort]))
            rows_each = max(self._rows_of[sort] / max(len(steps), 1), 1.0)
            most = max(int(share * most_rows / rows_each), _FEWEST_STEPS)
            kept.append(thin_evenly(steps, most))
        return kept


@dataclass
class _Thinning:
    """Leaves rows out and remembers their extremes."""

    kept: list[np.ndarray | None]
    _extremes: list[pd.DataFrame] = field(default_factory=list)

    def keep(self, table: pa.Table) -> pa.Table:
        """The rows that stay."""
        steps, sorts = _steps(table), _sorts(table)
        stays = np.ones(len(table), dtype=bool)
        heirs = steps.copy()
        for sort, kept in enumerate(self.kept):
            if kept is None or not len(kept):
                continue
            own = sorts == sort
            at = np.maximum(np.searchsorted(kept, steps[own], side="right") - 1, 0)
            heirs[own] = kept[at]
            # What came since the steps were counted stays.
            stays[own] = (kept[at] == steps[own]) | (steps[own] > kept[-1])
        self._remember(table.filter(pa.array(~stays)), heirs[~stays])
        return table.filter(pa.array(stays))

    def _remember(self, gone: pa.Table, heirs: np.ndarray) -> None:
        if not len(gone) or "lowest" not in gone.column_names:
            return
        rows = from_arrow(gone.select([n for n in gone.column_names if n in _NEEDED]))
        inputs = (rows["target"] != 1.0).to_numpy()
        self._extremes.append(_extremes_of(rows[inputs].assign(step=heirs[inputs])))

    def hand_over(self, series: pd.DataFrame) -> pd.DataFrame:
        """The rows that stayed with the extremes of those that went after them."""
        if not self._extremes:
            return series
        found = _extremes_of(pd.concat(self._extremes, ignore_index=True))
        keys = series[_KEYS].astype({"kind": str, "layer": object}).fillna({"layer": ""})
        joined = keys.merge(found, how="left", on=_KEYS)
        own = ~((series["evaluation"] == 1.0) | (series["target"] == 1.0)).to_numpy()
        lowest, highest = joined["lowest"].to_numpy(), joined["highest"].to_numpy()
        return series.assign(
            lowest=np.where(own, np.fmin(series["lowest"], lowest), series["lowest"]),
            highest=np.where(own, np.fmax(series["highest"], highest), series["highest"]),
        ).astype({"lowest": "float32", "highest": "float32"})


_NEEDED = ("step", "rank", "layer", "layer_index", "kind", "target", "lowest", "highest")


def _extremes_of(rows: pd.DataFrame) -> pd.DataFrame:
    plain = rows[[*_KEYS, "lowest", "highest"]].astype({"kind": str, "layer": object})
    groups = plain.fillna({"layer": ""}).groupby(_KEYS, sort=False, as_index=False)
    return groups.agg({"lowest": "min", "highest": "max"})


def _steps(table: pa.Table) -> np.ndarray:
    return np.asarray(table.column("step").to_numpy())


def _sorts(table: pa.Table) -> np.ndarray:
    """For each row 0: of an evaluation or a metric, 1: of every step, 2: of a captured step."""
    kinds = np.asarray(table.column("kind").cast(pa.string()).to_numpy(zero_copy_only=False))
    sorts = np.where(np.isin(kinds, _STEP_KINDS), 1, 2)
    sorts[kinds == Kind.METRIC.value] = 0
    if "evaluation" in table.column_names:
        sorts[table.column("evaluation").to_numpy() == 1.0] = 0
    return sorts


def _stacked(tables: list[pa.Table]) -> pd.DataFrame:
    if not tables:
        return empty_series()
    return from_arrow(pa.concat_tables(tables, promote_options="default"))
