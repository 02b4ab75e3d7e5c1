"""What of a run was observed, what was not, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from neuraldbg.capture.layers import Layer
from neuraldbg.series import Kind

COVERAGE_COLUMNS = ("what", "layer", "observed", "of", "reason")
_Row = tuple[str, str | None, int, int, str]
_PER_LAYER = (Kind.OUTPUT, Kind.OUTPUT_GRADIENT, Kind.GRADIENT, Kind.PARAMETER, Kind.UPDATE)
_OF_PARAMETERS = (Kind.GRADIENT, Kind.PARAMETER, Kind.UPDATE)
_TELLING = {Kind.GRADIENT: "norm", Kind.LOSS: "value"}
"""The column whose presence means that a row was observed, where it is not the rms."""


def build_coverage(
    series: pd.DataFrame,
    layers: Sequence[Layer],
    steps: int,
    reasons: Mapping[tuple[str, str | None], str],
) -> pd.DataFrame:
    """What was observed of each layer and of the run, with the reason for what was not.

    Args:
        series: The series so far.
        layers: The watched layers.
        steps: Steps of the run.
        reasons: What those who observe know of it, by (what, layer); layer None for all layers.

    Returns:
        One row for each thing to be observed, with the columns

        - ``what``: a kind of rows of the series, or another subject in words,
        - ``layer``: the layer, None for the run,
        - ``observed``: number of steps at which it was,
        - ``of``: number of steps at which it might have been: the captured steps for layers, all
          steps for the loss,
        - ``reason``: why it was not observed at some or all of them; empty where it was.

    Example:
        >>> from torch import nn
        >>> from neuraldbg.capture.layers import find_layers
        >>> from neuraldbg.series import empty_series
        >>> table = build_coverage(empty_series(), find_layers([nn.Linear(1, 1)]), 0, {})
        >>> table[["what", "layer", "reason"]].values.tolist()[1]
        ['output', 'Linear', 'never called in training']
    """
    ordinary = series[series["evaluation"].fillna(0.0) == 0.0]
    seen = _steps_seen(ordinary)
    captured = max((count for (kind, _), count in seen.items() if kind in _PER_LAYER), default=0)
    rows: list[tuple[str, str | None, int, int, str]] = [
        _loss_row(seen.get((Kind.LOSS, None), 0), steps, reasons)
    ]
    for layer in layers:
        for kind in _PER_LAYER:
            if not _applies(kind, layer):
                continue
            observed = seen.get((kind, layer.name), 0)
            told = reasons.get((kind, layer.name), reasons.get((kind, None), ""))
            why = "" if observed >= captured > 0 else told or _reason(kind, layer, observed)
            rows.append((kind.value, layer.name, observed, captured, why))
    known = {(kind.value, name) for kind in Kind for name in (None, *(x.name for x in layers))}
    rows += [
        (what, layer, 0, captured, reason)
        for (what, layer), reason in reasons.items()
        if (what, layer) not in known
    ]
    table = pd.DataFrame(rows, columns=list(COVERAGE_COLUMNS))
    table["layer"] = pd.Series([row[1] for row in rows], dtype=object)
    return table


def _steps_seen(series: pd.DataFrame) -> dict[tuple[Kind, str | None], int]:
    """At how many steps each kind and layer has a number."""
    seen: dict[tuple[Kind, str | None], int] = {}
    for kind in (*_PER_LAYER, Kind.LOSS):
        rows = series[series["kind"] == kind.value]
        rows = rows[rows[_TELLING.get(kind, "rms")].notna()]
        names = rows["layer"].astype(object).where(rows["layer"].notna(), None)
        for name, count in rows.groupby(names.fillna(""), observed=True)["step"].nunique().items():
            seen[kind, str(name) or None] = int(count)
    return seen


def _applies(kind: Kind, layer: Layer) -> bool:
    if kind in _OF_PARAMETERS:
        return bool(layer.parameters)
    return layer.module is not None


def _loss_row(
    observed: int, steps: int, reasons: Mapping[tuple[str, str | None], str]
) -> tuple[str, None, int, int, str]:
    why = reasons.get((Kind.LOSS, None), "")
    if not steps:
        why = why or "no backward pass was seen"
    elif observed < steps:
        why = why or "backward began from no single number, or the log was thinned"
    return (Kind.LOSS.value, None, observed, steps, why)


def _reason(kind: Kind, layer: Layer, observed: int) -> str:
    """Why a layer was not observed, from what is known of the layer itself."""
    if kind in (Kind.OUTPUT, Kind.OUTPUT_GRADIENT):
        if not layer.called:
            return "never called in training"
        if observed:
            return "not called at every captured step"
        return (
            "its output holds no floating tensor"
            if kind is Kind.OUTPUT
            else "no gradient arrived at its output"
        )
    if not any(p.requires_grad for p in layer.parameters):
        return "requires no gradient" if kind is Kind.GRADIENT else ""
    if kind is Kind.GRADIENT and not observed:
        return "no gradient arrived"
    return "the optimizer that holds it did not step" if np.greater(observed, 0) else ""
