"""Dropout that leaves too little."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.alignment import last_known
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_ROUNDING = 1e-6


def detect_dropout_strong(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Dropout in training mode with a probability from `dropout_strong` on, most of the time."""
    panel = panels.of(Kind.OUTPUT)
    limit = thresholds.dropout_strong
    strong = (panel["drop_probability"] >= limit - _ROUNDING) & (panel["training"] == 1)
    known = ~np.isnan(panel["training"])
    for layer in np.flatnonzero(
        strong.sum(axis=0) > thresholds.sustained_share * known.sum(axis=0)
    ):
        steps = np.flatnonzero(strong[:, layer])
        value = float(last_known(panel["drop_probability"][steps][:, [layer]])[0])
        yield event_at(
            panel,
            EventType.DROPOUT_STRONG,
            int(layer),
            (int(steps[0]), int(steps[-1])),
            ("usual", "strong"),
            value,
            limit,
            share_severity(value, limit),
        )
