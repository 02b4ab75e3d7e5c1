"""Optimizer constants too small for the number format they are used in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.detectors.optimizer_rows import optimizer_columns
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_epsilon_lost(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """An eps that rounds to zero: nothing keeps the division by a small second moment finite.

    The least float16 is about 6e-8 (IEEE 754), and Adam's default eps 1e-8.
    """
    panel = panels.of(Kind.OPTIMIZER)
    for column in optimizer_columns(panel):
        eps = panel["eps"][:, column]
        found = np.flatnonzero((panel["eps_stored"][:, column] == 0) & (eps > 0))
        if not len(found):
            continue
        span = (int(found[0]), int(found[-1]))
        value = float(eps[found[0]])
        event = event_at(
            panel, EventType.EPSILON_LOST, None, span, ("kept", "lost"), value, 0.0, 1.0
        )
        yield replace(event, detail=str(panel.details[found[0], column] or ""))
