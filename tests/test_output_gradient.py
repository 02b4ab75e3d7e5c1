"""Gradients of layers' outputs, against those that autograd gives, in loops of every shape."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from neuraldbg import NeuralDbg


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def batches(steps: int, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 8, generator=generator) for _ in range(steps)]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return ((model(x) - x[:, :1]) ** 2).mean()


def train(
    model: nn.Module,
    steps: int = 3,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = square,
    watched: bool = True,
    micro_batches: int = 1,
    rate: float = 0.05,
) -> NeuralDbg:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    debugger = NeuralDbg(model)
    with debugger if watched else torch.enable_grad():
        for x in batches(steps):
            optimizer.zero_grad()
            for part in x.chunk(micro_batches):
                loss_of(model, part).backward()
            optimizer.step()
    return debugger


def rows_of(debugger: NeuralDbg, step: int) -> pd.DataFrame:
    assert debugger.faults == []
    series = debugger.series
    found = series[(series["kind"] == "output_gradient") & (series["step"] == step)]
    return found.set_index(found["layer"].astype(str))


def gradients(model: nn.Module, x: Tensor, names: list[str]) -> dict[str, list[Tensor]]:
    """What autograd gives for all outputs of the named modules, by retaining them."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = []
    for name in names:

        def keep(module: nn.Module, args: object, output: Tensor, name: str = name) -> None:
            outputs[name].append(output)

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    loss = square(model, x)
    flat = [tensor for tensors in outputs.values() for tensor in tensors]
    found = iter(torch.autograd.grad(loss, flat))
    for handle in handles:
        handle.remove()
    return {name: [next(found) for _ in tensors] for name, tensors in outputs.items()}


def assert_row(row: pd.Series, expected: list[Tensor]) -> None:
    values = torch.cat([gradient.flatten() for gradient in expected]).double().numpy()
    assert row["count"] == values.size
    assert row["mean"] == pytest.approx(values.mean(), rel=1e-4, abs=1e-8)
    assert row["std"] == pytest.approx(values.std(), rel=1e-4)
    assert row["rms"] == pytest.approx(np.sqrt((values**2).mean()), rel=1e-4)
    assert row["max_abs"] == pytest.approx(np.abs(values).max(), rel=1e-4)
    assert row["zero_fraction"] == pytest.approx((values == 0).mean())
    assert row["nonfinite_fraction"] == 0


class Twice(nn.Module):
    """A layer called twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class Viewed(nn.Module):
    """A layer whose output is a view that the next operation reads in part."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(x).view(-1, 2, 4).transpose(1, 2)[:, :, 0])


def mlp(inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=inplace), nn.Linear(16, 1))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "plain": (mlp, ["0", "1", "2"]),
    "called twice": (Twice, ["shared", "head"]),
    "views": (Viewed, ["wide", "head"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_statistics_of_what_autograd_gives(name: str) -> None:
    make, names = MODELS[name]
    model = make()
    expected = gradients(model, batches(1)[0], names)
    rows = rows_of(train(model, steps=1), step=0)
    assert set(names) <= set(rows.index)
    for layer in names:
        assert_row(rows.loc[layer], expected[layer])


def test_in_place_activations_leave_the_gradient_of_what_the_layer_returned() -> None:
    model = mlp(inplace=True)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    expected = gradients(plain, batches(1)[0], ["0", "1", "2"])
    rows = rows_of(train(model, steps=1), step=0)
    for layer in ("0", "1", "2"):
        assert_row(rows.loc[layer], expected[layer])
    assert rows.loc["0", "zero_fraction"] > 0.1  # where the rectifier lets nothing through


def test_micro_batches_become_one_row_of_all_their_values() -> None:
    model = mlp()
    debugger = train(model, micro_batches=4, rate=0.0)
    expected = [gradients(model, part, ["0"])["0"][0] for part in batches(3)[2].chunk(4)]
    assert len(expected) == 4
    assert_row(rows_of(debugger, step=2).loc["0"], expected)


@pytest.mark.parametrize("calls", [3, 20])
def test_of_many_calls_the_first_few_are_looked_at(calls: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(calls):
                x = torch.tanh(self.cell(x))
            return self.head(x)

    rows = rows_of(train(Recurrent()), step=2)
    assert rows.loc["cell", "count"] == 16 * 8 * min(calls, 8)


def test_a_loop_without_an_optimizer_is_observed_at_every_step() -> None:
    model = mlp()
    with NeuralDbg(model) as debugger:
        for x in batches(12):
            model.zero_grad()
            square(model, x).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.05 * parameter.grad)
    for step in range(12):
        assert rows_of(debugger, step).loc["0", "count"] == 256, step


def test_what_needs_no_gradient_has_no_row() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.05)
    with NeuralDbg(model) as debugger:
        for x in batches(2):
            optimizer.zero_grad()
            square(model, x).backward()
            optimizer.step()
    assert rows_of(debugger, 1).index.tolist() == ["2"]


def test_a_part_that_the_loss_does_not_depend_on_has_no_row() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)

    assert rows_of(train(Aside()), 1).index.tolist() == ["used"]


