"""The first value that is not finite is traced to what made it, with the batch it came in."""

import math

import pytest
import torch
from torch import nn

from neuraldbg import NeuralDbg

F = nn.functional
BAD = 30  # not among the captured steps
STEPS = 34

pytestmark = pytest.mark.filterwarnings("ignore:std\\(\\)")


def train(loss_of, change=None, model=None, micro_batches=1, steps=STEPS):
    """Train a small network, one batch of which is changed; returns the events by type."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with NeuralDbg(model) as dbg:
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(micro_batches):
                x, y = torch.randn(6, 4), torch.randn(6, 3)
                bad = step == BAD and part == micro_batches - 1
                if bad and change is not None:
                    x, y = change(x, y)
                (loss_of(model(x), x, y, bad) / micro_batches).backward()
            optimizer.step()
    assert dbg.faults == []
    events = dbg.events
    return dict(list(events.groupby("event_type", observed=True)))


def first(events, name):
    return events[name].sort_values("step_start").iloc[0]


def masked_mean(out, x, y, bad):
    mask = torch.zeros(6, 3) if bad else (y > 0).float()
    return ((out - y).abs() * mask).sum() / mask.sum()


def selected_mean(out, x, y, bad):
    chosen = torch.zeros(6, dtype=torch.bool) if bad else torch.ones(6, dtype=torch.bool)
    return (out - y)[chosen].pow(2).mean()


def log_of_share(out, x, y, bad):
    share = out.softmax(1)[:, 0]
    return -(share * 0 if bad else share).log().mean()


def distance(out, x, y, bad):
    other = out.detach() if bad else y
    return (out - other).pow(2).sum(1).sqrt().mean()


def log_behind_where(out, x, y, bad):
    positive = out * (out.detach() > 0) if bad else out.exp()
    known = torch.where(positive > 0, positive.log(), torch.zeros_like(positive))
    return known.mean() + out.square().mean()


def ignored(out, x, y, bad):
    return F.cross_entropy(out, torch.full((6,), -100) if bad else y.argmax(1))


def masked_softmax(out, x, y, bad):
    mask = torch.zeros(6, 3, dtype=torch.bool)
    mask[2] = bad
    return (out.masked_fill(mask, -math.inf).softmax(1) * y).sum()


def standardised(out, x, y, bad):
    chosen = out[:1] if bad else out
    return ((chosen - chosen.mean(0)) / (chosen.std(0) + 1e-6) + chosen).pow(2).mean()


def weights_of_one(out, x, y, bad):
    worth = y[:1, 0] if bad else y[:, 0]
    worth = (worth - worth.mean()) / (worth.std() + 1e-8)
    return -(worth * out[: len(worth)].log_softmax(1)[:, 0]).mean()


def angle(out, x, y, bad):
    near = torch.ones_like(out) * out.detach().sign() if bad else y.tanh() * 0.5
    return (F.softsign(out) * 0 + near * (1 + 0 * out)).acos().mean()


OPERATIONS = {
    masked_mean: "division by 0",
    selected_mean: "mean of no values",
    log_of_share: "log of 0",
    distance: "derivative of sqrt at 0",
    log_behind_where: "log of 0",
    ignored: "mean over labels that are all ignored",
    masked_softmax: "softmax of a row that is masked entirely",
    standardised: "std of one sample",
    weights_of_one: "factor of one sample that is NaN, computed outside the graph",
    angle: "derivative of acos at 1",
}


@pytest.mark.parametrize("loss_of", OPERATIONS, ids=lambda f: f.__name__)
def test_an_undefined_operation_is_named_with_its_batch(loss_of):
    events = train(loss_of)
    event = first(events, "operation_undefined")
    assert event["step_start"] == BAD
    assert event["detail"] == f"{OPERATIONS[loss_of]}, batch {BAD}"
    assert "input_non_finite" not in events
    assert "target_non_finite" not in events


@pytest.mark.parametrize("loss_of", OPERATIONS, ids=lambda f: f.__name__)
def test_the_same_losses_without_the_bad_batch_give_no_event(loss_of):
    events = train(lambda out, x, y, _: loss_of(out, x, y, False))
    assert not [name for name in events if "non_finite" in name or name == "operation_undefined"]


@pytest.mark.parametrize("loss_of", [distance, log_behind_where], ids=lambda f: f.__name__)
def test_a_gradient_that_breaks_while_the_loss_is_finite_comes_first(loss_of):
    events = train(loss_of)
    gradient = first(events, "gradient_non_finite")
    assert gradient["step_start"] == BAD
    assert gradient["detail"] == f"batch {BAD}"
    assert first(events, "loss_non_finite")["step_start"] == BAD + 1


def squared(out, x, y, bad):
    return F.mse_loss(out, y)


def written(out, x, y, bad):
    return ((out - y) ** 2).mean()


def spoil_input(x, y):
    x[2, 1] = math.nan
    return x, y


def spoil_target(x, y):
    y[2, 1] = math.inf
    return x, y


@pytest.mark.parametrize("loss_of", [squared, written], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("change", "name"), [(spoil_input, "input_non_finite"), (spoil_target, "target_non_finite")]
)
def test_a_broken_batch_is_named(loss_of, change, name):
    events = train(loss_of, change)
    event = first(events, name)
    assert event["step_start"] == BAD
    assert event["detail"] == f"batch {BAD}"
    other = {"input_non_finite", "target_non_finite"} - {name}
    assert not other & set(events)
    assert "operation_undefined" not in events


def test_batches_are_counted_one_by_one_when_gradients_accumulate():
    events = train(squared, spoil_input, micro_batches=3)
    event = first(events, "input_non_finite")
    assert event["step_start"] == BAD
    assert event["detail"] == f"batch {3 * BAD + 2}"


class Halved(torch.autograd.Function):
    """The identity, whose gradient passes through half precision and overflows there."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient.half().float()


@pytest.mark.parametrize(("offset", "told"), [(None, False), (0.0, True)])
def test_gradients_that_overflow_under_a_loss_scale_are_left_to_the_scaler(offset, told):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NeuralDbg(model) as dbg:
        for step in range(6):
            optimizer.zero_grad()
            loss = Halved.apply(model(torch.randn(6, 4))).square().mean()
            loss = loss * torch.tensor(2.0**24 if step > 2 else 1.0)
            (loss if offset is None else loss + offset).backward()  # a scaler multiplies last
            broken = not model.weight.grad.isfinite().all()
            assert broken == (step > 2)
            if not broken:
                optimizer.step()
    assert dbg.faults == []
    assert ("gradient_non_finite" in set(dbg.events["event_type"])) is told


class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.second(self.first(x))
        return self.third(hidden * float("inf") if x[0, 0] == 7 else hidden)


def test_the_layer_before_the_first_broken_input_is_named():
    def mark(x, y):
        x[0, 0] = 7
        return x, y

    events = train(squared, mark, model=Overflowing())
    event = first(events, "activation_non_finite")
    assert (event["layer"], event["step_start"]) == ("second", BAD)
    assert event["detail"] == f"batch {BAD}"
