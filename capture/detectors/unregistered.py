"""Parameters that the loss reaches and that neither model nor optimizer know of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.detectors.alignment import last_known
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 3


def detect_parameters_unregistered(
    panels: Panels, thresholds: Thresholds
) -> Iterator[SemanticEvent]:
    """Parameters in plain lists, replaced by a copy or made in `forward`, that nothing updates."""
    del thresholds
    panel = panels.of(Kind.PARAMETER)
    strange = panel["registered"] == 0
    left_out = last_known(panel["in_optimizer"]) == 0
    for layer in np.flatnonzero((strange.sum(axis=0) >= _FEWEST_FRAMES) & left_out):
        steps = np.flatnonzero(strange[:, layer])
        span = (int(steps[0]), int(steps[-1]))
        states = ("registered", "unregistered")
        event = event_at(
            panel, EventType.PARAMETERS_UNREGISTERED, int(layer), span, states, 0.0, 1.0, 1.0
        )
        yield replace(event, detail=panel.details[steps[-1], layer] or "")
