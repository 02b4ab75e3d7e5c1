"""The kind of a loss and what an untrained model should score on it, read from its graph."""

import math

import pytest
import torch
from torch import nn

from neuraldbg.capture.functional_activations import find_functional_activations
from neuraldbg.capture.graph_walk import MAX_NODES
from neuraldbg.capture.loss_head import LossTerm, read_loss_terms

F = nn.functional
LABELS = torch.tensor([0, 1, 2, 6, 3, 3, 2, 0])
TARGET = torch.tensor([[1.0, -2.0], [0.5, 3.0], [0.0, 1.0]])
BINARY = (TARGET > 0.7).float()


def outputs(*shape):
    return torch.zeros(*shape, requires_grad=True)


def logits():
    return outputs(8, 7)


def predictions():
    return outputs(3, 2) * 1.0


def single(loss) -> LossTerm:
    [term] = read_loss_terms(loss)
    return term


def expected(loss) -> float:
    term = single(loss)
    return term.expectation.value(None if term.target is None else term.target.float().numpy())


SQUARE = TARGET.square().mean().item()
MAGNITUDE = TARGET.abs().mean().item()
CASES = {
    "cross_entropy": (lambda: F.cross_entropy(logits(), LABELS), "classes", math.log(7)),
    "cross_entropy_sum": (
        lambda: F.cross_entropy(logits(), LABELS, reduction="none").mean(), "classes", math.log(7),
    ),
    "cross_entropy_images": (
        lambda: F.cross_entropy(outputs(2, 5, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)),
        "classes", math.log(5),
    ),
    "cross_entropy_sequence": (
        lambda: F.cross_entropy(outputs(2, 11, 6), torch.zeros(2, 6, dtype=torch.long)),
        "classes", math.log(11),
    ),
    "cross_entropy_flattened": (
        lambda: F.cross_entropy(
            outputs(2, 6, 11).flatten(0, 1), torch.zeros(12, dtype=torch.long)
        ),
        "classes", math.log(11),
    ),
    "cross_entropy_single": (
        lambda: F.cross_entropy(outputs(9), torch.tensor(3)), "classes", math.log(9),
    ),
    "cross_entropy_module": (
        lambda: nn.CrossEntropyLoss()(logits(), LABELS), "classes", math.log(7),
    ),
    "nll": (lambda: F.nll_loss(logits().log_softmax(1), LABELS), "classes", math.log(7)),
    "mse": (lambda: F.mse_loss(predictions(), TARGET), "squared", SQUARE),
    "mse_module": (lambda: nn.MSELoss()(predictions(), TARGET), "squared", SQUARE),
    "smooth_l1": (lambda: F.smooth_l1_loss(predictions(), TARGET), "absolute", MAGNITUDE),
    "huber": (lambda: F.huber_loss(predictions(), TARGET), "absolute", MAGNITUDE),
    "bce_with_logits": (
        lambda: F.binary_cross_entropy_with_logits(predictions(), BINARY), "binary", math.log(2),
    ),
    "bce": (
        lambda: F.binary_cross_entropy(predictions().sigmoid(), BINARY), "binary", math.log(2),
    ),
    "half_precision": (
        lambda: F.mse_loss(predictions().bfloat16(), TARGET.bfloat16()), "squared", SQUARE,
    ),
    "cast_up": (
        lambda: F.mse_loss(predictions().half(), TARGET.half()).float(), "squared", SQUARE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_known_losses(case):
    make, kind, score = CASES[case]
    loss = make()
    assert single(loss).kind == kind
    assert expected(loss) == pytest.approx(score, rel=5e-3 if "half" in case else 1e-6)
    assert single(loss).target is not None


SUMMED = {
    "cross_entropy": (
        lambda: F.cross_entropy(logits(), LABELS, reduction="sum"), 8 * math.log(7),
    ),
    "mse": (lambda: F.mse_loss(predictions(), TARGET, reduction="sum"), 6 * SQUARE),
    "mse_by_hand": (lambda: F.mse_loss(predictions(), TARGET, reduction="none").sum(), 6 * SQUARE),
    "mse_by_sample": (
        lambda: F.mse_loss(predictions(), TARGET, reduction="none").sum(1).mean(), 2 * SQUARE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SUMMED)
def test_a_sum_scores_as_many_times_what_a_mean_scores(case):
    make, score = SUMMED[case]
    loss = make()
    assert expected(loss) == pytest.approx(score, rel=1e-6)
    if "cross" in case:  # an independent reading: all logits are 0
        assert expected(loss) == pytest.approx(loss.item(), rel=1e-6)


SMOOTH = torch.full((8, 7), 0.1 / 6).scatter(1, LABELS[:, None], 0.9)
WRITTEN = {
    "squares": (lambda out: (out - TARGET).pow(2).mean(), "squared"),
    "squares_the_other_way": (lambda out: (TARGET - out).pow(2).mean(), "squared"),
    "product": (lambda out: ((out - TARGET) * (out - TARGET)).mean(), None),
    "magnitudes": (lambda out: (out - TARGET).abs().mean(), "absolute"),
    "l1_loss": (lambda out: F.l1_loss(out, TARGET), "absolute"),
    "root": (lambda out: (out - TARGET).pow(2).mean().sqrt(), "squared"),
    "with_decay": (lambda out: (out - TARGET).pow(2).mean() + 0.1 * out.pow(2).sum(), "squared"),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_the_target_of_a_difference_that_is_written_out(case):
    make, kind = WRITTEN[case]
    output = predictions() + 0.25
    terms = read_loss_terms(make(output), {output.grad_fn: output})
    if kind is None:
        assert terms == []
        return
    [term] = terms
    assert term.kind == kind
    assert torch.allclose(term.target, TARGET)
    assert torch.equal(term.prediction, output)


def test_the_target_is_found_behind_a_squeeze():
    output = outputs(8, 1) + 0.5
    target = torch.arange(8.0)
    [term] = read_loss_terms(((output.squeeze(1) - target) ** 2).mean(), {output.grad_fn: output})
    assert torch.allclose(term.target, target)


WRITTEN_CLASSES = {
    "gathered": lambda z: -z.log_softmax(1).gather(1, LABELS[:, None]).mean(),
    "indexed": lambda z: -z.log_softmax(1)[torch.arange(8), LABELS].mean(),
    "log_of_softmax": lambda z: -torch.log(z.softmax(1)[torch.arange(8), LABELS]).mean(),
    "log_then_index": lambda z: -torch.log(z.softmax(1))[torch.arange(8), LABELS].mean(),
    "soft_labels": lambda z: -(SMOOTH * z.log_softmax(1)).sum(1).mean(),
    "soft_target": lambda z: F.cross_entropy(z, SMOOTH),
}


@pytest.mark.parametrize("case", WRITTEN_CLASSES)
def test_class_losses_that_are_written_out(case):
    loss = WRITTEN_CLASSES[case](logits())
    [term] = read_loss_terms(loss)
    assert (term.kind, term.classes) == ("classes", 7)
    assert term.expectation.value(None) == pytest.approx(loss.item(), rel=1e-5)  # logits are 0
    labels = term.target if term.target.dtype is torch.long else term.target.argmax(1)
    assert labels.flatten().tolist() == LABELS.tolist()


def test_the_actions_of_a_policy_are_no_labels():
    chosen = logits().log_softmax(1).gather(1, LABELS[:, None]).squeeze(1)
    assert read_loss_terms(-(torch.linspace(-1, 1, 8) * chosen).mean()) == []


SCALED = {
    "divided": (lambda loss: loss / 4, 0.25),
    "multiplied": (lambda loss: 0.5 * loss, 0.5),
    "twice": (lambda loss: loss / 4 * 2, 0.5),
    "by_a_tensor": (lambda loss: loss * torch.tensor(0.1), 0.1),
    "as_mean": (lambda loss: loss.mean(), 1.0),
    "as_view": (lambda loss: loss.view(1).squeeze(), 1.0),
    "negative": (lambda loss: -1 * loss, -1.0),
}


@pytest.mark.parametrize("scale", SCALED)
@pytest.mark.parametrize("case", ["cross_entropy", "mse", "smooth_l1", "bce_with_logits"])
def test_scaled_losses(case, scale):
    make, kind, score = CASES[case]
    apply, factor = SCALED[scale]
    loss = apply(make())
    assert single(loss).kind == kind
    assert expected(loss) == pytest.approx(factor * score, rel=1e-5)


def test_a_learned_weight_makes_the_expected_value_unknown():
    weight = torch.ones((), requires_grad=True)
    assert read_loss_terms(weight * F.mse_loss(predictions(), TARGET)) == [] or math.isnan(
        expected(weight * F.mse_loss(predictions(), TARGET))
    )


def test_of_a_sum_the_terms_are_known_and_what_it_should_score_is_not():
    loss = F.mse_loss(predictions(), TARGET) + F.cross_entropy(logits(), LABELS)
    terms = read_loss_terms(loss)
    assert sorted(term.kind for term in terms) == ["classes", "squared"]
    assert all(math.isnan(term.expectation.value(TARGET.numpy())) for term in terms)


CUSTOM = {
    "maximum": lambda: torch.maximum(predictions().sum(), predictions().mean()),
    "exponential": lambda: F.mse_loss(predictions(), TARGET).exp(),
    "squared_again": lambda: F.mse_loss(predictions(), TARGET) ** 2,
    "entropy": lambda: -(logits().softmax(1) * logits().log_softmax(1)).sum(1).mean(),
    "two_outputs": lambda: (predictions() - predictions()).pow(2).mean(),
    "parameter_itself": lambda: torch.zeros((), requires_grad=True),
    "no_graph": lambda: torch.zeros(()),
}


@pytest.mark.parametrize("case", CUSTOM)
def test_unknown_losses_are_left_open(case):
    assert read_loss_terms(CUSTOM[case]()) == []


def test_the_target_is_the_one_given():
    assert torch.equal(single(F.mse_loss(predictions(), TARGET)).target, TARGET)
    assert torch.equal(single(F.cross_entropy(logits(), LABELS)).target, LABELS)


def test_a_target_that_is_not_finite():
    broken = TARGET.clone()
    broken[0, 0] = math.nan
    assert math.isnan(expected(F.mse_loss(predictions(), broken)))


def test_reading_does_not_consume_the_graph():
    inputs = predictions()
    inputs.retain_grad()
    loss = F.mse_loss(inputs, TARGET)
    read_loss_terms(loss)
    find_functional_activations(loss, {})
    loss.backward()
    assert torch.allclose(inputs.grad, -2 * TARGET / TARGET.numel())


def test_functional_activations_are_attributed_to_the_layer_before():
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    a = first(torch.ones(5, 3))
    b = second(torch.relu(a))
    loss = torch.tanh(b).sum()
    found, visited = find_functional_activations(loss, {a.grad_fn: "a", b.grad_fn: "b"})
    assert [(f.owner, f.bounds) for f in found] == [("b", (-1.0, 1.0)), ("a", None)]
    assert torch.equal(found[1].result, torch.relu(a))
    assert visited > 4


def test_activations_of_watched_modules_are_not_counted_again():
    a = nn.Linear(3, 4)(torch.ones(5, 3))
    b = torch.relu(a)
    found, _ = find_functional_activations(b.sum(), {a.grad_fn: "fc", b.grad_fn: "relu"})
    assert found == []


def test_an_activation_without_a_layer_before_it_is_left_out():
    found, _ = find_functional_activations(torch.relu(outputs(3) * 2).sum(), {})
    assert found == []


def test_the_walk_of_a_deep_graph_ends():
    value = outputs(2)
    for _ in range(10_000):
        value = value + 1
    _, visited = find_functional_activations(value.sum(), {})
    assert visited <= MAX_NODES + 1
