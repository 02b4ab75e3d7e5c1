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
    "count": "number of values (of the sample) that the statistics are of or, where tensors are "
    "split over ranks, stand for",
    "lowest": "least value of the main statistic (loss, rms, gradient norm) among the captured "
    "steps that this row stands for",
    "highest": "greatest value of it",
    "expected": "what an untrained model should score on this loss (kind loss)",
    "classes": "number of classes that the loss tells apart (kind loss)",
    "prediction_rms": "root mean square of the prediction that entered the loss (kind loss)",
    "unreachable": "share of the target that the output's activation cannot reach (kind loss)",
    "label_majority": "weight of the commonest label among all seen so far (kind loss)",
    "predicted_majority": "share of the samples predicted to be of that class (kind loss)",
    "label_entropy": "entropy of the batch's labels in nats (kind loss)",
    "random_label_entropy": "entropy expected of a random batch of the labels seen (kind loss)",
    "batch": "number of the backward pass in the run, from 0, where a value was not finite",
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
    "unit_similarity": "mean absolute cosine between two units over the rows of the sample (kind "
    "output)",
    "row_spread": "spread between rows of the sample (samples, positions) relative to their size; "
    "0 when all get the same output (kind output)",
    "effective_rank": "participation ratio of the sample's squared singular values (kind output)",
    "feature_spread": "largest feature's rms over the smallest's (kind input)",
    "gain": "weight rms times sqrt(fan_in) (kind parameter)",
    "learning_rate": "learning rate of the group that holds the layer (kind parameter)",
    "momentum": "the optimizer's momentum (kind optimizer)",
    "beta1": "decay of the gradient's average (kind optimizer)",
    "beta2": "decay of the squared gradient's average: beta2, alpha or rho (kind optimizer)",
    "eps": "what the optimizer adds to the denominator (kind optimizer)",
    "eps_stored": "the same as the number format of the optimizer's state holds it",
    "weight_decay": "weight decay (kind optimizer), that of the layer's group (kind parameter)",
    "clip_threshold": "what the gradient's norm is clipped to (kind optimizer)",
    "norm_before_clip": "norm of the gradient before it was clipped (kind optimizer)",
    "loss_scale": "factor by which a gradient scaler multiplied the loss (kind optimizer)",
    "loss_factor": "constant that the mean loss is multiplied by at each of several micro-batches "
    "(kind optimizer)",
    "gradient_rescaled": "gradient at the step over the one after the last backward pass (kind "
    "optimizer)",
    "ratio": "update rms over weight rms (kind update)",
    "cosine": "cosine with the previous step's (kind gradient)",
    "noise_scale": "noise over signal of this and the previous step's, tr(S) / |G|^2 (kind "
    "gradient)",
    "drop_probability": "probability with which dropout zeroes a value (kind output)",
    "batch_size": "samples that a batch norm saw at once (kind output)",
    "values_per_channel": "values that a batch norm's statistics are of (kind output)",
    "running_distance": "distance of a batch norm's running statistics from the batch's, in "
    "running standard deviations (kind output)",
    "running_lag": "share of its running statistics that is still as initialised (kind output)",
    "format_share": "largest finite magnitude over the largest that the number format holds",
    "flushed_fraction": "share of exact zeros beside magnitudes at the format's least (kind "
    "gradient)",
}
"""Statistic columns, all float32; NaN where a statistic does not apply or was not observed."""

FLAGS: dict[str, str] = {
    "clipped": "the gradient was clipped before it was read",
    "loss_scaled": "the number is still multiplied by a loss scale",
    "micro_batches": "backward calls accumulated in this step",
    "clipped_scaled": "clipping was called while the gradient was multiplied by a loss scale",
    "step_applied": "the optimizer applied the step",
    "gradient_reset": "gradients were reset before each further micro-batch of the step",
    "decoupled_decay": "weight decay shrinks the weights themselves (kind parameter)",
    "gradient_kept": "the step began with the last step's gradient still in place",
    "trainable": "the layer's parameters require a gradient",
    "in_optimizer": "the layer's parameters are held by an optimizer that stepped",
    "reached": "the backward pass leads to the layer's parameters (kind parameter)",
    "called": "the module has been called in training (kind parameter)",
    "consumed": "a later layer with parameters reads what the layer puts out without passing a "
    "gradient back, or passes one through it; 0.5: reads something of that shape (kind parameter)",
    "registered": "the parameters are found by the model's `parameters()` (kind parameter)",
    "fresh": "weights (kind parameter) or running statistics (kind output) look as initialised, "
    "not trained",
    "training": "the module was in training mode when the backward pass began (kind output)",
    "model_training": "so was the outermost module (kind output)",
    "undefined": "an operation behind the loss was undefined at its value (kind loss)",
    "shards": "number of pieces that the layer's parameters are split into over the ranks, one of "
    "which the row describes",
    "target": "the row describes the target, not the model's input (kind input)",
    "evaluation": "the row is of a pass without gradients or in eval mode",
    "comparable": "the loss is the same quantity as the training loss (kind loss, evaluation)",
}
"""Columns that change the meaning of a number, float32 so that NaN can say 'not known'."""

KEYS = ("step", "rank", "layer", "layer_index", "kind")
HELD = frozenset(
    {
        "batch_size", "called", "clipped", "consumed", "dead_fraction", "decoupled_decay",
        "drop_probability", "effective_rank", "flushed_fraction", "format_share", "fresh",
        "in_optimizer", "learning_rate", "loss_scaled", "model_training", "reached", "registered",
        "row_spread", "running_distance", "running_lag", "saturated_fraction", "silent_fraction",
        "trainable", "training", "unit_similarity", "values_per_channel", "weight_decay",
    }
)  # fmt: skip
"""Columns that are looked at now and then: between two looks the last one holds."""

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
