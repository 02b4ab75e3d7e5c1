"""Weights that start too small, too large, or as copies of each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FRAMES_TO_BREAK = 3
"""Captured steps that a meant zero initialisation (LoRA, residual branches) needs to come apart."""


def detect_initial_weights(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers whose gain at step 0 lies outside what usual initialisations give.

    The gain is the weights' rms times sqrt(fan_in): a layer with gain 1 keeps the variance of its
    input (Glorot and Bengio 2010; He et al. 2015 use sqrt(2) for rectifiers).
    """
    panel = panels.of(Kind.PARAMETER)
    if not len(panel) or panel.steps[0] != 0:
        return
    yield from _identical_units(panel, thresholds)
    for layer, gain in enumerate(panel["gain"][0]):
        if np.isnan(gain) or gain == 0.0:
            continue  # an exact zero is meant or symmetric, not small
        if gain < thresholds.gain_small:
            state = "collapsed" if gain < thresholds.gain_collapsed else "small"
            event_type, limit = EventType.WEIGHTS_SMALL_AT_START, thresholds.gain_small
        elif gain > thresholds.gain_large:
            state = "extreme" if gain > thresholds.gain_extreme else "large"
            event_type, limit = EventType.WEIGHTS_LARGE_AT_START, thresholds.gain_large
        else:
            continue
        yield event_at(
            panel,
            event_type,
            layer,
            (0, 0),
            ("ordinary", state),
            gain,
            limit,
            ratio_severity(gain, limit),
        )


def _identical_units(panel: Panel, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers whose units start as copies of each other and stay so."""
    if len(panel) < _FRAMES_TO_BREAK:
        return
    spread = panel["unit_spread"]
    copies = (spread < thresholds.unit_spread) & (panel["trainable"] > 0)
    for layer in np.flatnonzero(copies[0] & copies[: _FRAMES_TO_BREAK + 1].all(axis=0)):
        apart = np.flatnonzero(~copies[:, layer])  # also once the spread is not watched any more
        end = int(apart[0]) - 1 if len(apart) else len(panel) - 1
        yield event_at(
            panel,
            EventType.UNITS_IDENTICAL,
            int(layer),
            (0, end),
            ("distinct", "identical"),
            float(spread[0, layer]),
            thresholds.unit_spread,
            1.0,
        )
