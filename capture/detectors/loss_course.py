"""Where the loss starts, whether it falls, and whether it turns back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_SMOOTHING = 5
"""Steps of the rolling median: a single bad batch is no trend."""
_NOISE_FACTOR = 4.0
"""Standard deviations of the early loss that a rise must exceed to be more than noise."""
_RECOVERED = 0.8
"""Share of the first loss below which a rise is over and forgotten."""


def detect_loss_course(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """A loss that starts too high, rises, or does not fall.

    With several optimizers the losses oppose each other (generator and discriminator) and their
    courses say nothing about progress; likewise a loss that changes its sign (policy gradients).
    """
    panel = panels.of(Kind.LOSS)
    if len(panel.layers) != 1 or not len(panel):
        return
    loss, expected = panel["value"][:, 0], panel["expected"][:, 0]
    yield from _high_at_start(panel, loss, expected, thresholds)
    finite = np.flatnonzero(np.isfinite(loss))
    if len(finite) < _SMOOTHING or loss[finite].min() < 0:
        return
    smooth = pd.Series(loss[finite]).rolling(_SMOOTHING, min_periods=1).median().to_numpy()
    rise = _rise(panel, loss[finite], smooth, finite, thresholds)
    if rise is not None:
        yield rise
    if len(finite) >= thresholds.minimum_steps and (rise is None or rise.to_state == "spiked"):
        yield from _flat(panel, smooth, expected, finite, thresholds)


def _high_at_start(
    panel: Panel, loss: np.ndarray, expected: np.ndarray, thresholds: Thresholds
) -> Iterator[SemanticEvent]:
    """A first loss far above what an untrained model should score."""
    if panel.steps[0] != 0 or not expected[0] > 0 or not np.isfinite(loss[0]):
        return
    value = float(loss[0] / expected[0])
    if value > thresholds.loss_high:
        yield event_at(
            panel,
            EventType.LOSS_HIGH_AT_START,
            None,
            (0, 0),
            ("ordinary", "extreme" if value > thresholds.loss_extreme else "high"),
            value,
            thresholds.loss_high,
            ratio_severity(value, thresholds.loss_high),
        )


def _rise(
    panel: Panel,
    loss: np.ndarray,
    smooth: np.ndarray,
    positions: np.ndarray,
    thresholds: Thresholds,
) -> SemanticEvent | None:
    start = float(loss[0])
    noise = float(np.std(np.diff(loss[:20]))) / np.sqrt(2) if len(loss) > 2 else 0.0
    noise = min(noise, start)  # a loss that blows up at once is not its own noise
    limit = max(thresholds.loss_rise * start, start + _NOISE_FACTOR * noise)
    above = np.flatnonzero(smooth > limit)
    if not len(above) or start <= 0:
        return None
    peak = float(smooth.max())
    end = float(np.median(smooth[-_SMOOTHING:]))
    if peak > thresholds.loss_divergence * start and end > _RECOVERED * start:
        state = "diverging"
    else:
        state = "spiked" if end < _RECOVERED * start else "rising"
    # The median lags by up to half its window; the rise began with the first loss in the window
    # that is above the limit, and not with a single bad batch long before.
    window = max(int(above[0]) - _SMOOTHING + 1, 0)
    onset = window + int(np.flatnonzero(loss[window:] > limit)[0])
    return event_at(
        panel,
        EventType.LOSS_RISING,
        None,
        (int(positions[onset]), int(positions[above[-1]])),
        ("falling", state),
        peak / start,
        thresholds.loss_rise,
        ratio_severity(peak / start, thresholds.loss_rise),
    )


def _flat(
    panel: Panel,
    smooth: np.ndarray,
    expected: np.ndarray,
    positions: np.ndarray,
    thresholds: Thresholds,
) -> Iterator[SemanticEvent]:
    window = max(_SMOOTHING, len(smooth) // 10)
    start, end = float(np.median(smooth[:_SMOOTHING])), float(np.median(smooth[-window:]))
    known = expected[np.isfinite(expected)]
    untrained = float(np.median(known)) if len(known) else np.inf
    # A loss that only came down to what guessing scores has learned nothing.
    yardstick = min(start, untrained) if untrained > 0 else start
    if yardstick <= 0:
        return
    gain = (yardstick - end) / yardstick
    if gain < thresholds.loss_slow:
        state = "flat" if gain < thresholds.loss_flat else "slow"
        yield event_at(
            panel,
            EventType.LOSS_FLAT,
            None,
            (int(positions[0]), int(positions[-1])),
            ("falling", state),
            gain,
            thresholds.loss_slow,
            float(np.clip(1.0 - gain / thresholds.loss_slow, 0.0, 1.0)),
        )
