"""Gradients that are nearly nothing but noise, from the first step to the last."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_PAIRS = 16
_FIRST_PAIRS = 8
_NOT_OPPOSED = -0.1
"""Median cosine below which gradients differ because each update overshoots, not by chance."""


def detect_gradient_noise(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """The median over layers and steps of the noise scale, where the loss gains nothing.

    Towards the end of any run noise rules: there is little gradient left. So the first gradients
    must be as noisy as those of the whole run, and the loss must not have fallen. Of a loss that
    comes to zero or below (of a policy, a likelihood of densities) the level says nothing.
    """
    panel = panels.of(Kind.GRADIENT)
    scales, cosines = panel["noise_scale"], panel["cosine"]
    known = np.isfinite(scales).any(axis=1)
    if known.sum() < _FEWEST_PAIRS or not _gains_nothing(panels, thresholds):
        return
    angles = cosines[np.isfinite(cosines)]
    if len(angles) and float(np.median(angles)) < _NOT_OPPOSED:
        return
    by_step = np.nanmedian(scales[known], axis=1)
    value = float(min(np.median(by_step[:_FIRST_PAIRS]), np.median(by_step)))
    if value <= thresholds.gradient_noise:
        return
    positions = np.flatnonzero(known)
    span = (int(positions[0]), int(positions[-1]))
    severity = ratio_severity(value, thresholds.gradient_noise)
    states = ("ordinary", "noisy")
    limit = thresholds.gradient_noise
    yield event_at(panel, EventType.GRADIENT_NOISY, None, span, states, value, limit, severity)


def _gains_nothing(panels: Panels, thresholds: Thresholds) -> bool:
    """Whether all losses are positive, and those of the last quarter as high as of the first."""
    panel = panels.of(Kind.LOSS)
    for column in panel["value"].T:
        losses = column[np.isfinite(column)]
        quarter = len(losses) // 4
        if len(losses) < thresholds.minimum_steps or losses.min() <= 0:
            return False
        first, last = losses[:quarter].mean(), losses[-quarter:].mean()
        if first - last > thresholds.loss_flat * first:
            return False
    return len(panel.layers) > 0
