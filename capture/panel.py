"""A series laid out for detectors: for each kind and column a matrix of steps by layers."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pandas as pd

from neuraldbg.series import DETAIL, HELD, Kind


class Panel:
    """One kind of rows of a series, as matrices of shape (captured steps, layers).

    Args:
        series: The series table.
        kind: Which rows to take.
        target: For inputs: the targets rather than the inputs.
        evaluation: Rows of evaluations rather than of training.

    Attributes:
        steps: The captured steps, ascending.
        layers: Names in the order in which data flows; None for rows without a layer.
        indices: The layers' positions in that order.

    Example:
        >>> from neuraldbg.series import build_series
        >>> series = build_series({"step": [0, 2], "rank": [0, 0], "layer": ["fc", "fc"],
        ...                        "layer_index": [0, 0], "kind": ["output"] * 2, "rms": [1, 3]})
        >>> panel = Panel(series, Kind.OUTPUT)
        >>> panel.steps.tolist(), panel.layers, panel["rms"].tolist()
        ([0, 2], ['fc'], [[1.0], [3.0]])
    """

    def __init__(
        self,
        series: pd.DataFrame,
        kind: Kind,
        target: bool = False,
        evaluation: bool = False,
    ) -> None:
        chosen = series["kind"] == kind.value
        chosen &= series["evaluation"].fillna(0.0) == float(evaluation)
        if kind is Kind.INPUT:
            chosen &= series["target"].fillna(0.0) == float(target)
        self._rows = series[chosen]
        self.steps, self._step_codes = np.unique(self._rows["step"].to_numpy(), return_inverse=True)
        layers = self._rows[["layer", "layer_index"]].drop_duplicates("layer", keep="last")
        layers = layers.sort_values("layer_index", kind="stable")
        self.layers: list[str | None] = [
            None if pd.isna(name) else str(name) for name in layers["layer"]
        ]
        self.indices = layers["layer_index"].to_numpy()
        self._matrices: dict[str, np.ndarray] = {}

    @cached_property
    def _layer_codes(self) -> np.ndarray:
        positions = {name: position for position, name in enumerate(self.layers)}
        names = self._rows["layer"].cat
        # A missing layer has the code -1, which indexes the last entry.
        lookup = [*(positions.get(name, -1) for name in names.categories), positions.get(None, -1)]
        return np.array(lookup)[names.codes.to_numpy()]

    def __getitem__(self, column: str) -> np.ndarray:
        """The column as a matrix, NaN where a layer was not observed at a step.

        What is looked at now and then holds until it is looked at again (`series.HELD`).
        """
        matrix = self._matrices.get(column)
        if matrix is None:
            matrix = np.full((len(self.steps), len(self.layers)), np.nan)
            matrix[self._step_codes, self._layer_codes] = self._rows[column].to_numpy()
            if column in HELD:
                matrix = pd.DataFrame(matrix).ffill().to_numpy()
            self._matrices[column] = matrix
        return matrix

    @property
    def details(self) -> np.ndarray:
        """The column of text as a matrix of objects, None where a row says nothing."""
        matrix = np.full((len(self.steps), len(self.layers)), None, dtype=object)
        text = self._rows[DETAIL].astype(object)
        matrix[self._step_codes, self._layer_codes] = text.where(text.notna(), None)
        return matrix

    def __len__(self) -> int:
        return len(self.steps)


class Panels:
    """The panels of one series, each made when first asked for."""

    def __init__(self, series: pd.DataFrame) -> None:
        self._series = series
        self._panels: dict[tuple[Kind, bool, bool], Panel] = {}

    def of(self, kind: Kind, target: bool = False, evaluation: bool = False) -> Panel:
        """The panel of a kind; see `Panel`."""
        key = (kind, target, evaluation)
        panel = self._panels.get(key)
        if panel is None:
            panel = self._panels[key] = Panel(self._series, *key)
        return panel
