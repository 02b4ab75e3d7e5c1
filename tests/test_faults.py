"""Recipes, faults and their healthy twins."""

import pickle
from dataclasses import replace
from functools import cache

import pytest
import torch

from neuraldbg.evaluation import (
    ARCHITECTURES,
    DATASETS,
    FAULTS,
    HEALTHY_RECIPES,
    Recipe,
    TwinComparison,
    build,
    compare_with_twin,
    demo_recipe,
    find_fault,
    load_dataset,
    train,
)
from neuraldbg.evaluation.mistakes import HoldLastLayers
from neuraldbg.failure_modes import FailureMode

MLP = Recipe("mlp", "digits", "momentum", 0.02, steps=60)
CNN = Recipe("cnn", "digits_images", "momentum", 0.05, steps=60)
RNN = Recipe("rnn", "digits_rows", "adam", 5e-3, steps=60)
DEEP_MLP = Recipe("deep_mlp", "breast_cancer", "momentum", 0.01, steps=60, activation="tanh")
DEEP_CNN = Recipe("deep_cnn", "digits_images", "momentum", 0.02, steps=60, activation="tanh")
PLACES = {
    FailureMode.SATURATED_ACTIVATION: (replace(MLP, activation="tanh"), RNN),
    FailureMode.VANISHING_DEPTH: (DEEP_MLP, DEEP_CNN),
    FailureMode.DEAD_RELU: (MLP, CNN),
}
PAIRS = [(mode, recipe) for mode in FAULTS for recipe in PLACES.get(mode, (MLP, CNN, RNN))]
TWELVE = [
    "lr_blowup",
    "lr_too_low",
    "init_collapse",
    "init_blowup",
    "symmetric_init",
    "dead_relu",
    "saturated_activation",
    "vanishing_depth",
    "unnormalised_input",
    "nan_input",
    "missing_zero_grad",
    "param_not_in_optimizer",
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def healthy_losses(recipe):
    return tuple(train(build(recipe, seed=0)))


def weights(program):
    return [parameter.detach().clone() for parameter in program.model.parameters()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_twelve_modes_have_faults():
    assert list(FAULTS) == TWELVE


@pytest.mark.parametrize(
    ("mode", "recipe"), PAIRS, ids=lambda value: getattr(value, "architecture", value)
)
def test_a_fault_harms_against_its_twin(mode, recipe):
    faulty = train(build(FAULTS[mode].inject(recipe), seed=0))
    comparison = TwinComparison(healthy=healthy_losses(recipe), faulty=tuple(faulty))
    assert comparison.healthy[-1] < 0.5 * comparison.healthy[0]
    assert comparison.harmed, comparison.lost_progress


def test_the_comparison_trains_both_twins_from_one_seed():
    comparison = compare_with_twin(MLP, "lr_blowup")
    assert comparison.healthy == healthy_losses(MLP)
    assert comparison.faulty[0] == comparison.healthy[0]


@pytest.mark.parametrize("mode", FAULTS)
def test_injection_is_pure_and_travels_to_workers(mode):
    recipe = demo_recipe(mode)
    before = replace(recipe)
    faulty = FAULTS[mode].inject(recipe)
    assert recipe == before
    assert faulty != recipe
    assert FAULTS[mode].inject(recipe) == faulty
    assert pickle.loads(pickle.dumps(faulty)) == faulty


@pytest.mark.parametrize("mode", FAULTS)
def test_severity_changes_the_program(mode):
    fault, recipe = FAULTS[mode], demo_recipe(mode)
    assert fault.inject(recipe, 0.0) != fault.inject(recipe, 1.0)


@pytest.mark.parametrize("mode", FAULTS)
def test_the_demo_shows_every_mode_on_digits(mode):
    recipe = demo_recipe(mode)
    assert recipe.dataset == "digits"
    assert FAULTS[mode].applies(recipe)


@pytest.mark.parametrize("name", HEALTHY_RECIPES)
def test_every_recipe_builds_and_steps(name):
    losses = train(build(replace(HEALTHY_RECIPES[name], steps=2), seed=1))
    assert all(loss == loss for loss in losses)


def test_the_recipes_use_every_architecture_data_set_and_optimizer():
    recipes = HEALTHY_RECIPES.values()
    assert {recipe.architecture for recipe in recipes} == set(ARCHITECTURES)
    assert {recipe.dataset for recipe in recipes} == set(DATASETS)
    assert len({recipe.optimizer for recipe in recipes}) == 5


@pytest.mark.parametrize("architecture", ["cnn_batchnorm", "transformer"])
def test_the_same_seed_gives_the_same_weights(architecture):
    dataset = "digits_images" if architecture == "cnn_batchnorm" else "tokens"
    recipe = Recipe(architecture, dataset, "adam", 1e-3, steps=5)
    torch.manual_seed(11)
    first = build(recipe, seed=3)
    first_losses = train(first)
    torch.manual_seed(12)
    second = build(recipe, seed=3)
    assert train(second) == first_losses
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), weights(build(recipe, seed=4)))


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(build(replace(MLP, steps=2), seed=0))
    assert torch.equal(torch.rand(3), expected)


