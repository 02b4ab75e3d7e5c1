"""Each failure mode is found in networks of several kinds, and not in their healthy twins.

On data other than the demo's; seeds other than those looked at when the parameters were set.
"""

from functools import cache

import pytest

from neuraldbg import EventType, FailureMode
from neuraldbg.evaluation.faults import FAULTS
from neuraldbg.evaluation.healthy_recipes import HEALTHY_RECIPES
from neuraldbg.evaluation.watched import WatchedRun, watch

SEED = 7

# For each mode two programs that it harms: a plain one, and one that is convolutional, recurrent
# or a transformer.
PROGRAMS = {
    FailureMode.LR_BLOWUP: ("mlp-spirals-adam", "cnn-textures-adam"),
    FailureMode.LR_TOO_LOW: ("mlp-breast_cancer-adam", "cnn-textures-adam"),
    FailureMode.INIT_COLLAPSE: ("deep_mlp-tanh-breast_cancer-momentum", "deep_cnn-textures-adam"),
    FailureMode.INIT_BLOWUP: ("mlp-diabetes-adam", "cnn-tanh-textures-rmsprop"),
    FailureMode.SYMMETRIC_INIT: ("mlp-breast_cancer-adam", "cnn-textures-adam"),
    FailureMode.DEAD_RELU: ("mlp-spirals-adam", "cnn-textures-adam"),
    FailureMode.SATURATED_ACTIVATION: (
        "deep_mlp-tanh-breast_cancer-momentum",
        "rnn-gestures-rmsprop",
    ),
    FailureMode.VANISHING_DEPTH: (
        "deep_mlp-tanh-breast_cancer-momentum",
        "deep_cnn-textures-adam",
    ),
    FailureMode.UNNORMALISED_INPUT: ("mlp-diabetes-adam", "rnn-gestures-rmsprop"),
    FailureMode.NAN_INPUT: ("mlp-gelu-wine-sgd", "gru-gestures-adamw"),
    FailureMode.MISSING_ZERO_GRAD: ("mlp-spirals-adam", "transformer-tokens-adamw"),
    FailureMode.PARAM_NOT_IN_OPTIMIZER: ("mlp-diabetes-adam", "gru-tokens-adam"),
}
CASES = [(mode, program) for mode, programs in PROGRAMS.items() for program in programs]
USED = sorted({program for programs in PROGRAMS.values() for program in programs})


@cache
def run(program: str, mode: FailureMode | None) -> WatchedRun:
    recipe = HEALTHY_RECIPES[program]
    watched = watch(FAULTS[mode].inject(recipe) if mode else recipe, SEED)
    assert watched.debugger.faults == []
    return watched


@pytest.mark.parametrize(("mode", "program"), CASES, ids=str)
def test_the_cause_comes_first(mode: FailureMode, program: str) -> None:
    first = run(program, mode).explanations[0]
    assert first.cause is mode
    assert first.probability > 0.4
    assert first.step is not None
    assert first.evidence
    assert first.chain
    assert first.remedy


@pytest.mark.parametrize("program", USED)
def test_the_healthy_twin_is_called_healthy(program: str) -> None:
    explanations = run(program, None).explanations
    assert explanations[0].cause is FailureMode.HEALTHY
    assert explanations[0].probability > 0.8
    assert explanations.root_causes() == []


def test_every_mode_is_tested_on_two_kinds_of_architecture_and_none_on_the_demo_s_data() -> None:
    assert set(PROGRAMS) == set(FAULTS)
    for programs in PROGRAMS.values():
        recipes = [HEALTHY_RECIPES[program] for program in programs]
        assert len({recipe.architecture for recipe in recipes}) == 2
        assert any("mlp" not in recipe.architecture for recipe in recipes)
        assert all("digits" not in recipe.dataset for recipe in recipes)


@pytest.mark.parametrize("program", ["mlp-spirals-adam", "cnn-textures-adam"])
def test_units_that_die_of_large_updates_are_blamed_on_the_learning_rate(program: str) -> None:
    watched = run(program, FailureMode.LR_BLOWUP)
    dead = watched.debugger.events.query("event_type == 'activation_dead'")
    assert len(dead)
    assert dead["step_start"].min() > 0
    explanations = watched.explanations
    assert explanations.of("lr_blowup").probability > 0.9
    assert explanations.of("lr_blowup").probability > 2 * explanations.of("dead_relu").probability


@pytest.mark.parametrize("program", ["mlp-spirals-adam", "cnn-textures-adam"])
def test_units_that_are_dead_before_any_update_are_the_cause_themselves(program: str) -> None:
    watched = run(program, FailureMode.DEAD_RELU)
    dead = watched.debugger.events.query("event_type == 'activation_dead'")
    assert dead["step_start"].min() == 0
    explanations = watched.explanations
    assert explanations.of("dead_relu").probability > 0.5
    assert explanations.of("dead_relu").probability > 5 * explanations.of("lr_blowup").probability


def test_the_large_update_stands_before_the_dead_units_in_the_chain() -> None:
    debugger = run("cnn-textures-adam", FailureMode.LR_BLOWUP).debugger
    chain = [event.event_type for event in debugger.trace_causal_chain("activation_dead")]
    assert chain.index(EventType.UPDATE_TOO_LARGE) < chain.index(EventType.ACTIVATION_DEAD)
    assert chain[-1] is EventType.ACTIVATION_DEAD


def test_where_it_began_is_told() -> None:
    nan = run("mlp-gelu-wine-sgd", FailureMode.NAN_INPUT).explanations[0]
    assert nan.step == HEALTHY_RECIPES["mlp-gelu-wine-sgd"].steps // 3
    assert f"step {nan.step}" in nan.remedy
    left_out = run("mlp-diabetes-adam", FailureMode.PARAM_NOT_IN_OPTIMIZER)
    layers = {event.layer for event in left_out.explanations[0].evidence}
    held = left_out.debugger.series.query("kind == 'parameter' and in_optimizer == 1")["layer"]
    assert layers
    assert layers.isdisjoint(set(held))
    causes = left_out.debugger.get_root_causes()
    assert causes[0].cause is FailureMode.PARAM_NOT_IN_OPTIMIZER
    assert causes[0].layer in layers
