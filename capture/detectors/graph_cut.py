"""Layers that could learn and are called, yet cut off from the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.detectors.alignment import always, last_known, of_layers
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, spans
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 3


def detect_gradient_cut(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """The last layer before a cut: trainable, called, held by an optimizer and never reached.

    A later layer must read what the last of the unreached layers puts out, or (a cut residual
    branch) something of the same shape; an unused head is no cut, and neither is a part that was
    trained before and is deliberately read without a gradient.
    """
    del thresholds
    panel = panels.of(Kind.PARAMETER)
    if len(panel) < _FEWEST_FRAMES:
        return
    reached = panel["reached"]
    norm = of_layers(panel, panels.of(Kind.GRADIENT), "norm")
    cut = always(reached, 0.0) & ((~np.isnan(reached)).sum(axis=0) >= _FEWEST_FRAMES)
    cut &= always(panel["trainable"], 1.0) & (np.nan_to_num(norm) == 0)
    cut &= (last_known(panel["in_optimizer"]) == 1) & (last_known(panel["called"]) == 1)
    if (cut & (last_known(panel["fresh"]) == 0)).any():
        return
    read = last_known(panel["consumed"])
    downstream = np.flatnonzero((reached == 1).any(axis=0))
    for first, last in spans(cut):
        if read[last] > 0 and (downstream > last).any():
            span, states = (0, len(panel) - 1), ("reached", "cut")
            event = event_at(panel, EventType.GRADIENT_CUT, last, span, states, 0.0, 0.0, 1.0)
            others = last - first
            detail = f"cut off with {others} layer{'s' * (others > 1)} before it"
            yield replace(event, detail=detail if others else "cut off")
