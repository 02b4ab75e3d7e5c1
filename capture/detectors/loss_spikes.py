"""Losses that jump far off their course and come back to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from neuraldbg.capture.loss_curve import LossCurve, loss_curve
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.thresholds import Thresholds

_WINDOW = 24
"""Losses before a jump that tell the course and its ordinary peaks."""
_FEWEST_BEFORE = 8
_FEWEST = 2
"""Spikes that make a habit: one in a whole run is met in healthy ones too."""
_LONGEST = 16
"""Losses within which a spike is over; what lasts longer is a rise, not a spike."""
_LASTS = 3
"""Losses most of which are up in a spike: weights thrown off take some steps to come back, while a
single hard batch leaves no trace."""
_OVER_PEAKS = 2.0
"""Times that a jump exceeds the highest of the losses before: batches of few samples scatter
widely, but not suddenly."""
_LEFT_OVER = 0.25
"""Share of the jump that may be left once a spike counts as over."""
_MOST_EVENTS = 16


def detect_loss_spikes(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Repeated jumps to several times the course of the loss, each over within a few steps.

    A jump counts when it is also large for the run as a whole: a converged loss of nearly zero
    multiplies at every hard batch.
    """
    curve = loss_curve(panels)
    if curve is None or len(curve) < thresholds.minimum_steps:
        return
    found = list(_spikes(curve, thresholds))
    if len(found) < _FEWEST:
        return
    for first, last, value in found[:_MOST_EVENTS]:
        yield event_at(
            curve.panel,
            EventType.LOSS_SPIKING,
            None,
            (int(curve.positions[first]), int(curve.positions[last])),
            ("on course", "spiking"),
            value,
            thresholds.loss_spike,
            ratio_severity(value, thresholds.loss_spike),
        )


def _spikes(curve: LossCurve, thresholds: Thresholds) -> Iterator[tuple[int, int, float]]:
    """First and last row of each spike, and its height over the course before it."""
    values, highest = curve.values, curve.highest
    before = pd.Series(values).rolling(_WINDOW, min_periods=_FEWEST_BEFORE)
    courses, peaks = (of.shift(1).to_numpy() for of in (before.median(), before.max()))
    start = float(np.median(values[:_FEWEST_BEFORE]))
    jumps = (
        (highest > thresholds.loss_spike * courses)
        & (highest > _OVER_PEAKS * peaks)
        & (highest - courses > thresholds.loss_spike_size * start)
        & (courses > 0)
    )
    free_from = 0
    for position in np.flatnonzero(jumps).tolist():
        if position < free_from:
            continue
        course, peak = float(courses[position]), float(peaks[position])
        if np.median(highest[position : position + _LASTS]) <= max(2.0 * course, peak):
            continue  # one odd batch, and the next as if nothing had been
        limit = max(course + _LEFT_OVER * (float(values[position]) - course), peak)
        window = values[position + 1 : position + 1 + _LONGEST]
        free_from = position + _LONGEST
        if not (window <= limit).any():
            continue  # it stays up: no spike
        last = position + 1 + int(np.argmax(window <= limit))
        yield position, last, float(highest[position : last + 1].max()) / course
