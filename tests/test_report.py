"""The report: a table that fits a terminal, and what it says."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from neuraldbg import CausalHypothesis, EventType, Explanations, FailureMode, Finding, SemanticEvent
from neuraldbg.failure_modes import catalogue
from neuraldbg.report import to_text

UPDATE = SemanticEvent(
    0, EventType.UPDATE_TOO_LARGE, "[red]x[/red]", 0, 4, 9, "ordinary", "huge", 1.0, 2.5, 0.1
)
FOR = Finding("update_excess", "huge", "single updates replace whole layers", 3.1, 0.97)
AGAINST = Finding("loss_values", "finite", "the loss is finite", -0.4, 0.35)
BLOWUP = CausalHypothesis(
    FailureMode.LR_BLOWUP, 0.93, "[red]x[/red]", 4, (UPDATE,), (AGAINST,), (UPDATE,),
    "lower the learning rate", (FOR,),
)  # fmt: skip
DEAD = CausalHypothesis(FailureMode.DEAD_RELU, 0.6, "relu", 5, (), (), (), "leaky activation")
HEALTHY = CausalHypothesis(FailureMode.HEALTHY, 0.02, None, None, (), (), (), "nothing to change")
EXPLANATIONS = Explanations([BLOWUP, DEAD, HEALTHY], steps=150)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_report_fits_the_terminal(width: int) -> None:
    long = CausalHypothesis(
        FailureMode.SATURATED_ACTIVATION, 0.9, "encoder.layers.11.self_attention.output.dense" * 2,
        10_000, (), (), (), "a remedy of many words " * 10,
    )  # fmt: skip
    lines = to_text(Explanations([long, *EXPLANATIONS], 10**6), width).splitlines()
    assert max(map(len, lines)) <= width


def test_the_report_says_what_where_when_why_and_what_to_do() -> None:
    text = str(EXPLANATIONS)
    for part in (
        "Learning rate too high (probability 93%, after 150 steps)",
        "lr_blowup",
        "[red]x[/red]",
        "lower the learning rate",
        "step 4: one update of [red]x[/red] is 2.5 of its weights",
        "single updates replace whole layers",
        "the loss is finite",
    ):
        assert part in text


def test_explanations_are_a_sequence() -> None:
    assert len(EXPLANATIONS) == 3
    assert EXPLANATIONS[0] is BLOWUP
    assert list(EXPLANATIONS[1:]) == [DEAD, HEALTHY]
    assert EXPLANATIONS.of("dead_relu") is DEAD
    with pytest.raises(KeyError, match=r"overfitting.*lr_blowup, dead_relu, healthy"):
        EXPLANATIONS.of("overfitting")
    assert "nothing to explain" in str(Explanations([], 0))


def test_root_causes_are_the_first_and_all_that_are_likelier_than_not() -> None:
    assert [(c.cause.value, c.layer, c.step) for c in EXPLANATIONS.root_causes()] == [
        ("lr_blowup", "[red]x[/red]", 4),
        ("dead_relu", "relu", 5),
    ]
    assert Explanations([HEALTHY, DEAD], 1).root_causes() == []


def test_explanations_can_be_written_as_json() -> None:
    document = json.loads(json.dumps(EXPLANATIONS.to_dicts()))
    assert document[0]["cause"] == "lr_blowup"
    assert document[0]["chain"][0]["event_type"] == "update_too_large"


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("mode", FailureMode)
def test_every_cause_is_named_in_full_within_the_width(mode: FailureMode, width: int) -> None:
    layer = "encoder.layers.11.self_attention.output.dense"
    one = CausalHypothesis(mode, 0.5, layer, 123_456, (), (), (), catalogue()[mode].remedy)
    text = to_text(Explanations([one], 10**6), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert mode.value in text
    assert "123456" in text
    assert "50%" in text


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.sampled_from([80, 100]))
def test_no_name_of_a_layer_breaks_the_width(name: str, width: int) -> None:
    update = replace(UPDATE, layer=name)
    one = replace(BLOWUP, layer=name, chain=(update,), remedy=name)
    text = to_text(Explanations([one], 10), width)
    assert max(map(cell_len, text.splitlines())) <= width


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "[bold", "x\\", "[link=x]y", ":fire:"])
def test_markup_in_a_name_is_shown_as_it_is(name: str) -> None:
    one = replace(BLOWUP, layer=name, chain=(replace(UPDATE, layer=name),), remedy=f"mend {name}")
    text = to_text(Explanations([one], 10))
    assert text.count(name) == 3  # in its column, in the remedy, in the chain
