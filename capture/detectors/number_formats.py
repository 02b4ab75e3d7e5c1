"""Values at the ends of what a half-precision number format holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.detectors.alignment import aligned
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, layer_spans, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 3


def detect_activation_near_overflow(
    panels: Panels, thresholds: Thresholds
) -> Iterator[SemanticEvent]:
    """Half-precision outputs within a few doublings of the format's largest number."""
    panel = panels.of(Kind.OUTPUT)
    share, limit = panel["format_share"], thresholds.format_share
    for layer in np.flatnonzero((share > limit).any(axis=0)):
        steps = np.flatnonzero(share[:, layer] > limit)
        value = float(share[steps, layer].max())
        event = event_at(
            panel,
            EventType.ACTIVATION_NEAR_OVERFLOW,
            int(layer),
            (int(steps[0]), int(steps[-1])),
            ("within_range", "near_overflow"),
            value,
            limit,
            share_severity(value, limit),
        )
        yield replace(event, detail=panel.details[steps[-1], layer] or "float16")


def detect_gradient_underflow(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Half-precision gradients of which the greater part is flushed to zero.

    A gradient of zeros alone counts where another layer's is flushed in part: without that its
    zeros have other reasons.
    """
    panel = panels.of(Kind.GRADIENT)
    share, limit = panel["flushed_fraction"], thresholds.flushed_share
    partly = np.any((share > limit / 5) & (share < 1.0), axis=1, keepdims=True)
    for layer, span in layer_spans(panel, (share > limit) & partly, _FEWEST_FRAMES):
        value = float(share[span[0] : span[1] + 1, layer].max())
        yield event_at(
            panel,
            EventType.GRADIENT_UNDERFLOW,
            layer,
            span,
            ("representable", "flushed"),
            value,
            limit,
            share_severity(value, limit),
        )


def detect_update_lost(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Half-precision weights that keep their values since each update is below their precision.

    The weights have a gradient, an optimizer holds them and its learning rate is not zero; and
    it is so for most layers, since a single one may just have huge weights.
    """
    del thresholds
    panel, weights = panels.of(Kind.UPDATE), panels.of(Kind.PARAMETER)
    rates = panels.of(Kind.OPTIMIZER)["value"]
    if len(panel) < _FEWEST_FRAMES or not (rates > 0).any():
        return
    formats = zip(weights.layers, weights.details.T, strict=True)
    names = {name for name, known in formats if {"float16", "bfloat16"} & set(known)}
    pushed = np.nan_to_num(aligned(panel, panels.of(Kind.GRADIENT), "norm")) > 0
    still = (panel["rms"] == 0) & pushed & (aligned(panel, weights, "in_optimizer") == 1)
    half = np.array([name in names for name in panel.layers], dtype=bool)
    lost = 2 * (still & half).sum(axis=1) > (pushed & half).sum(axis=1)
    still &= half[None, :] & lost[:, None]
    for layer, span in layer_spans(panel, still, _FEWEST_FRAMES):
        if 2 * (span[1] - span[0] + 1) > len(panel):
            states = ("updated", "update_lost")
            yield event_at(panel, EventType.GRADIENT_UNDERFLOW, layer, span, states, 1.0, 1.0, 1.0)
