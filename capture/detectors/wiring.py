"""Faults of the loop rather than of the numbers: gradients kept, parameters left out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_FRAMES = 3


def detect_gradient_not_reset(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Steps that began with the last step's gradients still in place."""
    panel = panels.of(Kind.OPTIMIZER)
    for column in range(len(panel.layers)):
        kept = panel["gradient_kept"][:, column]
        known = np.flatnonzero(~np.isnan(kept))
        if not len(known):
            continue
        share = float(kept[known].mean())
        if share > thresholds.sustained_share:
            found = np.flatnonzero(kept == 1)
            span = (int(found[0]), int(found[-1]))
            yield event_at(
                panel,
                EventType.GRADIENT_NOT_RESET,
                None,
                span,
                ("reset", "kept"),
                share,
                thresholds.sustained_share,
                share,
            )


def detect_update_missing(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers that have a gradient and never change, since no optimizer holds them."""
    panel, gradients = panels.of(Kind.UPDATE), panels.of(Kind.GRADIENT)
    weights = panels.of(Kind.PARAMETER)
    if len(panel) < _FEWEST_FRAMES:
        return
    norms = dict(zip(gradients.layers, gradients["norm"].T, strict=True))
    held = dict(zip(weights.layers, weights["in_optimizer"].T, strict=True))
    if not any((column == 1).any() or np.isnan(column).all() for column in held.values()):
        # An optimizer that holds nothing of the model still steps: then nothing is held.
        held = {name: np.zeros(1) for name in held}
    for layer, name in enumerate(panel.layers):
        change = panel["rms"][:, layer]
        change = change[np.isfinite(change)]
        pushed = np.nan_to_num(norms.get(name, np.zeros(0))) > 0
        left_out = (held.get(name, np.full(1, np.nan)) == 0).any()
        if left_out and len(change) >= _FEWEST_FRAMES and not change.any() and pushed.sum() > 1:
            yield event_at(
                panel,
                EventType.UPDATE_MISSING,
                layer,
                (0, len(panel) - 1),
                ("updated", "left_out"),
                0.0,
                0.0,
                1.0,
            )
