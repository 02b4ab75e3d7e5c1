"""Remedies: the catalogue's, made definite by the numbers of the run."""

import math

import pytest

from neuraldbg import EventType, FailureMode, SemanticEvent
from neuraldbg.failure_modes import catalogue
from neuraldbg.remedies import remedy_for


def event(
    kind: EventType, value: float = 1.0, layer: str | None = None, index: int = -1, step: int = 0
) -> SemanticEvent:
    return SemanticEvent(0, kind, layer, index, step, step + 9, "a", "b", 1.0, value, 0.1)


@pytest.mark.parametrize("mode", FailureMode)
def test_without_evidence_the_catalogue_speaks(mode: FailureMode) -> None:
    assert remedy_for(mode, []) == catalogue()[mode].remedy


@pytest.mark.parametrize("mode", FailureMode)
def test_events_of_another_kind_change_nothing(mode: FailureMode) -> None:
    assert remedy_for(mode, [event(EventType.CAPTURE_FAULT)]) == catalogue()[mode].remedy


@pytest.mark.parametrize(
    ("update", "factor"),
    [(1e-3, 2), (0.12, 3), (0.9, 20), (4.1, 100), (1e6, 1000), (math.inf, 1000)],
)
def test_the_rate_is_lowered_by_what_the_first_updates_exceed(update: float, factor: int) -> None:
    remedy = remedy_for(FailureMode.LR_BLOWUP, [event(EventType.UPDATE_TOO_LARGE, update)])
    assert f" {factor}-fold" in remedy


def test_later_updates_do_not_count() -> None:
    first = event(EventType.UPDATE_TOO_LARGE, 0.4, "fc", 0, step=3)
    later = event(EventType.UPDATE_TOO_LARGE, 40.0, "head", 1, step=4)
    assert " 10-fold" in remedy_for(FailureMode.LR_BLOWUP, [later, first])


@pytest.mark.parametrize(("update", "factor"), [(1e-4, 30), (1e-9, 1000), (1.0, 2)])
def test_the_rate_is_raised_by_what_updates_lack(update: float, factor: int) -> None:
    remedy = remedy_for(FailureMode.LR_TOO_LOW, [event(EventType.UPDATE_TOO_SMALL, update)])
    assert f" {factor}-fold" in remedy


def test_updates_of_zero_tell_no_factor() -> None:
    remedy = remedy_for(FailureMode.LR_TOO_LOW, [event(EventType.UPDATE_TOO_SMALL, 0.0)])
    assert remedy == catalogue()[FailureMode.LR_TOO_LOW].remedy


def test_layers_without_an_optimizer_are_named_in_the_order_of_flow() -> None:
    missing = [event(EventType.UPDATE_MISSING, layer=f"layer{k}", index=k) for k in (3, 0, 2, 1)]
    remedy = remedy_for(FailureMode.PARAM_NOT_IN_OPTIMIZER, missing)
    assert "layer0, layer1 and 2 more" in remedy
    assert "layer0:" in remedy_for(FailureMode.PARAM_NOT_IN_OPTIMIZER, missing[1:2])


def test_the_first_bad_batch_is_named() -> None:
    bad = [
        event(EventType.INPUT_NON_FINITE, step=12),
        event(EventType.TARGET_NON_FINITE, step=7),
        event(EventType.LOSS_NON_FINITE, step=2),
    ]
    assert "step 7 " in remedy_for(FailureMode.NAN_INPUT, bad)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (FailureMode.INIT_BLOWUP, EventType.WEIGHTS_LARGE_AT_START),
        (FailureMode.INIT_COLLAPSE, EventType.WEIGHTS_SMALL_AT_START),
    ],
)
def test_layers_to_initialise_anew_are_named(mode: FailureMode, kind: EventType) -> None:
    assert remedy_for(mode, [event(kind, layer="fc", index=0)]).endswith(" in fc")
