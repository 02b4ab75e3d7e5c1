"""Faults of the loop rather than of the numbers: gradients kept, parameters left out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from neuraldbg.capture.panel import Panel, Panels
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
    """Layers that have a gradient and do not change, to the end, since no optimizer holds them."""
    panel = panels.of(Kind.UPDATE)
    if len(panel) < _FEWEST_FRAMES:
        return
    held = _aligned(panel, panels.of(Kind.PARAMETER), "in_optimizer")
    if not (held == 1).any() and (held == 0).any():
        held[:] = 0.0  # an optimizer steps that holds nothing of the model
    pushed = np.nan_to_num(_aligned(panel, panels.of(Kind.GRADIENT), "norm")) > 0
    mask = (held == 0) & (panel["rms"] == 0) & pushed
    for layer, span in layer_spans(panel, mask, _FEWEST_FRAMES):
        if span[1] == len(panel) - 1:
            states = ("updated", "left_out")
            yield event_at(panel, EventType.UPDATE_MISSING, layer, span, states, 0.0, 0.0, 1.0)


def _aligned(panel: Panel, other: Panel, column: str) -> np.ndarray:
    """Another panel's column at this panel's steps and layers, NaN where it has none."""
    frame = pd.DataFrame(other[column], index=other.steps, columns=pd.Index(other.layers))
    return frame.reindex(index=panel.steps, columns=pd.Index(panel.layers)).to_numpy().copy()
