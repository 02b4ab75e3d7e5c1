"""Statistics of samples: pure functions from a step's samples to numbers, all at once."""

from __future__ import annotations

import numpy as np

from neuraldbg.capture.sampling import Samples

Columns = dict[str, np.ndarray]


def summarise(samples: Samples) -> Columns:
    """Mean, std, rms, largest magnitude, share of zeros and of non-finite values of each sample.

    Non-finite values are counted and left out of the rest.

    Returns:
        Arrays of shape (samples,), float64.

    Example:
        >>> values = np.zeros((1, 2048), dtype=np.float32)
        >>> values[0, :4] = [3.0, -3.0, 0.0, np.nan]
        >>> {k: round(float(v[0]), 3) for k, v in summarise(Samples([("fc", "output")], values, [(2, 2)])).items()}
        {'mean': 0.0, 'std': 2.449, 'rms': 2.449, 'max_abs': 3.0, 'zero_fraction': 0.333, \
'nonfinite_fraction': 0.25}
    """
    sizes = np.array([rows * units for rows, units in samples.shapes], dtype=np.int64)
    if not len(sizes):
        return {name: np.zeros(0) for name in _SUMMARY}
    width = samples.values.shape[1]
    # reduceat over (start, end) pairs: every second segment is the valid part of a row.
    starts = np.arange(len(sizes)) * width
    bounds = np.stack([starts, starts + np.minimum(sizes, width - 1)], axis=1).ravel()
    flat = samples.values.ravel().astype(np.float64)
    whole = sizes == width  # a full row's end bound would cut its last value
    bad = ~np.isfinite(flat)
    any_bad = bool(bad.any())
    if any_bad:
        flat[bad] = 0.0

    def total(values: np.ndarray) -> np.ndarray:
        sums = np.add.reduceat(values, bounds)[::2]
        return np.where(whole, sums + values[starts + width - 1], sums)

    magnitude = np.abs(flat)
    bad_count = total(bad.astype(np.float64)) if any_bad else np.zeros(len(sizes))
    count = np.maximum(sizes - bad_count, 1)
    mean = total(flat) / count
    mean_square = total(flat * flat) / count
    zeros = total((flat == 0).astype(np.float64)) - bad_count
    largest = np.maximum.reduceat(magnitude, bounds)[::2]
    largest = np.where(whole, np.maximum(largest, magnitude[starts + width - 1]), largest)
    return {
        "mean": mean,
        "std": np.sqrt(np.maximum(mean_square - mean * mean, 0.0)),
        "rms": np.sqrt(mean_square),
        "max_abs": largest,
        "zero_fraction": zeros / count,
        "nonfinite_fraction": bad_count / np.maximum(sizes, 1),
    }


_SUMMARY = ("mean", "std", "rms", "max_abs", "zero_fraction", "nonfinite_fraction")


def unit_spread(sample: np.ndarray) -> float:
    """How much the units of a sample differ, relative to their size.

    The root mean square over rows of the standard deviation between units, over the rms of the
    sample; 0 when all units are copies of each other, NaN for fewer than two units.

    Args:
        sample: Shape (rows, units).

    Example:
        >>> unit_spread(np.array([[1.0, 1.0], [2.0, 2.0]]))
        0.0
        >>> round(unit_spread(np.array([[1.0, -1.0], [2.0, -2.0]])), 3)
        1.0
    """
    if sample.shape[1] < 2 or not np.isfinite(sample).all():
        return float("nan")
    size = float(np.sqrt(np.mean(np.square(sample, dtype=np.float64))))
    if size == 0.0:
        return 0.0
    centred = sample - sample.mean(axis=1, keepdims=True, dtype=np.float64)
    return float(np.sqrt(np.mean(centred * centred)) / size)


def silent_units(sample: np.ndarray) -> np.ndarray:
    """Which units are exactly zero in every row; shape (rows, units) -> (units,), bool.

    >>> silent_units(np.array([[0.0, 1.0], [0.0, 0.0]])).tolist()
    [True, False]
    """
    return ~np.any(sample, axis=0)


def feature_spread(sample: np.ndarray) -> float:
    """The rms of the largest feature over that of the smallest, constant zeros left out.

    The second largest and smallest are taken where there are at least 20 features, so that one
    odd feature among many does not decide.

    Args:
        sample: Shape (rows, features).

    Example:
        >>> feature_spread(np.array([[1.0, 100.0, 0.0], [-1.0, 100.0, 0.0]]))
        100.0
    """
    scale = np.sqrt(np.mean(np.square(sample, dtype=np.float64), axis=0))
    scale = np.sort(scale[np.isfinite(scale) & (scale > 0)])
    if len(scale) < 2:
        return float("nan")
    trim = 1 if len(scale) >= 20 else 0
    return float(scale[-1 - trim] / scale[trim])


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of the angle between two arrays of equal shape; NaN where one is zero.

    >>> cosine(np.array([1.0, 0.0]), np.array([-2.0, 0.0]))
    -1.0
    """
    a, b = first.ravel().astype(np.float64), second.ravel().astype(np.float64)
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if np.isfinite(size) and size > 0 else float("nan")
