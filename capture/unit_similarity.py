"""How alike the units and the rows of a sample are: symmetry, rank collapse, constant outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neuraldbg.capture.sampling import Samples
from neuraldbg.capture.statistics import Columns, unit_spread

MOST_ROWS = 32
MOST_UNITS = 32
"""Rows and units of a sample that are compared; more are stepped through evenly."""


def unit_similarity(sample: np.ndarray) -> float:
    """The mean absolute cosine between two units over the rows.

    1 when all units are multiples of one another. Units that are zero in every row are left out.

    Args:
        sample: Shape (rows, units).

    Returns:
        NaN for fewer than two rows, for fewer than two units left, and for non-finite values.

    Example:
        >>> unit_similarity(np.array([[1.0, -2.0], [2.0, -4.0]]))
        1.0
        >>> unit_similarity(np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]))
        0.0
    """
    if len(sample) < 2 or not np.isfinite(sample).all():
        return float("nan")
    units = np.asarray(sample, dtype=np.float64)
    sizes = np.sqrt(np.einsum("ij,ij->j", units, units))
    units = units[:, sizes > 0] / sizes[sizes > 0]
    count = units.shape[1]
    if count < 2:
        return float("nan")
    total = float(np.abs(units.T @ units).sum()) - count
    mean = total / (count * (count - 1))
    return max(0.0, float(np.minimum(np.round(mean, 12), 1.0)))


def row_spread(sample: np.ndarray) -> float:
    """How much the rows of a sample differ, relative to their size.

    The root mean square over units of the standard deviation between rows, over the rms of the
    sample; 0 when every sample gets the same output, NaN for fewer than two rows and for
    non-finite values.

    Args:
        sample: Shape (rows, units).

    Example:
        >>> row_spread(np.array([[1.0, 5.0], [1.0, 5.0]]))
        0.0
        >>> row_spread(np.array([[1.0, 5.0], [-1.0, -5.0]]))
        1.0
    """
    return unit_spread(sample.T)


def effective_rank(sample: np.ndarray) -> float:
    """The participation ratio of the squared singular values of a sample.

    The square of their sum over the sum of their squares: k for k equal singular values, 1 when
    all rows are multiples of one another. Rows are not centred, so that a common offset counts as
    a direction: a network whose tokens all become alike tends to rank 1 (Dong, Cordonnier and
    Loukas, "Attention is not all you need", ICML 2021). The ratio as a measure of dimension: Gao
    et al., "A theory of multineuronal dimensionality, dynamics and measurement", 2017.

    Args:
        sample: Shape (rows, units).

    Returns:
        1 to the lesser of rows and units; NaN for a sample of zeros and for non-finite values.

    Example:
        >>> effective_rank(np.eye(4)), effective_rank(np.ones((4, 4)))
        (4.0, 1.0)
    """
    largest = float(np.abs(sample).max()) if sample.size else 0.0
    if not np.isfinite(largest) or largest == 0.0:
        return float("nan")
    scaled = np.asarray(sample, dtype=np.float64) / largest
    # Squared singular values are eigenvalues of the products of rows with one another: these have
    # their sum on the diagonal and the sum of their squares as sum of squares.
    products = scaled @ scaled.T
    return float(np.trace(products) ** 2 / np.sum(products * products))


def similarity_columns(samples: Samples, positions: Sequence[int]) -> Columns:
    """How alike the units and rows of some of a step's samples are.

    Args:
        samples: Of one step.
        positions: Which of them, in the order of the result.

    Returns:
        Arrays of shape (positions,): ``unit_similarity``, ``row_spread`` and ``effective_rank``,
        NaN for samples of fewer than two rows or units.

    Example:
        >>> values = np.zeros((1, 2048), dtype=np.float32)
        >>> values[0, :4] = [1.0, 2.0, 1.0, 2.0]
        >>> columns = similarity_columns(Samples([("fc", "output")], values, [(2, 2)]), [0])
        >>> {name: column.tolist() for name, column in columns.items()}
        {'unit_similarity': [1.0], 'row_spread': [0.0], 'effective_rank': [1.0]}
    """
    functions = (unit_similarity, row_spread, effective_rank)
    found = np.full((len(functions), len(positions)), np.nan)
    for place, position in enumerate(positions):
        matrix = samples.matrix(position)
        if min(matrix.shape) >= 2:
            part = _subsample(matrix)
            found[:, place] = [function(part) for function in functions]
    return {function.__name__: found[k] for k, function in enumerate(functions)}


def _subsample(matrix: np.ndarray) -> np.ndarray:
    """At most `MOST_ROWS` rows and `MOST_UNITS` units, evenly spread."""
    rows, units = matrix.shape
    return matrix[:: -(-rows // MOST_ROWS), :: -(-units // MOST_UNITS)]
