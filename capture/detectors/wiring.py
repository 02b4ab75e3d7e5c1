"""Faults of the loop rather than of the numbers: gradients kept, parameters left out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.detectors.alignment import aligned, last_known, of_layers
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, layer_spans
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
    """Layers that have a gradient and do not change, to the end, since no optimizer holds them.

    A part that was trained before may be left out on purpose (only a new head is trained): that
    is no event unless the optimizer holds nothing of the model at all.
    """
    panel, weights = panels.of(Kind.UPDATE), panels.of(Kind.PARAMETER)
    if len(panel) < _FEWEST_FRAMES:
        return
    held = aligned(panel, weights, "in_optimizer")
    nothing_held = not (held == 1).any() and bool((held == 0).any())
    if nothing_held:
        held[:] = 0.0  # an optimizer steps that holds nothing of the model
    pushed = np.nan_to_num(aligned(panel, panels.of(Kind.GRADIENT), "norm")) > 0
    mask = (held == 0) & (panel["rms"] == 0) & pushed
    trained_before = of_layers(panel, weights, "fresh") == 0
    if not nothing_held and (trained_before & (last_known(held) == 0)).any():
        return
    for layer, span in layer_spans(panel, mask, _FEWEST_FRAMES):
        if span[1] == len(panel) - 1:
            states = ("updated", "left_out")
            yield event_at(panel, EventType.UPDATE_MISSING, layer, span, states, 0.0, 0.0, 1.0)
