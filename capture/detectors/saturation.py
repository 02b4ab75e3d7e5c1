"""Bounded activations that sit in their flat tails."""

from __future__ import annotations

from collections.abc import Iterator

from neuraldbg.capture.panel import Panels
from neuraldbg.capture.spans import event_at, layer_spans, share_severity
from neuraldbg.events import ActivationHealth, EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_SHORTEST_SPAN = 3


def detect_saturation(panels: Panels, thresholds: Thresholds) -> Iterator[SemanticEvent]:
    """Hidden layers most of whose values are at the limits, where the slope is near 0.

    The last layer is left out: an output that is sure of itself is at its limits rightly.
    """
    panel = panels.of(Kind.OUTPUT)
    share = panel["saturated_fraction"][:, :-1]
    shortest = min(_SHORTEST_SPAN, len(panel))
    for layer, span in layer_spans(panel, share >= thresholds.saturated_share, shortest):
        value = float(share[span[0] : span[1] + 1, layer].max())
        yield event_at(
            panel,
            EventType.ACTIVATION_SATURATED,
            layer,
            span,
            (ActivationHealth.NORMAL.value, ActivationHealth.SATURATED.value),
            value,
            thresholds.saturated_share,
            share_severity(value, thresholds.saturated_share),
        )
