"""Validation loss that turns round while the training loss goes on falling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.loss_curve import LossCurve, loss_curve, noise_of
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.capture.validation_series import ValidationSeries, validation_series
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.thresholds import Thresholds

_FEWEST = 5
"""Evaluations without which a curve has no minimum to speak of."""
_AFTER = 0.2
"""Share of the evaluations that must come after the best one."""
_NOISE_FACTOR = 4.0
"""Standard errors that the rise must exceed."""
_STILL_LEARNS = 0.9
"""Training loss at the end over that around the best evaluation, below which it goes on falling."""
_WIDTH = 0.1
"""Share of the run over which training losses are taken together."""


def detect_overfitting(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """A validation loss with its minimum well before the end, and a training loss that falls on.

    The rise counts against the best value and against what was gained before it: a loss that has
    come down from 2.3 to 0.02 and ends at 0.03 is as good as ever.
    """
    series, curve = validation_series(panels), loss_curve(panels)
    if series is None or curve is None or len(series.values) < _FEWEST:
        return
    turn = _turn(series.values)
    if turn is None:
        return
    best, end = turn
    low = float(series.values[best])
    rise = end - low
    gained = float(series.values[:2].max()) - low
    noise = noise_of(series.values)
    if rise < max(thresholds.validation_share * gained, _NOISE_FACTOR * noise):
        return
    if low <= 0 or end / low < thresholds.validation_rise:
        return
    if not _still_learns(curve, int(series.steps[best])):
        return
    strong = end / low > thresholds.validation_strong_rise
    event = event_at(
        series.panel,
        EventType.VALIDATION_LOSS_RISING,
        None,
        (int(series.positions[best]), int(series.positions[-1])),
        ("falling", "strongly_rising" if strong else "rising"),
        end / low,
        thresholds.validation_rise,
        ratio_severity(end / low, thresholds.validation_rise),
    )
    yield replace(event, detail=series.name)


def _turn(values: np.ndarray) -> tuple[int, float] | None:
    """Where the best of a series is, and its level at the end; None if the best is near the end."""
    tail = max(2, round(_AFTER * len(values)))
    best = int(np.argmin(values))
    if len(values) - 1 - best < tail:
        return None
    return best, float(np.median(values[-tail:]))


def _still_learns(curve: LossCurve, since: int) -> bool:
    """Whether the training loss at the end is clearly below that around a step."""
    width = max(int(_WIDTH * len(curve)), 5)
    at = int(np.searchsorted(curve.steps, since))
    around = curve.values[max(at - width, 0) : at + 1]
    end = curve.values[-width:]
    if not len(around) or at >= len(curve) - width // 2:
        return False
    before, after = float(np.median(around)), float(np.median(end))
    error = noise_of(curve.values) / np.sqrt(min(len(around), len(end)))
    return after < _STILL_LEARNS * before and before - after > 2.0 * error


__all__ = ["ValidationSeries", "detect_overfitting"]
