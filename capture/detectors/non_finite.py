"""NaN and infinite values, in the order in which they appear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neuraldbg.capture.detectors.undefined_operation import detect_undefined_operation
from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_SOURCES = (
    (Kind.INPUT, False, EventType.INPUT_NON_FINITE),
    (Kind.INPUT, True, EventType.TARGET_NON_FINITE),
    (Kind.OUTPUT, False, EventType.ACTIVATION_NON_FINITE),
    (Kind.GRADIENT, False, EventType.GRADIENT_NON_FINITE),
    (Kind.PARAMETER, False, EventType.WEIGHTS_NON_FINITE),
)


def detect_non_finite(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Non-finite values of each kind: one event a layer, from its first step to its last.

    Only the order of first appearance separates causes; what holds at the end says nothing, since
    by then everything is NaN.
    """
    for kind, target, event_type in _SOURCES:
        panel = panels.of(kind, target)
        share = panel["nonfinite_fraction"]
        if kind is Kind.GRADIENT:
            share = np.where(_is_skipped(panels, panel)[:, None], 0.0, share)
        yield from _events(panel, share, event_type)
    loss = panels.of(Kind.LOSS)
    yield from _events(loss, loss["nonfinite_fraction"], EventType.LOSS_NON_FINITE)
    yield from detect_undefined_operation(panels, thresholds)


def _is_skipped(panels: Panels, panel: Panel) -> np.ndarray:
    """Steps that a gradient scaler kept from being applied: it finds its scale by overflowing."""
    optimizer = panels.of(Kind.OPTIMIZER)
    skipped = optimizer.steps[(optimizer["step_applied"] == 0).any(axis=1)]
    return np.isin(panel.steps, skipped)


def _events(panel: Panel, share: np.ndarray, event_type: EventType) -> Iterator[SemanticEvent]:
    for layer in range(share.shape[1]):
        bad = np.flatnonzero(np.nan_to_num(share[:, layer], nan=0.0) > 0)
        if len(bad):
            batch = panel["batch"][bad, layer]
            event = event_at(
                panel,
                event_type,
                None if panel.indices[layer] < 0 else layer,
                (int(bad[0]), int(bad[-1])),
                ("finite", "non_finite"),
                float(np.nanmax(share[:, layer])),
                0.0,
                1.0,
            )
            named = batch[~np.isnan(batch)]
            yield replace(event, detail=f"batch {named[0]:.0f}") if len(named) else event