def test_the_faulty_twin_starts_from_the_same_weights_and_data():
    healthy = build(MLP, seed=0)
    faulty = build(FAULTS[FailureMode.NAN_INPUT].inject(MLP), seed=0)
    assert equal(weights(healthy), weights(faulty))
    differ = [
        step
        for step, (ours, theirs) in enumerate(zip(healthy.batches, faulty.batches, strict=True))
        if not torch.equal(ours[0], theirs[0])
    ]
    assert differ == [MLP.steps // 3]
    poisoned = faulty.batches[differ[0]][0].isnan()
    assert poisoned.any(dim=1).sum() == 1
    assert not any(inputs.isnan().any() for inputs, _ in healthy.batches)


def test_an_optimizer_of_the_head_leaves_the_rest_as_it_was():
    program = build(FAULTS[FailureMode.PARAM_NOT_IN_OPTIMIZER].inject(MLP), seed=0)
    before = weights(program)
    train(program)
    after = weights(program)
    assert equal(before[:-2], after[:-2])
    assert not torch.equal(before[-1], after[-1])
    everything = HoldLastLayers(missed=0.0)(program.model)
    assert len(everything) == len(list(program.model.parameters()))


@pytest.mark.parametrize("name", DATASETS)
def test_data_are_standardised_and_raw_data_are_not(name):
    dataset = load_dataset(name)
    if dataset.shape.kind == "tokens":
        assert dataset.inputs.max() < dataset.shape.size[1]
        return
    assert dataset.inputs.mean().abs() < 1e-3
    assert dataset.inputs.std().sub(1).abs() < 0.02
    assert dataset.raw_inputs.square().mean().sqrt() > 30
    if dataset.task == "regression":
        assert dataset.targets.shape == (len(dataset.inputs), dataset.outputs)


@pytest.mark.parametrize(
    ("change", "choices"),
    [
        ({"architecture": "mlpp"}, "mlp, residual_mlp"),
        ({"dataset": "mnist"}, "digits, digits_images"),
        ({"optimizer": "sdg"}, "sgd, momentum, adam, adamw, rmsprop"),
        ({"activation": "swish"}, "relu, tanh, sigmoid, gelu"),
        ({"architecture": "cnn"}, "image samples, not vector"),
    ],
)
def test_unknown_names_are_answered_with_the_choices(change, choices):
    with pytest.raises(ValueError, match=choices):
        build(replace(MLP, **change), seed=0)


def test_a_mode_without_a_fault_is_answered_with_the_choices():
    for ask in (find_fault, demo_recipe):
        with pytest.raises(ValueError, match=r"no fault for 'overfit'; choose from lr_blowup, "):
            ask("overfit")
    assert find_fault("dead_relu") is FAULTS[FailureMode.DEAD_RELU]


@pytest.mark.parametrize(
    ("mode", "recipe"),
    [
        (FailureMode.DEAD_RELU, RNN),
        (FailureMode.SATURATED_ACTIVATION, MLP),
        (FailureMode.VANISHING_DEPTH, MLP),
        (FailureMode.NAN_INPUT, Recipe("gru", "tokens", "adam", 1e-2)),
    ],
)
def test_a_fault_refuses_a_recipe_it_cannot_harm(mode, recipe):
    with pytest.raises(ValueError, match=f"{mode} does not apply to {recipe.architecture}"):
        FAULTS[mode].inject(recipe)


@pytest.mark.parametrize("severity", [-0.1, float("nan")])
def test_a_severity_below_zero_is_refused(severity):
    with pytest.raises(ValueError, match="must be a number of at least 0"):
        FAULTS[FailureMode.LR_BLOWUP].inject(MLP, severity)
