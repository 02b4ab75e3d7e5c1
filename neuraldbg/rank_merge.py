"""Several ranks' rows made one run: what each saw itself, and the whole of what they split.

Where parameters are split over ranks (FSDP), a rank's rows about them are of its part. The parts
of one tensor are combined here into the statistics of the whole, after the run and by numbers
alone: no rank ever waits for another.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from neuraldbg.series import DETAIL, FLAGS, KEYS, STATISTICS, Kind

_GROUP = ("step", "layer", "kind")
_NUMBERS = (*STATISTICS, *FLAGS)
_SUMMED = ("mean", "zero_fraction")
_SQUARED = ("rms", "gain")
_GREATEST = ("max_abs", "unit_spread", *FLAGS)


def view_ranks(series: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """The run as each rank took part in it: its own rows, with the split tensors made whole.

    Args:
        series: Rows of one or several ranks.

    Returns:
        For each rank a series in which each step, layer and kind is one row. Rows of split
        tensors are combined from all ranks that have them (`combine_shards`) and equal in every
        view; with a single rank nothing is combined.

    Example:
        >>> from neuraldbg.series import build_series
        >>> series = build_series({"step": [0] * 4, "rank": [0, 1, 0, 1],
        ...                        "layer": [None, None, "fc", "fc"], "layer_index": [-1, -1, 0, 0],
        ...                        "kind": ["loss", "loss", "gradient", "gradient"],
        ...                        "value": [2.0, 4.0, np.nan, np.nan], "norm": [3.0, 4.0] * 2,
        ...                        "count": [np.nan, np.nan, 8, 8], "shards": [1, 1, 2, 2]})
        >>> views = view_ranks(series)
        >>> views[1][["kind", "value", "norm"]].values.tolist()
        [['gradient', nan, 5.0], ['loss', 4.0, 5.0]]
    """
    ranks = [int(rank) for rank in np.unique(series["rank"])]
    if len(ranks) < 2:
        return {ranks[0] if ranks else 0: series}
    split = (series["shards"] > 1).to_numpy()
    if not split.any():
        return {rank: series[series["rank"] == rank] for rank in ranks}
    whole = combine_shards(series[split])
    own = _with_whole_norm(series[~split])
    order = ["step", "kind", "layer_index"]
    return {
        rank: pd.concat([own[own["rank"] == rank], whole.assign(rank=np.int16(rank))])
        .sort_values(order, kind="stable")
        .reset_index(drop=True)
        for rank in ranks
    }


def combine_shards(parts: pd.DataFrame) -> pd.DataFrame:
    """Rows of the parts of tensors combined into rows of the whole tensors.

    A part counts with the number of its values (``count``). Means and shares are weighted means,
    rms values are weighted in the square, std follows from both (Chan, Golub and LeVeque,
    "Algorithms for computing the sample variance", 1983), and norms add up in the square. That is
    exact for statistics of all values. The cosine takes the parts' norms at both steps for those
    of the samples it is of, and ``ratio`` is exact as long as no part's weights are near zero.

    Where several ranks hold the same part (hybrid sharding), ``shards`` is less than the number
    of ranks, and each counts in proportion; so does a part whose rank left no row.

    Args:
        parts: Rows of a series with ``shards`` above 1, of all ranks.

    Returns:
        One row for each step, layer and kind, with ``shards`` 1 and the first rank's number.

    Example:
        >>> from neuraldbg.series import build_series
        >>> parts = build_series({"step": [0, 0], "rank": [0, 1], "layer": ["fc"] * 2,
        ...                       "layer_index": [0, 0], "kind": ["parameter"] * 2,
        ...                       "count": [3, 1], "mean": [0.0, 4.0], "std": [0.0, 0.0],
        ...                       "rms": [0.0, 4.0], "shards": [2, 2]})
        >>> combine_shards(parts)[["count", "mean", "rms"]].values.tolist()
        [[4.0, 1.0, 2.0]]
        >>> round(float(combine_shards(parts)["std"][0]), 3) # of [0, 0, 0, 4]
        1.732
    """
    groups = parts.groupby(list(_GROUP), observed=True, sort=False)
    first = parts[~parts.duplicated(list(_GROUP))].reset_index(drop=True)
    combining = _Combining(parts, groups.ngroup().to_numpy(), len(first))
    columns: dict[str, np.ndarray] = {name: combining.mean(name) for name in _NUMBERS}
    columns |= {name: combining.mean(name) for name in _SUMMED}
    columns |= {name: combining.root_mean_square(name) for name in _SQUARED}
    columns |= {name: combining.greatest(name) for name in _GREATEST}
    columns["norm"] = combining.norm()
    columns["count"] = combining.count()
    columns["std"] = combining.deviation()
    columns["ratio"] = combining.ratio()
    columns["cosine"] = combining.cosine()
    columns["nonfinite_fraction"] = combining.nonfinite()
    gradients = (first["kind"] == Kind.GRADIENT.value).to_numpy()
    for name in ("lowest", "highest"):  # of the norm for gradients, of the rms for all others
        squares = combining.root_mean_square(name)
        columns[name] = np.where(gradients, combining.norm(name), squares)
    gradient_rms = columns["norm"] / np.sqrt(np.maximum(columns["count"], 1.0))
    columns["rms"] = np.where(gradients, gradient_rms, columns["rms"])
    columns["shards"] = np.ones(len(first))
    return first.assign(
        **{name: values.astype(np.float32) for name, values in columns.items()}
    ).loc[:, [*KEYS, *_NUMBERS, DETAIL]]


class _Combining:
    """Rows, the group of each, and what they have in common in every formula."""

    def __init__(self, parts: pd.DataFrame, groups: np.ndarray, count: int) -> None:
        self._parts = parts
        self._groups = groups
        self._size = count
        values = self._column("count")
        self._values = np.where(np.isnan(values), 1.0, values)
        broken = np.nan_to_num(self._column("nonfinite_fraction"))
        finite_share = np.where(self._is("gradient"), 1.0, 1.0 - broken)
        self._weights = self._values * finite_share  # statistics leave non-finite values out
        present = np.bincount(groups, minlength=count)[groups]
        self._copies = self._column("shards") / present
        self._last: np.ndarray | None = None

    def _column(self, name: str) -> np.ndarray:
        return np.asarray(self._parts[name].to_numpy(), dtype=np.float64)

    def _is(self, kind: str) -> np.ndarray:
        return np.asarray(self._parts["kind"] == kind)

    def _sum(self, values: np.ndarray, known: np.ndarray) -> np.ndarray:
        total = np.bincount(
            self._groups, weights=np.where(known, values, 0.0), minlength=self._size
        )
        seen = np.bincount(self._groups, weights=known, minlength=self._size) > 0
        return np.where(seen, total, np.nan)

    def _weighted(self, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self._sum(values * weights, known) / self._sum(weights, known)
        return np.asarray(mean)

    def mean(self, name: str) -> np.ndarray:
        return self._weighted(self._column(name), self._weights)

    def nonfinite(self) -> np.ndarray:
        return self._weighted(self._column("nonfinite_fraction"), self._values)

    def root_mean_square(self, name: str) -> np.ndarray:
        return np.asarray(np.sqrt(self._weighted(self._column(name) ** 2, self._weights)))

    def deviation(self) -> np.ndarray:
        mean = self._column("mean")
        square = self._weighted(self._column("std") ** 2 + mean**2, self._weights)
        return np.asarray(np.sqrt(np.maximum(square - self.mean("mean") ** 2, 0.0)))

    def greatest(self, name: str) -> np.ndarray:
        values = self._column(name)
        found = np.full(self._size, -np.inf)
        np.fmax.at(found, self._groups, values)
        return np.where(np.isneginf(found), np.nan, found)

    def count(self) -> np.ndarray:
        values = self._column("count")
        return self._sum(values * self._copies, ~np.isnan(values))

    def norm(self, name: str = "norm") -> np.ndarray:
        """NaN where any part is not finite; parts without values do not count."""
        values = self._column(name)
        known = ~np.isnan(values) | (np.nan_to_num(self._column("nonfinite_fraction")) > 0)
        return np.asarray(np.sqrt(self._sum(values**2 * self._copies, known)))

    def ratio(self) -> np.ndarray:
        """Update over weight: both in the square, the weights' rms being rms over ratio."""
        change, ratio = self._column("rms"), self._column("ratio")
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.where(ratio > 0, change / ratio, np.nan)
            square = self._weighted(scale**2, self._weights)
            whole = self.root_mean_square("rms") / np.sqrt(square)
        return np.where(np.isnan(square), self.mean("ratio"), whole)

    def cosine(self) -> np.ndarray:
        """Of the whole gradient with the whole one before, from those of the parts."""
        cosine, norm = self._column("cosine"), self._column("norm")
        if not (~np.isnan(cosine)).any():
            return np.full(self._size, np.nan)
        before = self._norm_before(norm)
        known = ~np.isnan(cosine) & ~np.isnan(before)
        dot = self._sum(cosine * norm * before, known)
        with np.errstate(invalid="ignore", divide="ignore"):
            scale = np.sqrt(self._sum(norm**2, known) * self._sum(before**2, known))
            return np.asarray(dot / scale)

    def _norm_before(self, norm: np.ndarray) -> np.ndarray:
        """The norm of each row's part one step earlier, the row's own where it is not known."""
        keys = self._parts[["step", "rank", "layer", "kind"]].assign(norm=norm)
        earlier = keys.assign(step=keys["step"] + 1).rename(columns={"norm": "before"})
        joined = keys.merge(earlier, how="left", on=["step", "rank", "layer", "kind"])
        before = joined["before"].to_numpy()
        return np.where(np.isnan(before), norm, before)


def _with_whole_norm(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose losses carry the norm of the whole gradient, not of the rank's part."""
    losses = (rows["kind"] == Kind.LOSS.value).to_numpy()
    if not losses.any():
        return rows
    chosen = rows.loc[losses, ["step", "layer", "norm"]]
    names = chosen["layer"].astype(object).where(chosen["layer"].notna(), "")
    squares = (chosen["norm"].astype(np.float64) ** 2).groupby([chosen["step"], names])
    norm = rows["norm"].to_numpy().copy()
    norm[losses] = np.where(chosen["norm"].isna(), np.nan, np.sqrt(squares.transform("sum")))
    return rows.assign(norm=norm)
