"""From a state that holds at some captured steps to one event for each unbroken stretch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from neuraldbg.capture.panel import Panel
from neuraldbg.events import EventType, SemanticEvent


def spans(mask: np.ndarray, shortest: int = 1) -> list[tuple[int, int]]:
    """First and last position of each unbroken run of True of at least a given length.

    >>> spans(np.array([True, False, True, True, True]), shortest=2)
    [(2, 4)]
    """
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    return [
        (int(start), int(end))
        for start, end in zip(starts, ends, strict=True)
        if end - start + 1 >= shortest
    ]


def share_severity(value: float, threshold: float) -> float:
    """How far a share is beyond its threshold: 0 at the threshold, 1 at a share of 1.

    >>> share_severity(0.75, 0.5)
    0.5
    """
    return float(np.clip((value - threshold) / max(1.0 - threshold, 1e-9), 0.0, 1.0))


def ratio_severity(value: float, threshold: float) -> float:
    """How far a quantity is beyond its threshold in either direction: 1 at a hundred times.

    >>> ratio_severity(100.0, 1.0), ratio_severity(0.1, 1.0), ratio_severity(0.0, 1.0)
    (1.0, 0.5, 1.0)
    """
    if not np.isfinite(value) or value <= 0 or threshold <= 0:
        return 1.0
    return float(np.clip(abs(np.log10(value / threshold)) / 2.0, 0.0, 1.0))


def event_at(
    panel: Panel,
    event_type: EventType,
    layer: int | None,
    span: tuple[int, int],
    states: tuple[str, str],
    value: float,
    threshold: float,
    severity: float,
) -> SemanticEvent:
    """An event over a span of a panel's captured steps.

    Args:
        panel: Where it was seen.
        event_type: What happened.
        layer: Column of the panel, or None for an event without a layer.
        span: Positions of its first and last captured step.
        states: Before and during.
        value: The most extreme value.
        threshold: What it was compared with.
        severity: 0 to 1.
    """
    return SemanticEvent(
        event_id=0,  # given when the table is built
        event_type=event_type,
        layer=None if layer is None else panel.layers[layer],
        layer_index=-1 if layer is None else int(panel.indices[layer]),
        step_start=int(panel.steps[span[0]]),
        step_end=int(panel.steps[span[1]]),
        from_state=states[0],
        to_state=states[1],
        severity=severity,
        value=float(value),
        threshold=float(threshold),
    )


def layer_spans(
    panel: Panel,
    mask: np.ndarray,
    shortest: int = 1,
) -> Iterator[tuple[int, tuple[int, int]]]:
    """The spans of each layer's column of a mask of shape (captured steps, layers)."""
    for layer in range(mask.shape[1]):
        for span in spans(mask[:, layer], shortest):
            yield layer, span
