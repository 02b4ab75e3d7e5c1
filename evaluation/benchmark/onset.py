"""Where and when a faulty run departed from its healthy twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from neuraldbg.series import Kind

TOLERANCE = 1e-5
"""Relative difference up to which two statistics count as equal: float32, sums in another order."""
_FORWARD = (Kind.INPUT, Kind.PARAMETER, Kind.OUTPUT)
_BACKWARD = (Kind.OUTPUT_GRADIENT, Kind.GRADIENT, Kind.UPDATE)
_KEYS = ["step", "kind", "layer_index"]
_COMPARED = ["value", "mean", "rms", "norm", "nonfinite_fraction", "trainable"]


@dataclass(frozen=True, slots=True)
class Onset:
    """Where a faulty run departed from its twin.

    Attributes:
        step: the first step at which a statistic differs.
        layer_index: of the layer that it begins at; -1 where it begins outside the layers.
    """

    step: int
    layer_index: int


def find_onset(healthy: pd.DataFrame, faulty: pd.DataFrame) -> Onset | None:
    """The first departure of a faulty run's series from its twin's.

    Both have the same seed, so that they are equal, number by number, until the fault acts. A
    fault that acts in the forward pass begins at the first layer that differs in the order in
    which data flows. One that shows in gradients only begins at the last one, unless gradients
    are missing because parameters were frozen, which is done from the input side.

    Args:
        healthy: the twin's series table.
        faulty: that of the faulty run.

    Returns:
        None where the two never differ.

    Example:
        >>> from neuraldbg.series import build_series
        >>> columns = {"step": [0, 1], "rank": [0, 0], "layer": ["fc", "fc"],
        ...            "layer_index": [0, 0], "kind": ["output", "output"]}
        >>> find_onset(build_series({**columns, "rms": [1.0, 1.0]}),
        ...            build_series({**columns, "rms": [1.0, 7.0]}))
        Onset(step=1, layer_index=0)
    """
    differs = _departures(_statistics(healthy), _statistics(faulty))
    if differs.empty:
        return None
    step = int(differs["step"].min())
    first = differs[differs["step"] == step]
    return Onset(step, _origin(first))


def _origin(first: pd.DataFrame) -> int:
    for kinds in (_FORWARD, _BACKWARD):
        rows = first[first["kind"].isin([kind.value for kind in kinds])]
        rows = rows[rows["layer_index"] >= 0]
        if len(rows):
            from_the_input = kinds is _FORWARD or bool(rows["frozen"].any())
            indices = rows["layer_index"]
            return int(indices.min() if from_the_input else indices.max())
    return -1


def _statistics(series: pd.DataFrame) -> pd.DataFrame:
    training = series[(series["evaluation"].fillna(0.0) == 0.0) & (series["kind"] != "metric")]
    table = training[[*_KEYS, *_COMPARED]].copy()
    table["kind"] = table["kind"].astype(str)
    # The learning rate and other settings are causes, not yet a departure of the training.
    return table[table["kind"] != Kind.OPTIMIZER.value].drop_duplicates(_KEYS).set_index(_KEYS)


def _departures(healthy: pd.DataFrame, faulty: pd.DataFrame) -> pd.DataFrame:
    """The keys at which two tables differ, rows that only one of them has among them."""
    last = min(table.index.get_level_values("step").max() for table in (healthy, faulty))
    first, second = healthy.align(faulty, join="outer")
    a, b = first.to_numpy(dtype=float), second.to_numpy(dtype=float)
    with np.errstate(invalid="ignore"):
        close = np.isclose(a, b, rtol=TOLERANCE, atol=1e-12, equal_nan=True)
    trainable = _COMPARED.index("trainable")
    keys = first.index.to_frame(index=False)
    keys["frozen"] = ~close[:, trainable]
    # The flag alone is a setting; what it does to gradients is the departure.
    tensors = np.delete(close, trainable, axis=1)
    frozen = keys.loc[keys["frozen"], ["step", "layer_index"]].drop_duplicates()
    found = keys[~tensors.all(axis=1) & (keys["step"] <= last)].drop(columns="frozen")
    marked = frozen.assign(frozen=True)
    found = pd.merge(found, marked, on=["step", "layer_index"], how="left")
    found["frozen"] = found["frozen"].eq(True)
    return found
