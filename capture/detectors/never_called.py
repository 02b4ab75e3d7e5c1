"""Modules that are registered, given to the optimizer, and never called."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.alignment import always, last_known
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 8


def detect_module_never_called(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Modules amid others whose parameters are neither called nor reached by other ways.

    Modules after all that are called are heads of other uses; weights that look trained came with
    a pretrained model of which only a part is used.
    """
    del thresholds
    panel = panels.of(Kind.PARAMETER)
    idle = always(panel["called"], 0.0) & always(panel["reached"], 0.0)
    idle &= (panel["called"] == 0).sum(axis=0) >= _FEWEST_FRAMES
    idle &= (last_known(panel["in_optimizer"]) == 1) & (last_known(panel["fresh"]) != 0)
    called = np.flatnonzero((panel["called"] == 1).any(axis=0))
    for layer in np.flatnonzero(idle):
        if (called > layer).any() and (called < layer).any():
            span, states = (0, len(panel) - 1), ("called", "idle")
            yield event_at(
                panel, EventType.MODULE_NEVER_CALLED, int(layer), span, states, 0.0, 1.0, 1.0
            )
