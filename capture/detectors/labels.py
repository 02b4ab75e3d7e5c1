"""Labels: one class that swallows the predictions, batches that arrive in order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, share_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_BATCHES = 12
_FEW_CLASSES = 100
"""Classes above which a skewed histogram is natural, as of words."""
_LEAST_VARIETY = 0.3
"""Entropy (nats) a random batch should have before a batch can be called poor in labels."""


def detect_imbalance(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """One class holds most of the labels' weight, and takes predictions from the others.

    The others are predicted less than half as often as they come, over the later half of the run:
    an unequal share alone does no harm.
    """
    panel = panels.of(Kind.LOSS)
    if not panel.layers:
        return
    share, predicted = panel["label_majority"][:, 0], panel["predicted_majority"][:, 0]
    few = panel["classes"][:, 0] <= _FEW_CLASSES
    rows = np.flatnonzero(few & np.isfinite(share) & np.isfinite(predicted))
    if len(rows) < _FEWEST_BATCHES:
        return
    held = float(share[rows[-1]])
    others = 1.0 - float(predicted[rows[len(rows) // 2 :]].mean())
    if held > thresholds.label_majority and others < thresholds.swallowed_share * (1.0 - held):
        yield event_at(
            panel,
            EventType.LABELS_IMBALANCED,
            None,
            (int(rows[0]), int(rows[-1])),
            ("balanced", "imbalanced"),
            held,
            thresholds.label_majority,
            share_severity(held, thresholds.label_majority),
        )


def detect_order(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Batches whose labels are far less varied than random batches of the run's labels.

    Of values, not classes: batches between which most of the target's variance lies, neighbours
    alike, and a jump back where the data begin anew; without one it may be the course of the run
    itself that drifts, as rewards do.
    """
    yield from _ordered_labels(panels.of(Kind.LOSS), thresholds)
    yield from _ordered_targets(panels.of(Kind.INPUT, target=True), thresholds)


def _ordered_labels(panel: Panel, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    if not panel.layers:
        return
    own, random = panel["label_entropy"][:, 0], panel["random_label_entropy"][:, 0]
    rows = np.flatnonzero(np.isfinite(own) & np.isfinite(random))
    if len(rows) < _FEWEST_BATCHES or random[rows[-1]] < _LEAST_VARIETY:
        return
    # Early in sorted data even the run has seen one class only, so what it knows in the end counts.
    variety = float(own[rows].mean() / random[rows[-1]])
    if variety < thresholds.batch_variety:
        yield _ordered(panel, rows, variety, thresholds.batch_variety)


def _ordered_targets(panel: Panel, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    if None not in panel.layers:
        return
    column = panel.layers.index(None)
    mean, std = panel["mean"][:, column], panel["std"][:, column]
    rows = np.flatnonzero(np.isfinite(mean) & np.isfinite(std) & (panel["count"][:, column] >= 8))
    if len(rows) < 2 * _FEWEST_BATCHES:
        return
    means = mean[rows]
    between, within = float(np.var(means)), float(np.square(std[rows]).mean())
    span = float(np.ptp(means))
    if between + within <= 0 or within == 0 or span == 0:
        return
    steps = np.diff(means)
    alike = float(np.median(np.abs(steps))) < span / 6
    jumps = np.flatnonzero(np.abs(steps) > span / 2)
    course = np.sign(np.median(steps[np.abs(steps) <= span / 2])) if len(jumps) < len(steps) else 0
    begins_anew = any(np.sign(steps[jump]) == -course for jump in jumps)
    variety = within / (between + within)
    if alike and begins_anew and variety < 1.0 - thresholds.between_batches:
        yield _ordered(panel, rows, variety, 1.0 - thresholds.between_batches)


def _ordered(panel: Panel, rows: np.ndarray, variety: float, limit: float) -> SemanticEvent:
    return event_at(
        panel,
        EventType.BATCHES_ORDERED,
        None,
        (int(rows[0]), int(rows[-1])),
        ("shuffled", "ordered"),
        variety,
        limit,
        float(np.clip(1.0 - variety / limit, 0.0, 1.0)),
    )
