"""From the series of a run to its event table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from neuraldbg.capture.detectors import (
    DETECTORS,
    detect_activation_near_overflow,
    detect_epsilon_lost,
    detect_non_finite,
    detect_rank_departure,
    detect_step_skipped,
)
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.rank_events import unite_ranks
from neuraldbg.event_table import build_event_table
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.rank_merge import view_ranks
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds


def detect_events(
    series: pd.DataFrame,
    thresholds: Thresholds | None = None,
    faults: Sequence[tuple[int, str]] = (),
) -> pd.DataFrame:
    """All events of a series, in causal order.

    With several ranks events are found in each one's view of the run (`view_ranks`), then united
    (`unite_ranks`), and ranks that should be equal are compared (`detect_rank_departure`).

    Args:
        series: The series table, of one or several ranks.
        thresholds: Where statistics turn into events; the defaults if left out.
        faults: Faults of the capture itself, as (step, message), which become events too.

    Returns:
        The event table; see `neuraldbg.event_table`.

    Example:
        >>> from neuraldbg.series import build_series
        >>> steps = list(range(60))
        >>> series = build_series({"step": steps, "rank": [0] * 60, "layer": [None] * 60,
        ...                        "layer_index": [-1] * 60, "kind": ["loss"] * 60,
        ...                        "value": [2.3] * 60, "micro_batches": [1] * 60})
        >>> detect_events(series)[["event_type", "to_state"]].values.tolist()
        [['loss_flat', 'flat']]
    """
    limits = thresholds or Thresholds()
    views = view_ranks(series)
    found = {rank: _detect_in_view(view, rank, limits) for rank, view in views.items()}
    if len(views) == 1:
        events = next(iter(found.values()))
    else:
        lengths = {rank: int(view["step"].max()) + 1 for rank, view in views.items()}
        end = min(_first_non_finite_step(view) for view in views.values())
        finite = {rank: Panels(view[view["step"] < end]) for rank, view in views.items()}
        events = [*unite_ranks(found, lengths), *detect_rank_departure(finite, limits)]
    events += [_fault_event(step, message) for step, message in faults]
    return build_event_table(events)


def _detect_in_view(series: pd.DataFrame, rank: int, limits: Thresholds) -> list[SemanticEvent]:
    """All events that one rank's view of the run shows."""
    # Once values are not finite every other statistic is noise: what led there comes before.
    finite = Panels(series[series["step"] < _first_non_finite_step(series)])
    whole = Panels(series)
    events = list(detect_non_finite(whole, limits))
    for detect_in_whole in (
        detect_activation_near_overflow, detect_epsilon_lost, detect_step_skipped,
    ):  # fmt: skip
        events += detect_in_whole(whole, limits)
    events += [event for detect in DETECTORS for event in detect(finite, limits)]
    return [replace(event, rank=rank) for event in events] if rank else events


def _first_non_finite_step(series: pd.DataFrame) -> int:
    """The first step whose loss or weights are not finite, or one past the last step."""
    broken = series["kind"].isin([Kind.LOSS.value, Kind.PARAMETER.value])
    broken &= series["nonfinite_fraction"] > 0
    rows = series[broken] if broken.any() else series.tail(1)
    if rows.empty:
        return 0
    return int(rows["step"].min()) + (not broken.any())


def _fault_event(step: int, message: str) -> SemanticEvent:
    return SemanticEvent(
        event_id=0,
        event_type=EventType.CAPTURE_FAULT,
        layer=None,
        layer_index=-1,
        step_start=step,
        step_end=step,
        from_state="observed",
        to_state=message,
        severity=0.0,
        value=float("nan"),
        threshold=float("nan"),
    )
