"""Clipping that cuts nearly every gradient far down, or that is done before unscaling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.optimizer_rows import optimizer_columns
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_STEPS = 10
_LASTING = 0.9
"""Share of the steps at which the norm must be far above the threshold: "nearly all"."""


def detect_clipping(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """The norm before clipping far above the threshold at nearly every step.

    Clipping is there for the odd step (Pascanu, Mikolov and Bengio, "On the difficulty of training
    recurrent neural networks", 2013, set the threshold at half to ten times the average norm).
    Gradients that are still multiplied by a loss scale are cut by that scale: an event of its own.
    """
    panel = panels.of(Kind.OPTIMIZER)
    for column in optimizer_columns(panel):
        threshold = panel["clip_threshold"][:, column]
        with np.errstate(divide="ignore", invalid="ignore"):
            cut = panel["norm_before_clip"][:, column] / threshold
        known = np.flatnonzero(np.isfinite(cut) & (threshold > 0))
        if len(known) < _FEWEST_STEPS:
            continue
        scaled = panel["clipped_scaled"][known, column] == 1
        span = (int(known[0]), int(known[-1]))
        if (scaled & (cut[known] > 1)).mean() > thresholds.sustained_share:
            value = float(np.median(cut[known][scaled]))
            states = ("unscaled", "scaled")
            kind, limit = EventType.GRADIENT_CLIPPED_SCALED, 1.0
        elif (cut[known] > thresholds.clip_tight).mean() >= _LASTING:
            value = float(np.median(cut[known]))
            states = ("ordinary", "clipped")
            kind, limit = EventType.GRADIENT_CLIPPED, thresholds.clip_tight
        else:
            continue
        severity = ratio_severity(value, limit)
        yield event_at(panel, kind, None, span, states, value, limit, severity)
