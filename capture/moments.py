"""Moments: what the statistics of samples are made from, in a form that can be merged.

Sums over values do not care how these were split: samples of micro-batches, of several calls of a
layer or of a window of steps are merged by adding their moments, and the statistics of the merged
moments are those of all values together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from neuraldbg.capture.sampling import Key, Samples

if TYPE_CHECKING:
    from neuraldbg.capture.statistics import Columns

_SIZE, _BROKEN, _NONZERO, _TOTAL, _SQUARE = range(5)


@dataclass(frozen=True, slots=True)
class Moments:
    """Sufficient statistics of samples, one row for each key.

    Non-finite values are counted and left out of the rest. Sums are taken in double precision,
    in which the square of any float32 value is exact.

    Attributes:
        keys: What each row is of, no two alike.
        sums: Shape (5, rows): number of values, of non-finite ones, of finite ones other than
            zero, sum of the finite values, sum of their squares.
        largest: Largest finite magnitude, shape (rows,); 0 where there is none.

    Example:
        >>> def moments_of(*numbers):
        ...     values = np.zeros((1, 2048), dtype=np.float32)
        ...     values[0, :len(numbers)] = numbers
        ...     return Moments.of(Samples([("fc", "output")], values, [(1, len(numbers))]))
        >>> both = moments_of(3.0, 0.0).merge(moments_of(-3.0, np.nan))
        >>> {name: round(float(column[0]), 3) for name, column in both.columns().items()}
        {'count': 4.0, 'mean': 0.0, 'std': 2.449, 'rms': 2.449, 'max_abs': 3.0, \
'zero_fraction': 0.333, 'nonfinite_fraction': 0.25}
    """

    keys: Sequence[Key]
    sums: np.ndarray
    largest: np.ndarray

    @classmethod
    def of(cls, samples: Samples) -> Moments:
        """The moments of samples, in their order."""
        values, sizes = samples.values, samples.sizes
        sums = np.zeros((5, len(sizes)))
        wide = values.astype(np.float64)
        square = _squares(wide)
        if not np.isfinite(square).all():  # no square of finite float32 values overflows here
            broken = ~np.isfinite(values)
            sums[_BROKEN] = np.count_nonzero(broken, axis=1)
            values = np.where(broken, np.float32(0.0), values)
            wide = values.astype(np.float64)
            square = _squares(wide)
        sums[_SIZE], sums[_SQUARE], sums[_TOTAL] = sizes, square, wide.sum(axis=1)
        # Faster than counting along an axis, which goes through integers of 64 bits.
        sums[_NONZERO] = np.add.reduce((values != 0).view(np.uint8), axis=1, dtype=np.int32)
        largest = np.abs(values).max(axis=1).astype(np.float64)
        return cls(samples.keys, sums, largest)

    def merge(self, other: Moments) -> Moments:
        """The moments of all values of both: rows of the same key become one.

        Rows that only the other has come last. The order of merging does not matter, to the
        rounding of sums in double precision.
        """
        if self.keys == other.keys:
            sums = self.sums + other.sums
            return Moments(self.keys, sums, np.maximum(self.largest, other.largest))
        sums = np.concatenate([self.sums, other.sums], axis=1)
        largest = np.concatenate([self.largest, other.largest])
        return _united([*self.keys, *other.keys], sums, largest)

    def under(self, keys: Sequence[Key]) -> Moments:
        """The same rows under other keys: those that come under the same one are merged.

        Args:
            keys: One for each row.
        """
        return _united(keys, self.sums, self.largest)

    def columns(self, keys: Sequence[Key] | None = None) -> Columns:
        """Count, mean, std, rms, largest magnitude, share of zeros and of non-finite values.

        The count is of all values; the share of zeros is of the finite ones.

        Args:
            keys: Of the rows wanted; all in their order if left out. One that there is no row of
                gives NaN.

        Returns:
            Arrays of shape (rows,).
        """
        size, broken, nonzero, total, square = self.sums
        finite = size - broken
        count = np.maximum(finite, 1.0)
        mean, mean_square = total / count, square / count
        columns = {
            "count": size,
            "mean": mean,
            "std": np.sqrt(np.maximum(mean_square - mean * mean, 0.0)),
            "rms": np.sqrt(mean_square),
            "max_abs": self.largest,
            "zero_fraction": (finite - nonzero) / count,
            "nonfinite_fraction": broken / np.maximum(size, 1.0),
        }
        if keys is None or keys is self.keys:
            return columns
        row_of = {key: row for row, key in enumerate(self.keys)}
        rows = [row_of.get(key, len(row_of)) for key in keys]  # the last one is that of no key
        return {name: np.append(values, np.nan)[rows] for name, values in columns.items()}


def _squares(rows: np.ndarray) -> np.ndarray:
    """The sum of squares of each row; shape (rows, values) -> (rows,)."""
    with np.errstate(all="ignore"):  # rows that are not finite are looked at again
        return np.asarray(np.matmul(rows[:, None, :], rows[:, :, None])[:, 0, 0])


def _united(keys: Sequence[Key], sums: np.ndarray, largest: np.ndarray) -> Moments:
    """Rows of the same key merged, in the order of their first appearance."""
    row_of: dict[Key, int] = {}
    rows = np.array([row_of.setdefault(key, len(row_of)) for key in keys], dtype=np.intp)
    count = len(row_of)
    merged = np.array([np.bincount(rows, weights=part, minlength=count) for part in sums])
    greatest = np.zeros(count)
    np.maximum.at(greatest, rows, largest)
    return Moments(list(row_of), merged, greatest)
