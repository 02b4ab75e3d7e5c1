"""Modules may return anything, be shared, or apply their activations by functions."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from neuraldbg import NeuralDbg

F = nn.functional
STEPS = 20


def watch(model, inputs, loss_of, steps=STEPS, lr=0.01):
    """Train on fresh batches and give back the closed NeuralDbg."""
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    with NeuralDbg(model) as dbg:
        for _ in range(steps):
            opt.zero_grad()
            loss_of(model(inputs())).backward()
            opt.step()
    assert dbg.faults == []
    assert rows(dbg, "loss")["step"].tolist() == list(range(steps))
    return dbg


def rows(dbg, kind):
    return dbg.series[dbg.series["kind"] == kind]


def outputs_of(dbg, layer):
    found = rows(dbg, "output")
    return found[found["layer"] == layer]


class Pair(NamedTuple):
    count: int
    hidden: Tensor


@dataclass
class Record:
    label: str
    hidden: Tensor


class Holder:
    """As the output classes of model libraries are: attributes, neither tuple nor dict."""

    def __init__(self, hidden: Tensor) -> None:
        self.note = None
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


WRAPPERS = {
    "tuple": (lambda h: (h, None), lambda o: o[0]),
    "late_in_a_tuple": (lambda h: (None, 3, "x", torch.arange(3), h), lambda o: o[-1]),
    "list": (lambda h: [h, h * 2], lambda o: o[0]),
    "dict": (lambda h: {"mask": None, "hidden": h}, lambda o: o["hidden"]),
    "nested": (lambda h: {"a": [(h,)]}, lambda o: o["a"][0][0]),
    "named_tuple": (lambda h: Pair(3, h), lambda o: o.hidden),
    "dataclass": (lambda h: Record("x", h), lambda o: o.hidden),
    "object": (Holder, lambda o: o.hidden),
}


class Wrapping(nn.Module):
    """A layer with a parameter of its own that returns its output wrapped."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4) / 2)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x @ self.weight.T)


class Model(nn.Module):
    def __init__(self, wrap, unwrap) -> None:
        super().__init__()
        self.inner, self.head, self.unwrap = Wrapping(wrap), nn.Linear(6, 1), unwrap

    def forward(self, x):
        return self.head(self.unwrap(self.inner(x)))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_outputs_of_any_type(kind):
    torch.manual_seed(0)
    dbg = watch(Model(*WRAPPERS[kind]), lambda: torch.randn(16, 4), lambda o: o.square().mean())
    seen = outputs_of(dbg, "inner")
    assert seen["step"].tolist() == list(range(STEPS))
    assert (seen["rms"] > 0).all()
    order = rows(dbg, "output").groupby("layer", observed=True)["layer_index"].first()
    assert order["inner"] < order["head"]


OPAQUE = {
    "none": (lambda _: None, lambda _: torch.ones(16, 6)),
    "slots": (Slotted, lambda o: o.hidden),
    "too_deep": (lambda h: [[[[[h]]]]], lambda o: o[0][0][0][0][0]),
    "integers": (lambda _: torch.arange(3), lambda _: torch.ones(16, 6)),
    "empty": (lambda _: (), lambda _: torch.ones(16, 6)),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_outputs_that_cannot_be_read_do_no_harm(kind):
    dbg = watch(Model(*OPAQUE[kind]), lambda: torch.randn(16, 4), lambda o: o.square().mean())
    assert outputs_of(dbg, "inner").empty
    assert len(outputs_of(dbg, "head")) == STEPS


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (1, 1, 1, 1, 1, 1)])
def test_outputs_of_odd_shapes(shape):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.act = nn.Parameter(torch.ones(())), nn.Tanh()

        def forward(self, x):
            return self.act(x * self.scale)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Odd()

        def forward(self, x):
            return self.inner(x)

    watch(Outer(), lambda: torch.randn(shape), lambda o: o.sum())


class Recurrent(nn.Module):
    def __init__(self, kind, packed=False) -> None:
        super().__init__()
        self.cell = kind(3, 5, batch_first=True)
        self.head = nn.Linear(5, 1)
        self.packed = packed

    def forward(self, x):
        if self.packed:
            lengths = torch.tensor([7, 4, 2, 1])
            out, _ = self.cell(pack_padded_sequence(x, lengths, batch_first=True))
            out, _ = pad_packed_sequence(out, batch_first=True)
        else:
            out, _ = self.cell(x)
        return self.head(out)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_states_and_packed_sequences(kind, packed):
    torch.manual_seed(0)
    dbg = watch(Recurrent(kind, packed), lambda: torch.randn(4, 7, 3), lambda o: o.square().mean())
    seen = outputs_of(dbg, "cell")
    assert len(seen) == STEPS
    assert seen["saturated_fraction"].notna().all()
    inputs = rows(dbg, "input")
    assert set(inputs[inputs["target"] == 0]["layer"]) == {"cell"}


def test_a_recurrent_cell_called_many_times_a_step():
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(3, 5), nn.Linear(5, 1)

        def forward(self, x):
            state = None
            for column in x.unbind(1):
                state = self.cell(column, state)
            return self.head(state[0])

    dbg = watch(Unrolled(), lambda: torch.randn(4, 7, 3), lambda o: o.square().mean())
    assert len(outputs_of(dbg, "cell")) == STEPS


