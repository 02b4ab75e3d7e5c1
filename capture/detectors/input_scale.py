"""Inputs whose scale differs from what networks are initialised for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FIRST_FRAMES = 8
"""Captured steps over which the input is judged: batches differ, data sets do not."""
_WIDE_FACTOR = 10.0
"""How many times the first limit of feature spread makes it extreme."""


def detect_input_scale(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Inputs far from unit scale, or features of very unlike scales.

    Initialisations assume inputs of about zero mean and unit variance (LeCun et al. 1998,
    "Efficient BackProp", section 4.3). Small inputs are judged by their largest magnitude, since
    sparse and one-hot inputs have a small rms and do no harm.
    """
    panel = panels.of(Kind.INPUT)
    for layer in range(len(panel.layers)):
        early = slice(0, _FIRST_FRAMES)
        rms, largest, spread = (
            _median(panel[name][early, layer]) for name in ("rms", "max_abs", "feature_spread")
        )
        off_scale = max(rms, 1.0 / largest if largest > 0 else 1.0)
        spread_share = spread / thresholds.feature_spread
        value, limit = off_scale, thresholds.input_odd
        extreme = off_scale >= thresholds.input_extreme
        if spread_share > max(1.0, off_scale / thresholds.input_odd):
            value, limit = spread, thresholds.feature_spread
            extreme = extreme or spread_share >= _WIDE_FACTOR
        if value >= limit:
            yield event_at(
                panel,
                EventType.INPUT_OFF_SCALE,
                layer,
                (0, len(panel) - 1),
                ("ordinary", "extreme" if extreme else "odd"),
                value,
                limit,
                ratio_severity(value, limit),
            )


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 0.0
