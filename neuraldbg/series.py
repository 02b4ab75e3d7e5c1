"""The series: the table of statistics over steps, one row per step, rank, layer and kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
import pandas as pd


class Kind(StrEnum):
    """Which tensor of a layer (or of the run) a row of the series describes."""

    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "output_gradient"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    UPDATE = "update"
    LOSS = "loss"
    OPTIMIZER = "optimizer"
    METRIC = "metric"


STATISTICS: dict[str, str] = {
    "value": "the number itself: loss (kind loss), learning rate (kind optimizer), metric",
    "count": "number of values (of the sample) that the statistics are of",
    "lowest": "least value of the main statistic (loss, rms, gradient norm) among the captured "
    "steps that this row stands for",
    "highest": "greatest value of it",
    "expected": "what an untrained model should score on this loss (kind loss)",
    "mean": "mean",
    "std": "standard deviation",
    "rms": "root mean square",
    "max_abs": "largest magnitude",
    "norm": "Euclidean norm over the whole tensor, not the sample",
    "zero_fraction": "share of exact zeros",
    "nonfinite_fraction": "share of NaN and infinite values",
    "saturated_fraction": "share in the flat tails of a bounded activation",
    "silent_fraction": "share of a rectifier's units that are zero for every sample of this step",
    "dead_fraction": "share of units silent through the whole window of captured steps",
    "unit_spread": "spread between units relative to their size; 0 when all units are copies",
    "feature_spread": "largest feature's rms over the smallest's (kind input)",
    "gain": "weight rms times sqrt(fan_in) (kind parameter)",
    "ratio": "update rms over weight rms (kind update)",
    "cosine": "cosine with the previous step's (kind gradient)",
}
"""Statistic columns, all float32; NaN where a statistic does not apply or was not observed."""

FLAGS: dict[str, str] = {
    "clipped": "the gradient was clipped before it was read",
    "loss_scaled": "the number is still multiplied by a loss scale",
    "micro_batches": "backward calls accumulated in this step",
    "step_applied": "the optimizer applied the step",
    "gradient_kept": "the step began with the last step's gradient still in place",
    "trainable": "the layer's parameters require a gradient",
    "in_optimizer": "the layer's parameters are held by an optimizer that stepped",
    "target": "the row describes the target, not the model's input (kind input)",
    "evaluation": "the row is of a pass without gradients or in eval mode",
}
"""Columns that change the meaning of a number, float32 so that NaN can say 'not known'."""

KEYS = ("step", "rank", "layer", "layer_index", "kind")
DETAIL = "detail"
"""The one column of text: what no number says, such as an operation, shapes or a number format."""
COLUMNS = (*KEYS, *STATISTICS, *FLAGS, DETAIL)

_KINDS = pd.CategoricalDtype([kind.value for kind in Kind])


def build_series(columns: Mapping[str, np.ndarray | Sequence[object]]) -> pd.DataFrame:
    """A series table from columns; those left out are filled with NaN, the types are set.

    Raises:
        ValueError: a column is not of the schema, or a key column is missing.

    Example:
        >>> table = build_series({"step": [0], "rank": [0], "layer": [None], "layer_index": [-1],
        ...                       "kind": ["loss"], "value": [2.3]})
        >>> table[["step", "kind", "value"]].to_dict("records")
        [{'step': 0, 'kind': 'loss', 'value': 2.299999952316284}]
    """
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise ValueError(f"no such series columns: {', '.join(unknown)}; the schema is {COLUMNS}")
    missing = [key for key in KEYS if key not in columns]
    if missing:
        raise ValueError(f"a series needs the key columns {', '.join(missing)}")
    rows = len(columns["step"])
    data: dict[str, object] = {
        "step": np.asarray(columns["step"], dtype=np.int64),
        "rank": np.asarray(columns["rank"], dtype=np.int16),
        "layer": pd.Categorical(np.asarray(columns["layer"], dtype=object)),
        "layer_index": np.asarray(columns["layer_index"], dtype=np.int32),
        "kind": pd.Categorical(np.asarray(columns["kind"], dtype=object), dtype=_KINDS),
    }
    for name in (*STATISTICS, *FLAGS):
        given = columns.get(name)
        data[name] = (
            np.full(rows, np.nan, dtype=np.float32)
            if given is None
            else np.asarray(given, dtype=np.float32)
        )
    detail = columns.get(DETAIL)
    given_detail = [None] * rows if detail is None else detail
    data[DETAIL] = pd.Categorical(np.asarray(given_detail, dtype=object))
    return pd.DataFrame(data)


def empty_series() -> pd.DataFrame:
    """A series without rows.

    >>> len(empty_series())
    0
    """
    return build_series({key: [] for key in KEYS})
