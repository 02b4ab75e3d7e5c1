"""Statistics of samples: pure functions from a step's samples to numbers, all at once."""

from __future__ import annotations

import numpy as np

from neuraldbg.capture.sampling import Samples

Columns = dict[str, np.ndarray]


def summarise(samples: Samples) -> Columns:
    """Mean, std, rms, largest magnitude, share of zeros and of non-finite values of each sample.

    Non-finite values are counted and left out of the rest.

    Returns:
        Arrays of shape (samples,).

    Example:
        >>> values = np.zeros((1, 2048), dtype=np.float32)
        >>> values[0, :4] = [3.0, -3.0, 0.0, np.nan]
        >>> columns = summarise(Samples([("fc", "output")], values, [(2, 2)]))
        >>> {name: round(float(column[0]), 3) for name, column in columns.items()}
        {'mean': 0.0, 'std': 2.449, 'rms': 2.449, 'max_abs': 3.0, 'zero_fraction': 0.333, \
'nonfinite_fraction': 0.25}
    """
    values, sizes = samples.values, samples.sizes
    bad = np.zeros(len(sizes))
    with np.errstate(invalid="ignore", over="ignore"):
        all_finite = np.isfinite(values.sum())
    if not all_finite:
        broken = ~np.isfinite(values)
        bad = broken.sum(axis=1)
        values = np.where(broken, 0.0, values).astype(np.float64)  # float32 squares may overflow
    count = np.maximum(sizes - bad, 1)
    mean = values.sum(axis=1) / count
    square = np.einsum("ij,ij->i", values, values)
    if not np.isfinite(square).all():  # squares leave float32 long before the values do
        square = np.einsum("ij,ij->i", values, values, dtype=np.float64)
    mean_square = square / count
    nonzero = np.count_nonzero(values, axis=1)
    return {
        "mean": mean,
        "std": np.sqrt(np.maximum(mean_square - mean * mean, 0.0)),
        "rms": np.sqrt(mean_square),
        "max_abs": np.maximum(values.max(axis=1), -values.min(axis=1))
        if len(values)
        else np.zeros(0),
        "zero_fraction": (sizes - bad - nonzero) / count,
        "nonfinite_fraction": bad / np.maximum(sizes, 1),
    }


def root_mean_squares(samples: Samples) -> np.ndarray:
    """The rms of each sample, NaN where it holds non-finite values; shape (samples,)."""
    square = np.einsum("ij,ij->i", samples.values, samples.values, dtype=np.float64)
    mean = np.where(np.isfinite(square), square, np.nan) / np.maximum(samples.sizes, 1)
    return np.asarray(np.sqrt(mean))


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
    return np.asarray(~np.any(sample, axis=0))


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


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine of the angle between the rows of two matrices; NaN where a row is zero or not finite.

    Args:
        first: Shape (rows, values).
        second: The same shape.

    Returns:
        Shape (rows,).

    Example:
        >>> rows = np.array([[1.0, 0.0], [1.0, 1.0]])
        >>> cosines(rows, np.array([[-2.0, 0.0], [0.0, 0.0]])).tolist()
        [-1.0, nan]
    """
    dot, a, b = (
        np.einsum("ij,ij->i", left, right)
        for left, right in ((first, second), (first, first), (second, second))
    )
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        result = dot / (np.sqrt(a) * np.sqrt(b))  # the product of squares leaves float32 early
    return np.where(np.isfinite(result), result, np.nan)
