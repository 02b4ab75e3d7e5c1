"""Several ranks' events made those of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from neuraldbg.events import EventType, SemanticEvent

_T = EventType

SEEN_BY_ONE = frozenset(
    {
        _T.INPUT_NON_FINITE, _T.TARGET_NON_FINITE, _T.INPUT_OFF_SCALE, _T.TARGET_OFF_SCALE,
        _T.ACTIVATION_NON_FINITE, _T.ACTIVATION_NEAR_OVERFLOW, _T.OPERATION_UNDEFINED,
        _T.LOSS_NON_FINITE, _T.GRADIENT_NON_FINITE, _T.WEIGHTS_NON_FINITE, _T.CAPTURE_FAULT,
    }
)  # fmt: skip
"""What happens to one rank's batches and reaches all of them through the averaged gradient."""


def unite_ranks(
    events: Mapping[int, Sequence[SemanticEvent]], lengths: Mapping[int, int]
) -> list[SemanticEvent]:
    """The events of a run, from those of each rank's own view.

    All ranks train one model, so what is true of the run shows on most of them: a type of event
    that half of the ranks or fewer show is one batch's chance, save for those in `SEEN_BY_ONE`.
    Ranks that ended early do not count as having seen nothing. The same state at the same time
    becomes one event, with the rank that was first and the numbers of the worst.

    Args:
        events: By rank.
        lengths: Steps of each rank's run.

    Example:
        >>> first = SemanticEvent(0, EventType.ACTIVATION_DEAD, "fc", 0, 12, 20, "normal", "dead",
        ...                       0.5, 0.7, 0.5)
        >>> second = replace(first, step_start=10, step_end=18, rank=1)
        >>> [united] = unite_ranks({0: [first], 1: [second]}, {0: 30, 1: 30})
        >>> united.rank, united.step_start, united.step_end
        (1, 10, 20)
        >>> unite_ranks({0: [first], 1: []}, {0: 30, 1: 30})
        []
    """
    most = max(lengths.values(), default=0)
    judges = [rank for rank, length in lengths.items() if length >= most / 2]
    shown: dict[EventType, set[int]] = {}
    for rank, found in events.items():
        for event in found:
            shown.setdefault(event.event_type, set()).add(rank)
    kept = {
        kind for kind, ranks in shown.items() if kind in SEEN_BY_ONE or 2 * len(ranks) > len(judges)
    }
    together: dict[tuple[EventType, str | None, str], list[SemanticEvent]] = {}
    for found in events.values():
        for event in found:
            if event.event_type in kept:
                key = (event.event_type, event.layer, event.to_state)
                together.setdefault(key, []).append(event)
    return [event for same in together.values() for event in _united(same)]


def _united(events: Sequence[SemanticEvent]) -> Iterator[SemanticEvent]:
    """Events of one state: those of different ranks whose spans overlap become one."""
    current: SemanticEvent | None = None
    for event in sorted(events, key=lambda event: (event.step_start, event.rank)):
        if current is None or event.step_start > current.step_end:
            if current is not None:
                yield current
            current = event
            continue
        worse = event if event.severity > current.severity else current
        current = replace(
            current,
            step_end=max(current.step_end, event.step_end),
            severity=worse.severity,
            value=worse.value,
            threshold=worse.threshold,
            detail=current.detail or event.detail,
        )
    if current is not None:
        yield current
