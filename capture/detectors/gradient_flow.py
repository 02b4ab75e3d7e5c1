"""Gradients that vanish or explode on their way back through the layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, layer_spans, ratio_severity
from neuraldbg.events import EventType, GradientHealth, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_SHORTEST_SPAN = 3
_EARLY_FRAMES = 10
_ARRIVES = 10.0
"""How many times the vanishing ratio the gradient's norm of a layer nearer to the input must be,
relative to the strongest, for the gradient to have arrived there."""
_FLOOR = 0.1
"""Share of the strongest layer's usual norm below which a layer's own is no yardstick."""


def detect_gradient_flow(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers whose gradient faded on its way from the loss, or is far above its own early size.

    Only layers with weight matrices are compared: the rms of an embedding's gradient is diluted
    by the rows that no sample touched, and norms' gains are of another scale.
    """
    panel = panels.of(Kind.GRADIENT)
    if len(panel):
        yield from _vanishing(panel, panels, thresholds)
        yield from _exploding(panel, thresholds)


def _vanishing(panel: Panel, panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    comparable = _layers_with_matrices(panel, panels)
    norm, rms = panel["norm"], np.where(comparable, panel["rms"], np.nan)
    strongest = np.fmax.reduce(rms, axis=1, keepdims=True) if rms.size else rms
    with np.errstate(all="ignore"):
        ratio = np.where(strongest > 0, rms / strongest, 0.0)
    ratio[np.isnan(rms)] = np.nan
    # A gradient that vanishes on its way is faint in all layers from there to the input; a layer
    # with a small gradient among others (queries and keys of attention at the start) is not that.
    with np.errstate(all="ignore"):
        arriving = norm / np.fmax.reduce(norm, axis=1, keepdims=True)
    arriving = np.fmax.accumulate(np.nan_to_num(arriving), axis=1)
    on_its_way = arriving < _ARRIVES * thresholds.vanishing_ratio
    faint = norm < thresholds.vanishing_gradient
    mask = comparable & (((ratio < thresholds.vanishing_ratio) & on_its_way) | faint)
    shortest = min(_SHORTEST_SPAN, len(panel))
    for layer, (start, end) in layer_spans(panel, mask, shortest):
        seen = slice(start, end + 1)
        relative = float(np.nanmin(ratio[seen, layer]))
        if relative < thresholds.vanishing_ratio:
            value, limit = relative, thresholds.vanishing_ratio
        else:
            value, limit = float(norm[seen, layer].min()), thresholds.vanishing_gradient
        yield event_at(
            panel,
            EventType.GRADIENT_VANISHING,
            layer,
            (start, end),
            (GradientHealth.HEALTHY.value, _why(panel, (start, end), layer, panels, thresholds)),
            value,
            limit,
            ratio_severity(value, limit),
        )


def _why(
    panel: Panel, span: tuple[int, int], layer: int, panels: Panels, thresholds: Thresholds
) -> str:
    """Whether a faint gradient was cut off by saturated units on its way, or just vanished."""
    outputs = panels.of(Kind.OUTPUT)
    during = (outputs.steps >= panel.steps[span[0]]) & (outputs.steps <= panel.steps[span[1]])
    above = outputs.indices[:-1] >= panel.indices[layer]  # the last layer saturates rightly
    share = outputs["saturated_fraction"][during][:, :-1][:, above]
    saturated = bool((share >= thresholds.saturated_share).any())
    return (GradientHealth.SATURATED if saturated else GradientHealth.VANISHING).value


def _exploding(panel: Panel, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    norm = np.where(np.isfinite(panel["norm"]), panel["norm"], np.nan)
    early = _early_median(norm)
    with np.errstate(all="ignore"):
        growth = np.where(early > 0, norm / early, np.nan)
    mask = (growth > thresholds.gradient_growth) | (norm > thresholds.exploding_gradient)
    for layer, (start, end) in layer_spans(panel, mask):
        seen = slice(start, end + 1)
        grown = float(np.nanmax(growth[seen, layer], initial=0.0))
        if grown > thresholds.gradient_growth:
            value, limit = grown, thresholds.gradient_growth
        else:
            value, limit = float(np.nanmax(norm[seen, layer])), thresholds.exploding_gradient
        yield event_at(
            panel,
            EventType.GRADIENT_EXPLODING,
            layer,
            (start, end),
            (GradientHealth.HEALTHY.value, GradientHealth.EXPLODING.value),
            value,
            limit,
            ratio_severity(value, limit),
        )


def _early_median(norm: np.ndarray) -> np.ndarray:
    """Each layer's usual norm at first: the smaller of its first value and its early median.

    A gradient that explodes within the first steps must not become its own yardstick; one that
    comes up from near zero, as behind weights that started small, does not explode.
    """
    early = norm[:_EARLY_FRAMES]
    result = np.full(norm.shape[1], np.nan)
    for layer in range(norm.shape[1]):
        known = early[:, layer][np.isfinite(early[:, layer]) & (early[:, layer] > 0)]
        if len(known):
            result[layer] = min(known[0], float(np.median(known)))
    return np.fmax(result, _FLOOR * np.fmax.reduce(result)) if len(result) else result


def _layers_with_matrices(panel: Panel, panels: Panels) -> np.ndarray:
    weights = panels.of(Kind.PARAMETER)
    if not len(weights):
        return np.zeros(len(panel.layers), dtype=bool)
    known = np.isfinite(weights["gain"]).any(axis=0)
    with_gain = {name for name, has in zip(weights.layers, known, strict=True) if has}
    return np.array([name in with_gain for name in panel.layers])
