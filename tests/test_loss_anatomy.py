"""The kind of a loss and what an untrained model should score on it, read from its graph."""

import math

import pytest
import torch
from torch import nn

from neuraldbg.capture.loss_anatomy import find_functional_activations, read_loss_head

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
    loss, kind, expected = CASES[case]
    anatomy = read_loss_head(loss())
    assert anatomy.kind == kind
    assert anatomy.expected == pytest.approx(expected, rel=5e-3 if "half" in case else 1e-6)
    assert anatomy.target is not None


def test_an_absolute_loss_is_known_or_left_open():
    # The graph of this loss keeps the difference only or both operands, by release of PyTorch.
    anatomy = read_loss_head(F.l1_loss(predictions(), TARGET))
    assert anatomy.kind in (None, "absolute")
    if anatomy.kind:
        assert anatomy.expected == pytest.approx(MAGNITUDE)


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
    loss, kind, expected = CASES[case]
    apply, factor = SCALED[scale]
    anatomy = read_loss_head(apply(loss()))
    assert anatomy.kind == kind
    assert anatomy.expected == pytest.approx(factor * expected, rel=1e-5)


def test_a_learned_weight_makes_the_expected_value_unknown():
    weight = torch.ones((), requires_grad=True)
    anatomy = read_loss_head(weight * F.mse_loss(predictions(), TARGET))
    assert math.isnan(anatomy.expected)


CUSTOM = {
    "written_out": lambda: (predictions() - TARGET).pow(2).mean(),
    "sum_of_two": lambda: F.mse_loss(predictions(), TARGET) + F.cross_entropy(logits(), LABELS),
    "maximum": lambda: torch.maximum(predictions().sum(), predictions().mean()),
    "exponential": lambda: F.mse_loss(predictions(), TARGET).exp(),
    "squared_again": lambda: F.mse_loss(predictions(), TARGET) ** 2,
    "kl": lambda: F.kl_div(
        logits().log_softmax(1), torch.full((8, 7), 1 / 7), reduction="batchmean"
    ),
    "entropy": lambda: -(logits().softmax(1) * logits().log_softmax(1)).sum(1).mean(),
    "parameter_itself": lambda: torch.zeros((), requires_grad=True),
    "no_graph": lambda: torch.zeros(()),
}


@pytest.mark.parametrize("case", CUSTOM)
def test_unknown_losses_are_left_open(case):
    anatomy = read_loss_head(CUSTOM[case]())
    assert anatomy.kind is None
    assert math.isnan(anatomy.expected)
    assert anatomy.target is None


def test_the_target_is_the_one_given():
    assert torch.equal(read_loss_head(F.mse_loss(predictions(), TARGET)).target, TARGET)
    assert torch.equal(read_loss_head(F.cross_entropy(logits(), LABELS)).target, LABELS)


def test_a_target_that_is_not_finite():
    broken = TARGET.clone()
    broken[0, 0] = math.nan
    assert math.isnan(read_loss_head(F.mse_loss(predictions(), broken)).expected)


def test_reading_does_not_consume_the_graph():
    inputs = predictions()
    inputs.retain_grad()
    loss = F.mse_loss(inputs, TARGET)
    read_loss_head(loss)
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
    assert visited <= 4_100
