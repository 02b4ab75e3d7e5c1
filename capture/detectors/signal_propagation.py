"""How the size of activations changes from layer to layer and over the run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, layer_spans, ratio_severity
from neuraldbg.events import ActivationHealth, EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_FEWEST_LAYERS = 3


def detect_signal_propagation(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Activations that fade or blow up through the layers at step 0, or run away later.

    At step 0 the factor per layer is the geometric mean over the layers with weights; a stack of
    layers multiplies it (Poole et al. 2016; Schoenholz et al. 2017).
    """
    panel, weights = panels.of(Kind.OUTPUT), panels.of(Kind.PARAMETER)
    if not len(panel):
        return
    states = (ActivationHealth.NORMAL.value, ActivationHealth.ANOMALOUS.value)
    if panel.steps[0] == 0 and len(weights):
        gains = dict(zip(weights.layers, weights["gain"][0], strict=True))
        stack = [k for k, name in enumerate(panel.layers) if not np.isnan(gains.get(name, np.nan))]
        sizes = panel["rms"][0, stack]
        stack = [k for k, size in zip(stack, sizes, strict=True) if size > 0]
        if len(stack) >= _FEWEST_LAYERS:
            first, last = panel["rms"][0, stack[0]], panel["rms"][0, stack[-1]]
            factor = float((last / first) ** (1.0 / (len(stack) - 1)))
            fades, grows = factor < thresholds.signal_fading, factor > thresholds.signal_growth
            if fades or grows:
                limit = thresholds.signal_fading if fades else thresholds.signal_growth
                kind = EventType.ACTIVATION_FADING if fades else EventType.ACTIVATION_BLOWUP
                severity = ratio_severity(factor, limit)
                yield event_at(panel, kind, stack[-1], (0, 0), states, factor, limit, severity)
    growth = panel["rms"] / np.fmax(panel["rms"][0], thresholds.activation_floor)
    for layer, span in layer_spans(panel, growth > thresholds.activation_growth):
        value = float(np.nanmax(growth[span[0] : span[1] + 1, layer]))
        limit = thresholds.activation_growth
        yield event_at(
            panel,
            EventType.ACTIVATION_BLOWUP,
            layer,
            span,
            states,
            value,
            limit,
            ratio_severity(value, limit),
        )
