"""Replicas that should stay equal and do not, seen across the ranks of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.capture.spans import event_at, ratio_severity
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import Kind
from neuraldbg.thresholds import Thresholds

_COLUMNS = {Kind.PARAMETER: ("rms", "mean", "max_abs"), Kind.GRADIENT: ("norm",)}
_EQUAL_AGAIN = 0.1
"""Share of the threshold below which replicas count as made equal again."""
_FEWEST_STEPS = 2
_CLEARLY = 2.0
"""How much farther than the others a rank must be off its course to be the one that left it."""


def detect_rank_departure(
    ranks: Mapping[int, Panels], thresholds: Thresholds
) -> Iterator[SemanticEvent]:
    """The rank that departs first from the others, where replicas should be equal to the last bit.

    Data-parallel ranks start from the same weights and apply the same averaged gradients.
    Compared are weights, and gradients as the optimizer sees them, at steps that all ranks have
    captured; batches, activations, losses and running statistics differ rightly. Weights decide:
    a difference of gradients only tells when it began. No departure are

    - layers that are equal again in between: averaged from time to time (local SGD),
    - layers that differ from the start, in weights and in gradients, beside others that do not:
      each rank has its own (experts, tensor parallelism).

    With more than two ranks the one farthest from the median is named. Two equally far are told
    apart by their own course; if both left it alike, rank 0 is the one to compare with, as in
    `DistributedDataParallel`, which hands out the weights of rank 0.

    Args:
        ranks: The panels of each rank's view of the run.
        thresholds: `rank_difference`.
    """
    if len(ranks) < 2:
        return
    weights = _Comparison.of(ranks, Kind.PARAMETER)
    gradients = _Comparison.of(ranks, Kind.GRADIENT)
    if len(weights.steps) < _FEWEST_STEPS or not weights.layers:
        return
    limit = thresholds.rank_difference
    departed = _departures(weights, gradients, limit)
    if not departed:
        return
    place = min(departed.values())
    found, position = weights, place
    layers = [layer for layer, start in departed.items() if start == place]
    if place:
        earlier = _first_unequal_gradient(weights, gradients, place, limit)
        if earlier is not None:
            found, position = gradients, earlier
            unequal = gradients.spread[position] > limit
            layers = [layer for layer in range(len(gradients.layers)) if unequal[layer]]
    yield _event(found, position, layers, weights, max(weights.spread[-1]), limit)


@dataclass(frozen=True, slots=True, eq=False)
class _Comparison:
    """The same statistics of all ranks side by side.

    Attributes:
        kind: What is compared.
        panel: Of the first rank.
        ranks: Their numbers.
        steps: Those that all have captured.
        layers: Those that all have, in the order of data flow.
        values: Shape (ranks, steps, layers, columns).
        size: Shape (steps, layers, 1): what a layer's differences are measured by.
        spread: Shape (steps, layers): largest less smallest value relative to the size, 0 where
            any rank is not known.
        constant: Shape (layers,): whether all values of the weight are the same at first.
    """

    kind: Kind
    panel: Panel
    ranks: list[int]
    steps: np.ndarray
    layers: list[str | None]
    values: np.ndarray
    size: np.ndarray
    spread: np.ndarray
    constant: np.ndarray

    @classmethod
    def of(cls, ranks: Mapping[int, Panels], kind: Kind) -> _Comparison:
        panels = {rank: panels.of(kind) for rank, panels in ranks.items()}
        panels = {rank: panel for rank, panel in panels.items() if len(panel)} or panels
        first = next(iter(panels.values()))
        steps = first.steps
        for panel in panels.values():
            steps = np.intersect1d(steps, panel.steps)
        layers = [x for x in first.layers if all(x in panel.layers for panel in panels.values())]
        raw = np.array(
            [
                [_aligned(panel, steps, layers, name) for name in _COLUMNS[kind]]
                for panel in panels.values()
            ]
        )  # ranks, columns, steps, layers
        values = np.moveaxis(raw, 1, -1)
        size = np.median(np.abs(values[..., :1]), axis=0)
        size = np.where(size > 0, size, 1.0)
        spread = np.nan_to_num(np.ptp(values, axis=0) / size).max(axis=-1, initial=0.0)
        constant = np.zeros(len(layers), dtype=bool)
        if kind is Kind.PARAMETER and len(steps):
            constant = _aligned(first, steps[:1], layers, "std")[0] == 0
        return cls(kind, first, list(panels), steps, layers, values, size, spread, constant)


def _aligned(
    panel: Panel, steps: np.ndarray, layers: Sequence[str | None], column: str
) -> np.ndarray:
    places = np.searchsorted(panel.steps, steps)
    columns = np.array([panel.layers.index(layer) for layer in layers], dtype=int)
    return np.asarray(panel[column][np.ix_(places, columns)])


def _departures(weights: _Comparison, gradients: _Comparison, limit: float) -> dict[int, int]:
    """The layers whose weights differ for good, with the position of the first step at which."""
    differ = weights.spread > limit
    equal = weights.spread <= limit * _EQUAL_AGAIN
    own = _rank_owned(weights, gradients, limit)
    found = {}
    for layer in np.flatnonzero(differ[-1] & ~own):
        start = int(np.argmax(differ[:, layer]))
        lasts = len(weights.steps) - start >= _FEWEST_STEPS
        if lasts and not equal[start:, layer].any():
            found[int(layer)] = start
    return found


def _rank_owned(weights: _Comparison, gradients: _Comparison, limit: float) -> np.ndarray:
    """Layers that each rank has for itself, shape (layers,)."""
    differ = weights.spread[0] > limit
    own = np.zeros(len(weights.layers), dtype=bool)
    if differ[~weights.constant].all() or not len(gradients.steps):
        return own
    unequal = dict(zip(gradients.layers, gradients.spread[0] > limit, strict=True))
    return np.array(
        [bool(d) and bool(unequal.get(x)) for d, x in zip(differ, weights.layers, strict=True)]
    )


def _first_unequal_gradient(
    weights: _Comparison, gradients: _Comparison, place: int, limit: float
) -> int | None:
    """Where gradients differed first, after the last step with equal weights."""
    after, until = weights.steps[place - 1], weights.steps[place]
    inside = (gradients.steps >= after) & (gradients.steps < until)
    found = np.flatnonzero(inside & (gradients.spread > limit).any(axis=1))
    return int(found[0]) if len(found) else None


def _departing_rank(found: _Comparison, position: int, layers: Sequence[int]) -> int:
    """The rank that left, at a position at which some layers differ."""
    values = found.values[:, :, layers] / found.size[position, layers]
    now = values[:, position]
    distance = np.nanmean(np.abs(now - np.nanmedian(now, axis=0)), axis=(1, 2))
    candidates = np.flatnonzero(distance >= 0.5 * distance.max())
    if len(candidates) > 1 and position:
        strayed = np.nanmean(np.abs(now - _course(found, values, position)), axis=(1, 2))
        order = candidates[np.argsort(-strayed[candidates], kind="stable")]
        if strayed[order[0]] > _CLEARLY * strayed[order[1]]:
            return found.ranks[int(order[0])]
    # Rank 0 is the one to compare with where nothing else tells.
    others = [c for c in candidates if found.ranks[c] != min(found.ranks)] or list(candidates)
    return found.ranks[int(max(others, key=lambda c: distance[c]))]


def _course(found: _Comparison, values: np.ndarray, position: int) -> np.ndarray:
    """Where each rank would be had it gone on as before: weights drift, gradients stay."""
    before = values[:, position - 1]
    if position < 2 or found.kind is Kind.GRADIENT:
        return np.asarray(before)
    now, last, last_but_one = found.steps[position - 2 : position + 1][::-1]
    pace = (now - last) / (last - last_but_one)
    return np.asarray(before + pace * (before - values[:, position - 2]))


def _event(
    found: _Comparison,
    position: int,
    layers: Sequence[int],
    weights: _Comparison,
    at_the_end: float,
    limit: float,
) -> SemanticEvent:
    """The departure as an event; it names a layer where most others stay equal at first."""
    spread = found.spread[position, layers]
    few = 2 * len(layers) <= len(found.layers)
    place = int(np.searchsorted(found.panel.steps, found.steps[position]))
    event = event_at(
        found.panel,
        EventType.RANKS_DIFFER,
        found.panel.layers.index(found.layers[layers[0]]) if few else None,
        (place, place),
        ("equal", "gradients" if found is not weights else "weights"),
        float(spread.max()),
        limit,
        ratio_severity(max(float(at_the_end), limit), limit),
    )
    rank = _departing_rank(found, position, layers)
    return _of_rank(event, rank, int(weights.steps[-1]))


def _of_rank(event: SemanticEvent, rank: int, last_step: int) -> SemanticEvent:
    what = f"{event.to_state} differ by {event.value:.2g} of their size"
    return replace(event, rank=rank, step_end=last_step, detail=what)
