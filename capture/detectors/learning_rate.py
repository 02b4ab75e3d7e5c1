"""Learning rates that fall too early, or start too high for the weights as they are then."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from neuraldbg.capture.detectors.optimizer_rows import learning_rates
from neuraldbg.capture.loss_curve import LossCurve, loss_curve, noise_of
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_BEGUN = 0.1
"""Share of the largest rate at which a fall has begun for good."""
_STALLED = 0.1
"""Speed of the loss after the fall over that before it, below which it has stalled."""
_LEARNED = 0.15
"""Share of the first loss below which a run has learned what it could."""
_FALLING = 0.01
"""Share by which the loss must fall in the second half before the rate does."""
_FIRST_STEPS = 32
"""Steps in which a start at full rate does its harm."""
_FIRST_FRAMES = 3
_JUMP = 1.25
"""Early loss over the first one that makes a jump."""
_STAYS = 0.75
"""Share of the first loss above which the loss has stayed up to the end."""
_FULL_RATE = 0.5
"""Share of the largest rate from which a run has begun without warm-up."""


def detect_learning_rate_falling(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """A rate that falls by orders of magnitude while the loss still does, and most of the run left.

    Planned schedules end as low, but at their end: cosine and one-cycle schedules spend less than
    a tenth of the run below a hundredth of their peak, three-stage steps less than a half. A rate
    that falls because the loss had stopped already is no event.
    """
    curve = loss_curve(panels)
    if curve is None or len(curve) < thresholds.minimum_steps:
        return
    rates = learning_rates(panels, curve.steps)
    if rates is None or not np.isfinite(rates).all() or not rates.max() > 0:
        return
    peak = float(rates.max())
    begun, low = (_falls_below(rates, share * peak) for share in (_BEGUN, thresholds.rate_collapse))
    left = (len(rates) - low) / len(rates)
    if begun < _FIRST_FRAMES or left < thresholds.collapse_left or not _stalls(curve, begun, low):
        return
    value = float(rates[low:].max()) / peak
    yield event_at(
        curve.panel,
        EventType.LEARNING_RATE_FALLING,
        None,
        (int(curve.positions[begun]), int(curve.positions[-1])),
        ("planned", "collapsed"),
        value,
        thresholds.rate_collapse,
        float(np.clip(left, 0.0, 1.0)),
    )


def _falls_below(rates: np.ndarray, limit: float) -> int:
    """The first position from which the rate stays below a limit; the length if there is none."""
    above = np.flatnonzero(rates > limit)
    return int(above[-1]) + 1 if len(above) else 0


def _stalls(curve: LossCurve, begun: int, low: int) -> bool:
    """Whether the loss was falling when the rate's fall began, and stopped with it."""
    values = curve.values
    width = max(begun // 4, 2)
    middle = begun // 2
    first = float(np.median(values[max(middle - width, 0) : middle + 1]))
    second = float(np.median(values[max(begun - width, 0) : begun + 1]))
    after = values[low:]
    end = float(np.median(after[-max(len(after) // 4, 3) :]))
    noise = noise_of(values) / np.sqrt(width)
    fell = first - second
    if fell < max(_FALLING * first, noise) or end < _LEARNED * values[0]:
        return False
    return (second - end) / (len(values) - begun) < _STALLED * fell / max(begun - middle, 1)


def detect_learning_rate_starts_high(
    panels: Panels, thresholds: Thresholds
) -> Iterator[SemanticEvent]:
    """First updates far above those that follow at the same rate, and a loss that does not recover.

    Adaptive optimizers always begin with updates a few times larger than later ones, and gradients
    shrink as a model learns: only where the loss jumps at once and stays up is that a fault.
    """
    curve, panel = loss_curve(panels), panels.of(Kind.UPDATE)
    if curve is None or len(curve) < thresholds.minimum_steps or not len(panel):
        return
    rates = learning_rates(panels, curve.steps)
    if rates is None or not np.isfinite(rates).all() or panel.steps[0] != 0:
        return
    if not rates[0] > 0 or rates[0] < _FULL_RATE * rates.max() or not _jumps_and_stays(curve):
        return
    ratio = panel["ratio"]
    typical = np.array([_median(row) for row in ratio])
    later = typical[panel.steps >= max(_FIRST_STEPS, curve.steps[-1] // 2)]
    early, late = _median(typical[:_FIRST_FRAMES]), _median(later)
    if not early > thresholds.update_at_start or not late > thresholds.update_tiny:
        return
    value = early / late
    if value < thresholds.start_ratio or late > thresholds.update_large:
        return
    yield event_at(
        panel,
        EventType.LEARNING_RATE_STARTS_HIGH,
        None,
        (0, int(np.searchsorted(panel.steps, _FIRST_STEPS, side="right")) - 1),
        ("warmed up", "full at once"),
        value,
        thresholds.start_ratio,
        ratio_severity(value, thresholds.start_ratio),
    )


def _jumps_and_stays(curve: LossCurve) -> bool:
    values = curve.values
    smooth = pd.Series(values).rolling(3, min_periods=1).median().to_numpy()
    start, noise = float(values[0]), noise_of(values)
    jumped = smooth[:_FIRST_STEPS].max() > _JUMP * start + 4.0 * noise
    return bool(jumped and np.median(smooth[-max(len(smooth) // 10, 5) :]) > _STAYS * start)


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
