"""Losses that repeat themselves, as they do when sorted data come round again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from neuraldbg.capture.loss_curve import LossCurve, loss_curve
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_SHORTEST = 6
"""Steps of the shortest period that can hold a sorted pass over data."""
_FEWEST_PERIODS = 3
_SURE = 3.0
"""Standard deviations that von Neumann's ratio must lie below that of independent values."""
_EXPLAINED = 0.25
"""Share of the swing that the mean period must explain: single events that happen to be a period
apart explain little of it."""


_NARROW = 0.15
"""Share of a period below which the loss is up in one burst only: odd data, not ordered data."""


def detect_loss_period(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """A loss that saws in a period of its own.

    The same batches in the same order make every loss repeat itself, however well they are mixed.
    Sorted data show in that losses *within* a period hang together too, and swing widely. A
    learning rate that goes up and down explains a period by itself.
    """
    curve = loss_curve(panels)
    if curve is None or len(curve) < thresholds.minimum_steps:
        return
    if (np.diff(curve.steps) != 1).any() or _has_cycles(panels):
        return
    swing = _relative_to_course(curve)
    lag, strength = _strongest_period(swing)
    if lag == 0 or strength < thresholds.loss_period:
        return
    profile = _fold(swing, lag)
    if not _hangs_together(profile):
        return
    if np.ptp(profile) < thresholds.loss_period_swing or _wide_share(profile) < _NARROW:
        return
    if _explained(swing, profile) < _EXPLAINED:
        return
    yield event_at(
        curve.panel,
        EventType.LOSS_PERIODIC,
        None,
        (int(curve.positions[0]), int(curve.positions[-1])),
        ("steady", "periodic"),
        float(lag),
        float(_SHORTEST),
        share_severity(strength, thresholds.loss_period),
    )


def _has_cycles(panels: Panels) -> bool:
    """Whether the learning rate comes up again more than once (warm-up is one rise)."""
    rates = panels.of(Kind.OPTIMIZER)["value"]
    rates = rates[:, 0] if rates.size else np.zeros(0)
    changes = np.sign(np.diff(rates[np.isfinite(rates)]))
    changes = changes[changes != 0]
    return bool(np.count_nonzero((changes[1:] > 0) & (changes[:-1] < 0)) >= 1)


def _relative_to_course(curve: LossCurve) -> np.ndarray:
    """The loss against its own course over a fifth of the run, less one."""
    width = max(len(curve) // _FEWEST_PERIODS, 2 * _SHORTEST)
    course = pd.Series(curve.values).rolling(width, center=True, min_periods=width // 3).mean()
    level = np.maximum(course.ffill().bfill().to_numpy(), 1e-12)
    return np.asarray(np.clip(curve.values / level - 1.0, -1.0, 4.0))


def _strongest_period(swing: np.ndarray) -> tuple[int, float]:
    """The lag of the highest peak of the autocorrelation behind its first valley, and its height.

    0 where there is none that comes round often enough.
    """
    centred = swing - swing.mean()
    power = float(centred @ centred)
    longest = len(swing) // _FEWEST_PERIODS
    if power <= 0 or longest <= _SHORTEST:
        return 0, 0.0
    size = 2 * len(swing)
    spectrum = np.fft.rfft(centred, size)
    raw = np.fft.irfft(spectrum * np.conj(spectrum), size)[: longest + 2] / power
    # Fewer pairs at longer lags: as if all had as many.
    correlation = raw * len(swing) / (len(swing) - np.arange(len(raw)))
    peaks = [
        lag
        for lag in range(_SHORTEST, longest + 1)
        if correlation[lag] >= correlation[lag - 1]
        and correlation[lag] >= correlation[lag + 1]
        and correlation[:lag].min() < 0 < correlation[lag]
    ]
    if not peaks:
        return 0, 0.0
    best = max(peaks, key=lambda lag: correlation[lag])
    near = [lag for lag in peaks if correlation[lag] > 0.9 * correlation[best]]
    return near[0], float(correlation[near[0]])  # multiples of the period are as high


def _fold(swing: np.ndarray, lag: int) -> np.ndarray:
    """The median over all periods of each of its steps; shape (lag,)."""
    whole = len(swing) // lag * lag
    return np.asarray(np.median(swing[-whole:].reshape(-1, lag), axis=0))


def _wide_share(profile: np.ndarray) -> float:
    """The share of a period in which the loss is in the upper half of its range."""
    return float(np.mean(profile > (profile.max() + profile.min()) / 2))


def _explained(swing: np.ndarray, profile: np.ndarray) -> float:
    """The share of the variance that the profile explains, over whole periods."""
    lag = len(profile)
    whole = swing[-(len(swing) // lag * lag) :].reshape(-1, lag)
    variance = float(np.var(whole))
    return 1.0 - float(np.mean((whole - profile) ** 2)) / variance if variance > 0 else 0.0


def _hangs_together(profile: np.ndarray) -> bool:
    """Whether neighbours in a period are alike, as in sorted data and not in mixed ones.

    By the mean square of successive differences over the variance, round the circle: for n
    independent values it is about 2 with a variance of 4 / n (von Neumann, Ann. Math. Stat. 12,
    1941).
    """
    variance = float(np.var(profile))
    if variance == 0.0:
        return False
    ratio = float(np.mean(np.diff(np.append(profile, profile[0])) ** 2)) / variance
    return bool(ratio < 2.0 - _SURE * 2.0 / np.sqrt(len(profile)))