def test_a_returned_parameter_keeps_no_hook() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 1))

        def forward(self) -> Tensor:
            return self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table()

    model = Model()
    debugger = train(model)
    assert debugger.faults == []
    assert not model.table.weight._backward_hooks


@pytest.mark.parametrize("name", [*MODELS, "in place"])
def test_training_is_the_same_to_the_last_bit(name: str) -> None:
    def trained(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp(inplace=True) if name == "in place" else MODELS[name][0]()
        train(model, steps=6, watched=watched)
        return list(model.parameters())

    for with_us, without in zip(trained(True), trained(False), strict=True):
        assert torch.equal(with_us, without)


def test_a_penalty_on_gradients_is_unharmed_and_not_counted() -> None:
    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return square(model, x.detach()) + (slope**2).mean()

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    twin = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    twin.load_state_dict(model.state_dict())
    rows = rows_of(train(model, loss_of=penalised), step=2)
    train(twin, loss_of=penalised, watched=False)
    assert torch.equal(model[0].weight, twin[0].weight)
    # The head's output enters the loss once with a gradient; the sum of the penalty's own pass
    # would have a gradient of one everywhere.
    assert rows.loc["2", "max_abs"] < 1.0


def test_checkpointed_parts_are_observed_or_left_alone() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    model, plain = Checkpointed(), nn.Sequential(mlp(), nn.Linear(1, 1))
    plain[0].load_state_dict(model.body.state_dict())
    plain[1].load_state_dict(model.head.state_dict())
    expected = gradients(plain, batches(1)[0], ["0.0", "1"])
    rows = rows_of(train(model, steps=1), step=0)
    assert_row(rows.loc["head"], expected["1"])
    assert_row(rows.loc["body.0"], expected["0.0"])


def test_nothing_of_the_graph_outlives_the_step() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gc.collect()
    gc.disable()  # what only the collector frees was kept too long
    try:
        with NeuralDbg(model):
            for x in batches(3):
                optimizer.zero_grad()
                output = model(x)
                alive = weakref.ref(output)
                (output**2).mean().backward()
                optimizer.step()
                del output
                assert alive() is None
    finally:
        gc.enable()


def test_a_graph_that_outlives_the_step_is_left_without_hooks() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    outputs = []
    with NeuralDbg(model) as debugger:
        for x in batches(3):
            optimizer.zero_grad()
            output = model(x)
            outputs.append(output)
            (output**2).mean().backward(retain_graph=True)
            assert output._backward_hooks  # or this test would hold nothing
            optimizer.step()
            assert not output._backward_hooks
        counts = rows_of(debugger, 2)["count"].tolist()
        left = model(x)  # a pass that nothing follows
    assert not left._backward_hooks
    assert counts == [256, 256, 16]


def test_non_finite_gradients_are_counted() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        return (output * torch.where(torch.arange(16) < 4, float("inf"), 1.0)[:, None]).mean()

    model = mlp()
    debugger = train(model, steps=1, loss_of=broken)
    rows = rows_of(debugger, 0)
    assert rows.loc["2", "nonfinite_fraction"] == pytest.approx(0.25)
    assert rows.loc["2", "max_abs"] == pytest.approx(1 / 16)


def test_half_precision_and_images() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(256, 1)
    ).to(torch.bfloat16)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        images = x[:, :, None].expand(-1, -1, 8)[:, None].to(torch.bfloat16)
        return (model(images) ** 2).mean()

    rows = rows_of(train(model, loss_of=loss_of), step=1)
    assert set(rows.index) == {"0", "1", "3"}
    assert (rows["rms"] > 0).all()


def test_gradients_of_a_scaled_loss_are_told_without_the_scale() -> None:
    def rms(scale: float) -> pd.Series:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
        with NeuralDbg(model) as debugger:
            for x in batches(3):
                optimizer.zero_grad()
                scaler.scale(square(model, x)).backward()
                scaler.step(optimizer)
                scaler.update()
        return rows_of(debugger, 2)[["rms", "mean", "std", "max_abs", "lowest", "highest"]]

    pd.testing.assert_frame_equal(rms(1024.0), rms(1.0), rtol=1e-4)
