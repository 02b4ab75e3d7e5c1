"""Events that stay exact though the series they were found in is thinned with age.

Before the log is thinned, events are detected while it is complete and entered here. Later
detections count only for what came after: a span that goes on prolongs its entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from neuraldbg.causal_chain import OF_THE_WHOLE_RUN
from neuraldbg.events import SemanticEvent


def _is_span(event: SemanticEvent) -> bool:
    """Whether an event is of one layer's span; all others are judged over the run, each time."""
    return event.layer is not None and event.event_type not in OF_THE_WHOLE_RUN


def _same_state(event: SemanticEvent, other: SemanticEvent) -> bool:
    return (event.event_type, event.layer, event.rank) == (
        other.event_type, other.layer, other.rank,
    )  # fmt: skip


@dataclass(slots=True)
class EventLedger:
    """Spans entered so far, and up to which step they are final.

    Attributes:
        entries: Spans, exact up to `until`.
        until: The last captured step of the log when it was last entered; -1 before.
    """

    entries: list[SemanticEvent] = field(default_factory=list)
    until: int = -1

    def enter(self, events: Sequence[SemanticEvent], until: int) -> None:
        """Enter what a complete log shows.

        Args:
            events: As detected now.
            until: The last captured step of the log.
        """
        self.entries = [event for event in self.merge(events) if _is_span(event)]
        self.until = until

    def merge(self, events: Sequence[SemanticEvent]) -> list[SemanticEvent]:
        """Entries and events as detected now, each span once."""
        entries = list(self.entries)
        found = []
        for event in events:
            if not _is_span(event) or self.until < 0:
                found.append(event)
                continue
            if event.step_end <= self.until:
                if not any(_same_state(event, entry) for entry in entries):
                    found.append(event)  # judged by what came later
                continue
            position = self._open_entry(entries, event)
            if position is None:
                found.append(replace(event, step_start=max(event.step_start, self.until + 1)))
            else:
                entries[position] = _prolonged(entries[position], event)
        return entries + found

    def _open_entry(self, entries: Sequence[SemanticEvent], event: SemanticEvent) -> int | None:
        """The entry that an event goes on with: it lasted to the last step entered."""
        if event.step_start > self.until:
            return None
        for position, entry in enumerate(entries):
            if _same_state(entry, event) and entry.step_end >= self.until:
                return position
        return None


def _prolonged(entry: SemanticEvent, event: SemanticEvent) -> SemanticEvent:
    worse = event if event.severity > entry.severity else entry
    return replace(
        entry,
        step_end=max(entry.step_end, event.step_end),
        to_state=worse.to_state,
        severity=worse.severity,
        value=worse.value,
        threshold=worse.threshold,
    )
