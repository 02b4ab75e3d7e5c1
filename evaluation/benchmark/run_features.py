"""A run in a few numbers: what diagnosers that know no events go by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from neuraldbg.series import Kind

FEATURES = (
    "loss_first", "loss_last", "loss_min", "loss_max", "loss_expected", "loss_slope_late",
    "gradient_norm_first", "gradient_norm_max", "gradient_norm_last", "gradient_mean_abs_min",
    "gradient_mean_abs_max", "first_over_last_gradient", "gradient_zero_share_max",
    "gradient_cosine_median", "update_ratio_max", "update_ratio_median", "update_ratio_min",
    "update_zero_layers", "dead_share_max", "zero_share_max", "saturated_share_max",
    "output_max_abs", "output_rms_last_over_first", "weight_max_abs", "weight_variance_ratio",
    "weight_norm_growth", "input_mean_abs", "input_std", "target_rms", "nonfinite_share_max",
    "label_majority", "label_entropy_ratio", "validation_loss_last", "validation_gap",
    "learning_rate_last_over_first", "steps",
)  # fmt: skip
"""Names of the features, in their order."""


def run_features(series: pd.DataFrame) -> dict[str, float]:
    """A run's series in a few numbers; NaN where something was not observed.

    Args:
        series: the series table.

    Returns:
        A value for every name in ``FEATURES``. Norms and shares are over layers and steps;
        ``gradient_mean_abs`` is estimated from the root mean square, as for a normal
        distribution (the mean of its magnitude is sqrt(2 / pi) of it).

    Example:
        >>> from neuraldbg.series import build_series
        >>> series = build_series({"step": [0, 1], "rank": [0, 0], "layer": [None, None],
        ...                        "layer_index": [-1, -1], "kind": ["loss", "loss"],
        ...                        "value": [2.0, 1.5]})
        >>> features = run_features(series)
        >>> features["loss_first"], features["loss_last"], list(features) == list(FEATURES)
        (2.0, 1.75, True)
    """
    evaluated = series["evaluation"].fillna(0.0) != 0.0
    rows = {str(kind): table for kind, table in series[~evaluated].groupby("kind", observed=True)}
    empty = series.iloc[:0]
    parts = {kind: rows.get(kind.value, empty) for kind in Kind}
    validation = series[evaluated & (series["kind"] == Kind.LOSS.value)]["value"].dropna()
    found = {
        **_loss_features(parts[Kind.LOSS], validation),
        **_gradient_features(parts[Kind.GRADIENT]),
        **_update_features(parts[Kind.UPDATE]),
        **_activation_features(parts[Kind.OUTPUT]),
        **_weight_features(parts[Kind.PARAMETER]),
        **_data_features(parts[Kind.INPUT], parts[Kind.LOSS]),
        "nonfinite_share_max": _max(series["nonfinite_fraction"]),
        "learning_rate_last_over_first": _last_over_first(parts[Kind.OPTIMIZER]["value"]),
        "steps": float(series["step"].max() + 1) if len(series) else 0.0,
    }
    return {name: found[name] for name in FEATURES}


def _loss_features(loss: pd.DataFrame, validation: pd.Series) -> Mapping[str, float]:
    values = loss["value"]
    finite = values[np.isfinite(values)]
    late = finite.iloc[-max(2, len(finite) // 5) :] if len(finite) else finite
    last = float(late.mean()) if len(late) else np.nan
    slope = np.nan
    if len(late) > 1 and last != 0.0:
        slope = float(np.polyfit(np.arange(len(late)), late.to_numpy(float), 1)[0]) / abs(last)
    held_out = float(validation.iloc[-1]) if len(validation) else np.nan
    norms = loss["norm"]
    return {
        "loss_first": _at(finite, 0),
        "loss_last": last,
        "loss_min": float(finite.min()) if len(finite) else np.nan,
        "loss_max": _max(finite),
        "loss_expected": _at(loss["expected"].dropna(), 0),
        "loss_slope_late": slope,
        "gradient_norm_first": _at(norms.dropna(), 0),
        "gradient_norm_max": _max(norms[np.isfinite(norms)]),
        "gradient_norm_last": _at(norms.dropna(), -1),
        "validation_loss_last": held_out,
        "validation_gap": (held_out - last) / last if last else np.nan,
    }


def _gradient_features(gradient: pd.DataFrame) -> Mapping[str, float]:
    mean_abs = np.sqrt(2 / np.pi) * gradient["rms"]
    by_layer = gradient.groupby("layer_index")["norm"].median()
    first_over_last = np.nan
    if len(by_layer) > 1 and by_layer.iloc[-1] > 0:
        first_over_last = float(by_layer.iloc[0] / by_layer.iloc[-1])
    return {
        "gradient_mean_abs_min": _min(mean_abs),
        "gradient_mean_abs_max": _max(mean_abs),
        "first_over_last_gradient": first_over_last,
        "gradient_zero_share_max": _max(gradient["zero_fraction"]),
        "gradient_cosine_median": _median(gradient["cosine"]),
    }


def _update_features(update: pd.DataFrame) -> Mapping[str, float]:
    ratio = update["ratio"]
    by_layer = update.groupby("layer_index")["max_abs"].max()
    return {
        "update_ratio_max": _max(ratio),
        "update_ratio_median": _median(ratio),
        "update_ratio_min": _min(ratio),
        "update_zero_layers": float((by_layer == 0).mean()) if len(by_layer) else np.nan,
    }


def _activation_features(output: pd.DataFrame) -> Mapping[str, float]:
    by_step = output.groupby("step")["rms"].mean()
    return {
        "dead_share_max": _max(output["dead_fraction"]),
        "zero_share_max": _max(output["zero_fraction"]),
        "saturated_share_max": _max(output["saturated_fraction"]),
        "output_max_abs": _max(output["max_abs"]),
        "output_rms_last_over_first": _last_over_first(by_step),
    }


def _weight_features(parameter: pd.DataFrame) -> Mapping[str, float]:
    started = parameter[parameter["step"] == parameter["step"].min()]
    variance = (started["std"] ** 2).replace(0.0, np.nan).dropna()
    by_step = parameter.groupby("step")["rms"].mean()
    return {
        "weight_max_abs": _max(parameter["max_abs"]),
        "weight_variance_ratio": float(variance.max() / variance.min())
        if len(variance)
        else np.nan,
        "weight_norm_growth": _last_over_first(by_step),
    }


def _data_features(inputs: pd.DataFrame, loss: pd.DataFrame) -> Mapping[str, float]:
    is_target = inputs["target"].fillna(0.0) == 1.0
    fed, targets = inputs[~is_target], inputs[is_target]
    entropy = (loss["label_entropy"] / loss["random_label_entropy"]).replace(np.inf, np.nan)
    return {
        "input_mean_abs": _median(fed["mean"].abs()),
        "input_std": _median(fed["std"]),
        "target_rms": _median(targets["rms"]),
        "label_majority": _at(loss["label_majority"].dropna(), -1),
        "label_entropy_ratio": _median(entropy),
    }


def _at(values: pd.Series, position: int) -> float:
    return float(values.iloc[position]) if len(values) else np.nan


def _max(values: pd.Series) -> float:
    return float(values.max()) if values.notna().any() else np.nan


def _min(values: pd.Series) -> float:
    return float(values.min()) if values.notna().any() else np.nan


def _median(values: pd.Series) -> float:
    return float(values.median()) if values.notna().any() else np.nan


def _last_over_first(values: pd.Series) -> float:
    known = values.dropna()
    if not len(known) or not known.iloc[0]:
        return np.nan
    return float(known.iloc[-1] / known.iloc[0])
