"""Successive gradients that oppose each other, or hardly differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 5


def detect_gradient_direction(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """The median over layers and steps of the cosine between one gradient and the next.

    Above the largest stable step size each update overshoots and the next gradient points back
    (cosine towards -1); mini-batch noise alone gives values around 0.
    """
    panel = panels.of(Kind.GRADIENT)
    cosines = panel["cosine"]
    known = np.isfinite(cosines).any(axis=1)
    if known.sum() < _FEWEST_FRAMES:
        return
    by_step = np.array([np.median(row[np.isfinite(row)]) for row in cosines[known]])
    value = float(np.median(by_step))
    positions = np.flatnonzero(known)
    span = (int(positions[0]), int(positions[-1]))
    if value < thresholds.opposing_cosine:
        kind, state, limit = EventType.GRADIENTS_OPPOSED, "opposed", thresholds.opposing_cosine
    elif value > thresholds.aligned_cosine:
        kind, state, limit = EventType.GRADIENTS_ALIGNED, "aligned", thresholds.aligned_cosine
    else:
        return
    severity = share_severity(abs(value), abs(limit))
    yield event_at(panel, kind, None, span, ("ordinary", state), value, limit, severity)
