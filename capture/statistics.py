"""Statistics of samples: pure functions from a step's samples to numbers, all at once."""

from __future__ import annotations

import numpy as np

from neuraldbg.capture.moments import Moments
from neuraldbg.capture.sampling import Samples

Columns = dict[str, np.ndarray]


def summarise(samples: Samples) -> Columns:
    """Count, mean, std, rms, largest magnitude, zeros and non-finite values of each sample.

    Non-finite values are counted and left out of the rest; see `Moments.columns`.

    Returns:
        Arrays of shape (samples,).

    Example:
        >>> values = np.zeros((1, 2048), dtype=np.float32)
        >>> values[0, :4] = [3.0, -3.0, 0.0, np.nan]
        >>> columns = summarise(Samples([("fc", "output")], values, [(2, 2)]))
        >>> {name: round(float(column[0]), 3) for name, column in columns.items()}
        {'count': 4.0, 'mean': 0.0, 'std': 2.449, 'rms': 2.449, 'max_abs': 3.0, \
'zero_fraction': 0.333, 'nonfinite_fraction': 0.25}
    """
    return Moments.of(samples).columns()


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


def noise_scales(first: np.ndarray, second: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Noise over signal of successive gradients: tr(S) / |G|^2, the simple noise scale.

    Both gradients are taken as one true gradient G plus independent noise of covariance S. Half
    the square of their difference then estimates tr(S). The square of their mean estimates
    |G|^2 + tr(S) / 2; without that bias it is their product, |G|^2 = g1 . g2. What the true
    gradient changes in one step counts as noise too.

    Chance alone gives n values a product of about |g1| |g2| / sqrt(n); a smaller one is taken for
    that, so that pure noise gives about sqrt(n) and not any number: there it means "at least".

    McCandlish, Kaplan and Amodei, "An Empirical Model of Large-Batch Training", 2018. Their scale
    is in samples and for batches of one; here it is per step, in units of the batch in use.

    Args:
        first: Gradients of one step, shape (rows, values), zeros behind each.
        second: Those of the next, the same shape.
        sizes: Number of values of each row.

    Returns:
        Shape (rows,); NaN where a gradient is zero or not finite.

    Example:
        >>> first, second = np.array([[3.0, 1.0, 0.0, 0.0]]), np.array([[3.0, -1.0, 0.0, 0.0]])
        >>> noise_scales(first, second, np.array([4])).tolist() # tr(S) = 2, |G|^2 = 8
        [0.25]
    """
    a, b, dot = (
        np.einsum("ij,ij->i", left, right, dtype=np.float64)
        for left, right in ((first, first), (second, second), (first, second))
    )
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        signal = np.maximum(dot, np.sqrt(a) * np.sqrt(b) / np.sqrt(np.maximum(sizes, 1)))
        result = np.maximum(a + b - 2.0 * dot, 0.0) / (2.0 * signal)
    return np.where(np.isfinite(result) & (a > 0) & (b > 0), result, np.nan)
