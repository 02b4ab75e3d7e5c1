"""Watching models that go through torch.compile: graphs, recompiles, statistics, leaving."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule, compiled_regions
from neuraldbg.series import Kind

# Compiling warns about float32 precision and about its own imports.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning:torch")

DENSE = Schedule(dense_steps=1_000)
MIXED = Schedule(dense_steps=2, periods=((2, 3),))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.body = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(torch.tanh(self.first(x))))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def batch(step: int, rows: int = 12) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def compiled(model: nn.Module, how: str, backend: str = "aot_eager", **options) -> nn.Module:
    if how == "method":
        model.compile(fullgraph=True, backend=backend, **options)
        return model
    return torch.compile(model, fullgraph=True, backend=backend, **options)


def steps(model, optimizer, numbers, rows=lambda _: 12):
    for step in numbers:
        optimizer.zero_grad()
        x = batch(step, rows(step))
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def train(how: str | None, schedule: Schedule, count: int = 8, before: int = 0, **options):
    model = make()
    called = model if how is None else compiled(model, how, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    steps(called, optimizer, range(before))
    with NeuralDbg(called, schedule=schedule) as dbg:
        steps(called, optimizer, range(before, before + count))
    assert dbg.faults == []
    return model, called, optimizer, dbg


def outputs(dbg: NeuralDbg):
    rows = dbg.series[dbg.series["kind"].isin([Kind.OUTPUT.value, Kind.INPUT.value])]
    return rows.sort_values(["step", "kind", "layer"]).reset_index(drop=True)


@pytest.mark.parametrize("before", [0, 2], ids=["from the start", "late"])
@pytest.mark.parametrize("how", ["function", "method"])
def test_statistics_are_those_of_the_eager_run(how, before):
    eager = outputs(train(None, DENSE, before=before)[3])
    found = outputs(train(how, DENSE, before=before)[3])
    for name in ("step", "kind", "layer", "layer_index"):
        assert found[name].tolist() == eager[name].tolist()
    for name in ("rms", "mean", "std", "max_abs", "zero_fraction", "silent_fraction"):
        np.testing.assert_allclose(found[name], eager[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["function", "method"])
def test_one_graph_for_all_steps_whether_sampled_or_not(how):
    train(how, MIXED, count=12)
    assert graphs() == 1
    assert not counters["graph_break"]


def test_changing_shapes_are_compiled_as_often_as_without():
    def run(watched: bool) -> int:
        torch._dynamo.reset()
        counters.clear()
        model = make()
        called = compiled(model, "function")
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        rows = lambda step: 8 + 2 * step  # noqa: E731
        if watched:
            with NeuralDbg(called, schedule=MIXED) as dbg:
                steps(called, optimizer, range(10), rows)
            assert dbg.faults == []
            assert len(outputs(dbg)) > 20
        else:
            steps(called, optimizer, range(10), rows)
        return graphs()

    assert run(watched=True) == run(watched=False)


@pytest.mark.parametrize("how", ["function", "method"])
def test_after_leaving_the_model_runs_without_our_operation(how, monkeypatch):
    calls = []

    class Counting(dict):
        def get(self, number, default=None):
            calls.append(number)
            return super().get(number, default)

    monkeypatch.setattr(compiled_regions, "_regions", Counting())
    model, called, optimizer, _ = train(how, MIXED, before=2)
    assert calls, "while watched it runs"
    calls.clear()
    after = graphs()
    steps(called, optimizer, range(20, 23))
    assert calls == []
    assert graphs() - after <= 1, "compiled once more at most"
    assert all(not module._forward_hooks for module in model.modules())


def test_models_of_others_are_not_compiled_anew():
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(6, 1)

        def forward(self, x):
            return self.only(x)

    other = torch.compile(Other(), backend="aot_eager", fullgraph=True)
    other(batch(0))
    model = make()
    called = compiled(model, "function")
    called(batch(0))
    count = graphs()
    with NeuralDbg(called):
        other(batch(1))
    other(batch(2))
    assert graphs() == count


def test_the_setting_that_is_changed_is_put_back():
    config = torch._dynamo.config
    before = config.skip_nnmodule_hook_guards
    with NeuralDbg(make()), NeuralDbg(make(1)):
        pass
    assert config.skip_nnmodule_hook_guards == before


def test_a_compiled_part_of_an_eager_model():
    model = make()
    model.body = torch.compile(model.body, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with NeuralDbg(model, schedule=DENSE) as dbg:
        steps(model, optimizer, range(5))
    assert dbg.faults == []
    plain = train(None, DENSE, count=5)[3]
    assert set(outputs(dbg)["layer"].dropna()) == set(outputs(plain)["layer"].dropna())


def test_a_compiled_function_around_the_whole_forward_pass():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x):
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))

    with NeuralDbg(model, schedule=DENSE) as dbg:
        for step in range(5):
            optimizer.zero_grad()
            loss_of(batch(step)).backward()
            optimizer.step()
    assert dbg.faults == []
    assert len(outputs(dbg)) >= 5 * 10


def test_a_copy_of_a_watched_model_stays_silent():
    model = make()
    called = compiled(model, "function")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with NeuralDbg(called, schedule=DENSE) as dbg:
        steps(called, optimizer, range(2))
        twin = torch.compile(copy.deepcopy(model), backend="aot_eager")
        for _ in range(3):
            twin(100 * batch(0))
        steps(called, optimizer, range(2, 4))
    assert dbg.faults == []
    entry = outputs(dbg)
    entry = entry[(entry["kind"] == "output") & (entry["layer"] == "first")]
    assert entry["step"].tolist() == [0, 1, 2, 3]
    assert (entry["rms"] < 10).all()


def test_what_compiled_code_hides_is_said():
    coverage = train("function", DENSE)[3].coverage
    reasons = coverage.set_index(["what", "layer"])["reason"]
    assert "torch.compile" in reasons["output_gradient", "first"]
    assert reasons["output", "first"] == ""


def test_weights_are_those_of_the_bare_compiled_run_bit_for_bit():
    """By the default backend, whose kernels might be fused in another way."""
    bare = make()
    called = torch.compile(bare, fullgraph=True)
    optimizer = torch.optim.SGD(bare.parameters(), 0.05)
    steps(called, optimizer, range(6))
    torch._dynamo.reset()
    watched = train("function", MIXED, count=6, backend="inductor")[0]
    for before, after in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(before, after)
