"""The event table: events as a DataFrame, one row each, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import pandas as pd

from neuraldbg.events import EventType, SemanticEvent

EVENT_COLUMNS: dict[str, str] = {
    "event_id": "int64",
    "event_type": "category",
    "layer": "category",
    "layer_index": "int32",
    "step_start": "int64",
    "step_end": "int64",
    "from_state": "object",
    "to_state": "object",
    "severity": "float32",
    "value": "float64",
    "threshold": "float64",
    "rank": "int16",
    "detail": "object",
}
"""Columns of the event table and their types."""


def build_event_table(events: Iterable[SemanticEvent]) -> pd.DataFrame:
    """Events in causal order, numbered from 0.

    Example:
        >>> event = SemanticEvent(7, EventType.LOSS_RISING, None, -1, 3, 9, "falling", "rising",
        ...                       0.5, 4.0, 1.5)
        >>> build_event_table([event])[["event_id", "event_type", "step_start"]].values.tolist()
        [[0, 'loss_rising', 3]]
    """
    ordered = sorted(events, key=lambda event: event.moment)
    records = [
        {
            name: number if name == "event_id" else _plain(getattr(event, name))
            for name in EVENT_COLUMNS
        }
        for number, event in enumerate(ordered)
    ]
    table = pd.DataFrame(records, columns=list(EVENT_COLUMNS))
    table["event_type"] = pd.Categorical(
        table["event_type"], categories=[member.value for member in EventType]
    )
    return table.astype({k: v for k, v in EVENT_COLUMNS.items() if k != "event_type"})


def _plain(value: object) -> object:
    return str(value) if isinstance(value, str) else value


def events_from_table(table: pd.DataFrame) -> list[SemanticEvent]:
    """The rows of an event table as records, in the table's order.

    Raises:
        ValueError: a column of the schema is missing.

    Example:
        >>> events_from_table(build_event_table([]))
        []
        >>> events_from_table(pd.DataFrame({"event_id": [0]}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: not an event table: it lacks event_type, layer, ...
    """
    missing = [name for name in EVENT_COLUMNS if name not in table]
    if missing:
        raise ValueError(f"not an event table: it lacks {', '.join(missing)}")
    return [_event(row) for row in table.to_dict("records")]


def _event(row: Mapping[Hashable, Any]) -> SemanticEvent:
    return SemanticEvent(
        event_id=int(row["event_id"]),
        event_type=EventType(row["event_type"]),
        layer=None if pd.isna(row["layer"]) else str(row["layer"]),
        layer_index=int(row["layer_index"]),
        step_start=int(row["step_start"]),
        step_end=int(row["step_end"]),
        from_state=str(row["from_state"]),
        to_state=str(row["to_state"]),
        severity=float(row["severity"]),
        value=float(row["value"]),
        threshold=float(row["threshold"]),
        rank=int(row["rank"]),
        detail=str(row["detail"]),
    )
