"""Targets on a far larger scale than what the model puts out at the start."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_START = 3
"""Captured steps that show the scale at the start."""


def detect_target_scale(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """A target that is large, and large against the outputs of the untrained model."""
    targets, losses = panels.of(Kind.INPUT, target=True), panels.of(Kind.LOSS)
    if None not in targets.layers or not losses.layers:
        return
    size = targets["rms"][:, targets.layers.index(None)]
    early = np.flatnonzero(np.isfinite(size))[:_START]
    outputs = losses["prediction_rms"][:, 0]
    first = np.flatnonzero(np.isfinite(outputs))[:1]
    if not len(early) or not len(first):
        return
    target = float(np.median(size[early]))
    ratio = target / max(float(outputs[first[0]]), 1.0)
    if target > thresholds.target_large and ratio > thresholds.target_large:
        yield event_at(
            targets,
            EventType.TARGET_OFF_SCALE,
            None,
            (int(early[0]), int(early[-1])),
            ("on_scale", "off_scale"),
            ratio,
            thresholds.target_large,
            ratio_severity(ratio, thresholds.target_large),
        )
