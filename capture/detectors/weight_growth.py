"""Weights that run away from their initial size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, layer_spans, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_weight_growth(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Layers whose weights have grown many times over.

    The yardstick is the initial size, or the size of gain 0.58 (PyTorch's default initialisation)
    where a layer started smaller: growing from a meant zero is no running away.
    """
    panel = panels.of(Kind.PARAMETER)
    if not len(panel):
        return
    rms = np.where(np.isfinite(panel["rms"]), panel["rms"], np.nan)
    with np.errstate(all="ignore"):
        usual = rms[0] * np.fmax(1.0, (1.0 / np.sqrt(3.0)) / panel["gain"][0])
        growth = np.where(usual > 0, rms / usual, np.nan)
    for layer, span in layer_spans(panel, growth > thresholds.weight_growth):
        value = float(np.nanmax(growth[span[0] : span[1] + 1, layer]))
        yield event_at(
            panel,
            EventType.WEIGHTS_GROWING,
            layer,
            span,
            ("steady", "growing"),
            value,
            thresholds.weight_growth,
            ratio_severity(value, thresholds.weight_growth),
        )
