"""Gradient accumulation that sums instead of averaging, or forgets what it accumulated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.optimizer_rows import only_optimizer
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_STEPS = 3
_FEWEST_SUMMED = 4
"""Micro-batches from which a sum is told: two or three backward passes may be as many losses."""
_PLAIN = (0.7, 1.4)
"""Factors of a loss that is neither averaged over micro-batches nor weighted on purpose."""
_MILD = 0.3
"""Severity of a sum: it multiplies the learning rate, which may have been chosen for it."""


def detect_gradient_reset_early(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Gradients reset between the micro-batches of a step, or between the last and the step."""
    panel, column = panels.of(Kind.OPTIMIZER), only_optimizer(panels)
    if column is None:
        return
    between = panel["gradient_reset"][:, column]
    before_step = panel["gradient_rescaled"][:, column]
    before_step = np.where(np.isnan(before_step), np.nan, before_step == 0.0)
    for found, state in (
        (between, "reset between micro-batches"),
        (before_step, "reset before the step"),
    ):
        known = np.flatnonzero(~np.isnan(found))
        if len(known) < _FEWEST_STEPS:
            continue
        share = float(found[known].mean())
        if share > thresholds.sustained_share:
            positions = np.flatnonzero(found == 1)
            span = (int(positions[0]), int(positions[-1]))
            limit = thresholds.sustained_share
            kind, states = EventType.GRADIENT_RESET_EARLY, ("counted", state)
            yield event_at(panel, kind, None, span, states, share, limit, share)


def detect_micro_batches_summed(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Several micro-batches a step, always as many, whose losses count in full.

    A loss divided by their number, a gradient divided before the step, and one that was clipped
    are no sums; nor are backward passes of different losses, or of the same batch.
    """
    panel, column = panels.of(Kind.OPTIMIZER), only_optimizer(panels)
    if column is None:
        return
    factor = _effective_factor(panel, column)
    known = np.flatnonzero(np.isfinite(factor))
    if len(known) < _FEWEST_STEPS:
        return
    counts = panel["micro_batches"][known, column]
    plain = (factor[known] > _PLAIN[0]) & (factor[known] < _PLAIN[1])
    count = float(np.median(counts))
    if count < _FEWEST_SUMMED or (counts == count).mean() <= thresholds.sustained_share:
        return
    if plain.mean() > thresholds.sustained_share:
        span = (int(known[0]), int(known[-1]))
        kind, states = EventType.MICRO_BATCHES_SUMMED, ("averaged", "summed")
        yield event_at(panel, kind, None, span, states, count, 1.0, _MILD)


def _effective_factor(panel: Panel, column: int) -> np.ndarray:
    """The loss's factor times what was done to the gradient after the last backward pass."""
    rescaled = panel["gradient_rescaled"][:, column]
    scale = panel["loss_scale"][:, column]
    unscaled = np.isfinite(scale) & (panel["loss_scaled"][:, column] == 0)
    rescaled = np.where(unscaled, rescaled * scale, rescaled)
    return np.asarray(panel["loss_factor"][:, column] * np.fmin(rescaled, 1.0))
