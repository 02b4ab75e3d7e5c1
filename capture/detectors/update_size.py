"""Updates too large or too small for the weights they change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, layer_spans, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 3


def detect_update_size(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers whose updates are out of proportion to their weights; a run whose updates are tiny.

    A ratio of about 1e-3 is ordinary (Karpathy, CS231n notes, "Ratio of weights:updates"). Small
    updates are judged by the layer that moves most, over the first half of the run: a run that
    has converged moves little at its end, and rightly.
    """
    panel = panels.of(Kind.UPDATE)
    if not len(panel):
        return
    ratio = panel["ratio"]
    yield from _large(panel, ratio, thresholds)
    held = ratio[:, _held(panels, panel)]
    if not held.shape[1]:
        return
    most = np.fmax.reduce(held[: max(len(panel) // 2, 1)], axis=1)
    most = most[np.isfinite(most)]
    if len(most) < _FEWEST_FRAMES:
        return
    typical = float(np.median(most))
    if typical < thresholds.update_small:
        state = "tiny" if typical < thresholds.update_tiny else "small"
        yield event_at(
            panel,
            EventType.UPDATE_TOO_SMALL,
            None,
            (0, len(panel) - 1),
            ("ordinary", state),
            typical,
            thresholds.update_small,
            ratio_severity(typical, thresholds.update_small),
        )


def _held(panels: Panels, panel: Panel) -> np.ndarray:
    """Which layers some optimizer may move: updates of the others are not small but missing."""
    weights = panels.of(Kind.PARAMETER)
    left_out = {
        name
        for name, held in zip(weights.layers, weights["in_optimizer"].T, strict=True)
        if (held == 0).any()
    }
    return np.array([name not in left_out for name in panel.layers])


def _large(panel: Panel, ratio: np.ndarray, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    for layer, span in layer_spans(panel, ratio > thresholds.update_large):
        seen = ratio[span[0] : span[1] + 1, layer]
        largest = float(seen.max())
        lasting = len(seen) >= min(_FEWEST_FRAMES, len(panel))
        if not lasting and largest < thresholds.update_huge:
            continue  # one large step, as the first of an adaptive optimizer, is no habit
        yield event_at(
            panel,
            EventType.UPDATE_TOO_LARGE,
            layer,
            span,
            ("ordinary", "huge" if largest > thresholds.update_huge else "large"),
            # The first, which began it; the largest is inflated by what that one set off.
            float(seen[0]),
            thresholds.update_large,
            ratio_severity(largest, thresholds.update_large),
        )
