"""Columns of one kind of rows beside those of another: the same steps, the same layers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from neuraldbg.capture.panel import Panel


def aligned(panel: Panel, other: Panel, column: str) -> np.ndarray:
    """Another panel's column at this panel's steps and layers, NaN where it has none.

    Example:
        >>> from neuraldbg.capture.panel import Panels
        >>> from neuraldbg.series import Kind, build_series
        >>> panels = Panels(build_series({
        ...     "step": [0, 2, 2], "rank": [0] * 3, "layer": ["fc"] * 3, "layer_index": [0] * 3,
        ...     "kind": ["output", "output", "parameter"], "trainable": [np.nan, np.nan, 1.0]}))
        >>> output, parameter = panels.of(Kind.OUTPUT), panels.of(Kind.PARAMETER)
        >>> aligned(output, parameter, "trainable").tolist()
        [[nan], [1.0]]
    """
    frame = pd.DataFrame(other[column], index=other.steps, columns=pd.Index(other.layers))
    return frame.reindex(index=panel.steps, columns=pd.Index(panel.layers)).to_numpy().copy()


def of_layers(panel: Panel, other: Panel, column: str) -> np.ndarray:
    """Another panel's last known value of a column for each of this panel's layers."""
    known = dict(zip(other.layers, last_known(other[column]), strict=True))
    return np.array([known.get(name, np.nan) for name in panel.layers])


def last_known(matrix: np.ndarray) -> np.ndarray:
    """The last number in each column that is not NaN, NaN where there is none.

    >>> last_known(np.array([[1.0, np.nan], [2.0, np.nan], [np.nan, np.nan]])).tolist()
    [2.0, nan]
    """
    result = np.full(matrix.shape[1], np.nan)
    for row in matrix:
        result = np.where(np.isnan(row), result, row)
    return result


def always(matrix: np.ndarray, value: float) -> np.ndarray:
    """Whether each column is known somewhere and has a value wherever it is known.

    >>> always(np.array([[1.0, 1.0, np.nan], [np.nan, 0.0, np.nan]]), 1.0).tolist()
    [True, False, False]
    """
    known = ~np.isnan(matrix)
    return np.asarray(known.any(axis=0) & ((matrix == value) | ~known).all(axis=0))