def test_a_shared_module_is_one_layer():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.ReLU(), nn.Linear(4, 1))
    dbg = watch(model, lambda: torch.randn(16, 4), lambda o: o.square().mean())
    assert set(rows(dbg, "output")["layer"]) == {"0", "1", "3", "4"}
    assert len(outputs_of(dbg, "0")) == STEPS
    assert set(rows(dbg, "parameter")["layer"]) == {"0", "4"}


def test_a_parameter_of_the_outermost_module():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc = nn.Parameter(torch.ones(1)), nn.Linear(4, 1)

        def forward(self, x):
            return self.fc(x) * self.scale

    dbg = watch(Scaled(), lambda: torch.randn(16, 4), lambda o: o.square().mean())
    assert set(rows(dbg, "parameter")["layer"]) == {"scale", "fc"}
    assert (rows(dbg, "gradient")["norm"] > 0).all()


def test_layers_registered_in_another_order_than_called():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    dbg = watch(Backwards(), lambda: torch.randn(8, 4), lambda o: o.square().mean())
    order = rows(dbg, "output").sort_values("layer_index")["layer"].unique().tolist()
    assert order == ["first", "middle", "last"]


class Functional(nn.Module):
    def __init__(self, function, shift=0.0) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.function = function
        nn.init.constant_(self.second.bias, shift)

    def forward(self, x):
        return self.head(self.function(self.second(self.function(self.first(x)))))


RELUS = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "method": lambda x: x.relu(),
    "in_place": lambda x: F.relu(x, inplace=True),
    "after_dropout": lambda x: F.relu(F.dropout(x, 0.0)),
}


@pytest.mark.parametrize("function", RELUS)
def test_dead_units_behind_a_functional_relu(function):
    torch.manual_seed(0)
    model = Functional(RELUS[function], shift=-100.0)
    dbg = watch(model, lambda: torch.randn(64, 4), lambda o: (o - 1).square().mean())
    events = dbg.events
    dead = events[events["event_type"] == "activation_dead"]
    assert dead["layer"].tolist() == ["second"]
    assert dead["step_start"].tolist() == [0]
    assert (outputs_of(dbg, "second")["silent_fraction"] == 1).any()
    assert outputs_of(dbg, "head")["silent_fraction"].isna().all()


@pytest.mark.parametrize("function", RELUS)
def test_a_healthy_functional_relu_is_not_dead(function):
    torch.manual_seed(0)
    model = Functional(RELUS[function])
    dbg = watch(model, lambda: torch.randn(64, 4), lambda o: (o - 1).square().mean())
    assert "activation_dead" not in set(dbg.events["event_type"])
    silent = outputs_of(dbg, "second")["silent_fraction"].dropna()
    assert len(silent)
    assert (silent < 0.7).all()


@pytest.mark.parametrize(
    "function", [torch.tanh, torch.sigmoid, F.tanh], ids=["tanh", "sigmoid", "F.tanh"]
)
def test_a_functional_bounded_activation_that_saturates(function):
    torch.manual_seed(0)
    model = Functional(function)
    nn.init.normal_(model.first.weight, std=50.0)
    dbg = watch(model, lambda: torch.randn(64, 4), lambda o: o.square().mean())
    first, second = (outputs_of(dbg, name)["saturated_fraction"] for name in ("first", "second"))
    assert (first.dropna() > 0.8).all()
    assert (second.dropna() < 0.2).all()
    saturated = dbg.events[dbg.events["event_type"] == "activation_saturated"]
    assert saturated["layer"].tolist() == ["first"]


def test_a_functional_relu_behind_a_convolution_counts_channels():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 1)
            with torch.no_grad():
                self.conv.bias[:3] = -100.0

        def forward(self, x):
            return self.head(F.relu(self.conv(x)).mean((2, 3)))

    torch.manual_seed(0)
    dbg = watch(Net(), lambda: torch.randn(8, 1, 6, 6), lambda o: o.square().mean())
    silent = outputs_of(dbg, "conv")["silent_fraction"].dropna()
    np.testing.assert_allclose(silent, 0.75)


def test_values_of_the_series_are_those_of_the_tensors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with NeuralDbg(model) as dbg:
        for step in range(3):
            x = torch.randn(16, 4)
            opt.zero_grad()
            hidden = model[1](model[0](x))
            model[2](hidden).square().mean().backward()
            before = model[0].weight.detach().clone()
            gradients = [p.grad.clone() for p in model[0].parameters()]
            opt.step()
            if step == 2:
                change = (model[0].weight - before).square().mean().sqrt()
                norm = torch.cat([g.flatten() for g in gradients]).norm()
    assert dbg.faults == []
    last = dbg.series[dbg.series["step"] == 2].set_index(["kind", "layer"])
    relu, entry = last.loc[("output", "1")], last.loc[("input", "0")]
    expected = {
        "mean": hidden.mean(),
        "std": hidden.std(correction=0),
        "rms": hidden.square().mean().sqrt(),
        "max_abs": hidden.abs().max(),
        "zero_fraction": (hidden == 0).float().mean(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(relu[name], value.item(), rtol=1e-5)
    np.testing.assert_allclose(entry["rms"], x.square().mean().sqrt().item(), rtol=1e-5)
    np.testing.assert_allclose(last.loc[("gradient", "0")]["norm"], norm.item(), rtol=1e-5)
    weight = last.loc[("parameter", "0")]
    np.testing.assert_allclose(weight["rms"], before.square().mean().sqrt().item(), rtol=1e-5)
    np.testing.assert_allclose(weight["gain"], 2 * weight["rms"], rtol=1e-5)
    np.testing.assert_allclose(last.loc[("update", "0")]["rms"], change.item(), rtol=1e-4)
