"""Watching models that go through torch.compile: graphs, recompiles, statistics, leaving."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import callback_handler
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import counters
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule
from neuraldbg.capture.compiled_graph import ObservedGraph
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
    numbers = found.select_dtypes("floating").columns
    assert found["saturated_fraction"].notna().any(), "of the tanh that a function applies"
    for name in numbers:
        np.testing.assert_allclose(found[name], eager[name], rtol=1e-4, atol=1e-6, err_msg=name)


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
def test_after_leaving_the_model_runs_as_before_without_a_recompile(how, monkeypatch):
    patched = [
        (OutputGraph, "call_user_compiler"), (UnspecializedNNModuleVariable, "call_function"),
    ]  # fmt: skip
    originals = [getattr(*place) for place in patched]
    runs = []
    run = ObservedGraph.run
    monkeypatch.setattr(ObservedGraph, "run", lambda *args: runs.append(1) or run(*args))
    model, called, optimizer, _ = train(how, MIXED, before=2)
    assert runs, "while watched its graph is looked at"
    runs.clear()
    after = graphs()
    steps(called, optimizer, range(20, 23))
    assert runs == []
    assert graphs() == after
    assert all(not module._forward_hooks for module in model.modules())
    assert [getattr(*place) for place in patched] == originals
    assert not callback_handler.start_callbacks
    assert not callback_handler.end_callbacks


def test_a_model_that_was_watched_is_not_compiled_anew_when_it_is_watched_again():
    _, called, optimizer, _ = train("function", DENSE)
    before = graphs()
    with NeuralDbg(called, schedule=DENSE) as dbg:
        steps(called, optimizer, range(3))
    assert graphs() == before
    assert len(outputs(dbg)) == 3 * 12


@pytest.mark.parametrize("kind", ["own class", "same class"])
def test_models_of_others_are_not_compiled_anew(kind):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(6, 1)

        def forward(self, x):
            return self.only(x)

    other = Other() if kind == "own class" else nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 1))
    other = torch.compile(other, backend="aot_eager", fullgraph=True)
    other(batch(0))
    model = make() if kind == "own class" else nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    called = compiled(model, "function")
    called(batch(0))
    count = graphs()
    with NeuralDbg(called):
        other(batch(1))
    other(batch(2))
    assert graphs() == count


def test_blocks_compiled_one_by_one_share_their_code():
    """All blocks of a model are one graph to the compiler, whichever of them it traced."""

    def run(watched: bool):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), *(Block(8) for _ in range(10)), nn.Linear(8, 1))
        plain = copy.deepcopy(model)
        for block in model[1:-1]:
            block.compile(fullgraph=True, backend="aot_eager")
        if not watched:
            steps(model, torch.optim.SGD(model.parameters(), 0.01), range(3))
            return graphs(), None, None
        tables = []
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), 0.01)
            with NeuralDbg(each, schedule=DENSE) as dbg:
                steps(each, optimizer, range(3))
            assert dbg.faults == []
            tables.append(outputs(dbg))
        return graphs(), *tables

    count, eager, found = run(watched=True)
    assert count == run(watched=False)[0]
    assert found["layer"].tolist() == eager["layer"].tolist()
    assert found["layer"].nunique() == 42
    np.testing.assert_allclose(found["rms"], eager["rms"], rtol=1e-4)


def test_two_models_of_one_class_are_told_apart():
    first, second = make(0), make(1)
    both = [compiled(model, "function") for model in (first, second)]
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.05)
    with NeuralDbg([first, second], schedule=DENSE) as dbg:
        steps(lambda x: both[0](x) + both[1](100 * x), optimizer, range(2))
    found = outputs(dbg)
    rms = found[found["kind"] == "output"].groupby("layer", observed=True)["rms"].mean()
    assert len(rms) == 2 * 10
    assert rms["Model[1].first"] > 20 * rms["Model[0].first"]


def test_runs_that_overlap_do_not_disturb_each_other():
    first, second = make(0), make(1)
    called = [compiled(model, "function") for model in (first, second)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (first, second)]
    original = OutputGraph.call_user_compiler
    one, other = (NeuralDbg(model, schedule=DENSE) for model in called)
    one.__enter__()
    other.__enter__()
    steps(called[0], optimizers[0], range(2))
    one.__exit__(None, None, None)
    steps(called[1], optimizers[1], range(3))
    other.__exit__(None, None, None)
    assert outputs(one)["step"].nunique() == 2
    assert outputs(other)["step"].nunique() == 3
    assert OutputGraph.call_user_compiler is original


def test_a_compiled_part_of_an_eager_model():
    model = make()
    model.body = torch.compile(model.body, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with NeuralDbg(model, schedule=DENSE) as dbg:
        steps(model, optimizer, range(5))
    assert dbg.faults == []
    plain = train(None, DENSE, count=5)[3]
    assert set(outputs(dbg)["layer"].dropna()) == set(outputs(plain)["layer"].dropna())


@pytest.mark.parametrize("before", [0, 2], ids=["from the start", "late"])
def test_a_compiled_function_around_the_whole_forward_pass(before):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x):
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))

    def go(count):
        for step in range(count):
            optimizer.zero_grad()
            loss_of(batch(step)).backward()
            optimizer.step()

    go(before)
    with NeuralDbg(model, schedule=DENSE) as dbg:
        go(5)
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


def test_no_layer_has_a_name_that_compilation_gave():
    model = make()
    model.body = torch.compile(nn.Sequential(Block(8), nn.Dropout(0.1)), backend="aot_eager")
    called = compiled(model, "function")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with NeuralDbg(called, schedule=DENSE) as dbg:
        steps(called, optimizer, range(3))
    names = dbg.series["layer"].dropna().unique()
    assert "body.0.up" in names
    assert "body.1" in names
    assert not [name for name in names if "_orig_mod" in name]


class Pixels(nn.Module):
    """What fuses in many ways: convolutions, batch norm, dropout, activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8),
            nn.ReLU(inplace=True), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x)


def test_training_is_that_of_the_bare_compiled_run_bit_for_bit():
    """By the default backend, whose kernels anything added to the graph fuses in another way.

    In low precision a value that is stored between kernels is rounded, and one that is not is not.
    """

    def run(watched: bool):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Pixels()
        called = torch.compile(model, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with torch.autocast("cpu", torch.bfloat16):
            if watched:
                with NeuralDbg(called, schedule=MIXED) as dbg:
                    steps(called, optimizer, range(6))
                assert dbg.faults == []
                assert len(outputs(dbg)) > 20
            else:
                steps(called, optimizer, range(6))
        return model.state_dict(), torch.get_rng_state()

    (bare, state), (watched, state_watched) = run(False), run(True)
    for name, tensor in bare.items():
        assert torch.equal(tensor, watched[name]), name
    assert torch.equal(state, state_watched)


def test_casts_made_while_looking_do_not_serve_the_training():
    """Autocast keeps casts of weights; one made without gradients would cut the training off."""

    def run(watched: bool):
        torch._dynamo.reset()
        model = make()
        part = compiled(model.body, "function")

        def called(x):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.first(x)
                return (model.head(part(hidden)) + model.head(model.body(hidden))).float()

        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        if watched:
            with NeuralDbg(model, schedule=DENSE):
                steps(called, optimizer, range(3))
        else:
            steps(called, optimizer, range(3))
        return list(model.parameters())

    assert all(map(torch.equal, run(False), run(True)))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.vmap(self.first)(x))


class Branching(Mapped):
    def forward(self, x):
        return self.head(torch.cond(x.sum() > 0, self.first, lambda x: self.first(-x), (x,)))


class Checkpointed(Model):
    def forward(self, x):
        hidden = torch.utils.checkpoint.checkpoint(self.body, self.first(x), use_reentrant=False)
        return self.head(hidden)


@pytest.mark.parametrize("kind", [Mapped, Branching, Checkpointed])
def test_what_else_stands_in_a_graph_does_no_harm(kind):
    torch.manual_seed(0)
    model = kind()
    called = compiled(model, "function")
    with NeuralDbg(called, schedule=DENSE) as dbg:
        steps(called, torch.optim.SGD(model.parameters(), 0.05), range(3))
    assert dbg.faults == []
    assert graphs() == 1
    observed = dbg.coverage.set_index(["what", "layer"]).loc["output"]
    if kind is Mapped:
        assert observed["reason"].str.contains("torch.func").all()
    else:
        assert (observed["observed"] == 3).all()


def test_evaluations_with_gradients_do_not_pass_for_training():
    model = make()
    called = compiled(model, "function")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with NeuralDbg(called, schedule=DENSE) as dbg:
        for step in range(4):
            called(1000 * batch(step)) if model.eval() else None
            model.train()
            steps(called, optimizer, [step])
    found = outputs(dbg)
    assert len(found) == 4 * 12
    assert (found["rms"] < 10).all()


def test_a_setting_by_which_compiled_code_checks_for_hooks_costs_no_recompiles():
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        dbg = train("function", MIXED, count=12)[3]
    assert graphs() == 1
    assert len(outputs(dbg)) > 20


def test_a_watched_model_is_exported_without_anything_of_ours():
    model = make()
    x = torch.randn(3, 6)
    plain = torch.export.export(model, (x,))
    with NeuralDbg(model):
        watched = torch.export.export(model, (x,))
    assert watched.graph_module.code == plain.graph_module.code


@pytest.mark.parametrize("schedule", [DENSE, MIXED], ids=["captured", "between"])
def test_another_compiled_model_is_not_taken_for_the_watched_one(schedule):
    model, other = make(0), make(1)
    called, elsewhere = (compiled(each, "function") for each in (model, other))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with NeuralDbg(called, schedule=schedule) as dbg:
        steps(called, optimizer, range(3))
        (elsewhere(batch(0)).sum() + 1e6).backward()
        steps(called, optimizer, range(3, 6))
    losses = dbg.series[dbg.series["kind"] == "loss"]
    assert losses["step"].tolist() == list(range(6))
    assert losses["value"].max() < 10


COMPILED_INSIDE = """
import sys, torch
from torch import nn
from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule
assert "torch._dynamo" not in sys.modules
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
with NeuralDbg(model, schedule=Schedule(dense_steps=100)) as dbg:
    called = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        called(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
rows = dbg.series.query("kind == 'output'").dropna(subset=["rms"])
assert rows["step"].unique().tolist()[-4:] == [1, 2, 3, 4], rows
assert dbg.faults == []
"""


def test_a_compiler_that_comes_into_use_during_the_run_is_noticed():
    subprocess.run([sys.executable, "-W", "ignore", "-c", COMPILED_INSIDE], check=True)
