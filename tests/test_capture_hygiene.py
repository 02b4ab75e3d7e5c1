"""NeuralDBG leaves nothing behind: no hooks, no patches, no tensors, and none of its own faults."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import optimizer as torch_optimizer

from neuraldbg import NeuralDbg
from neuraldbg.capture import CaptureFaultWarning
from neuraldbg.capture.backward_watch import BackwardWatcher, watch_backward
from neuraldbg.capture.forward_sampler import ForwardSampler
from neuraldbg.capture.guard import MAX_FAULTS, Guard
from neuraldbg.capture.parameter_sampler import ParameterSampler
from neuraldbg.capture.recorder import Recorder
from neuraldbg.capture.run_log import ThinningList

F = nn.functional
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_always_called", "_forward_hooks_with_kwargs",
)  # fmt: skip
BACKWARD = torch.autograd.backward


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))


def train(model, steps=6, opt=None):
    opt = opt or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(16, 4)
        opt.zero_grad()
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        opt.step()
    return opt


def assert_nothing_left(*models):
    assert torch.autograd.backward is BACKWARD
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks
    for model in models:
        for module in model.modules():
            for name in HOOKS:
                assert not getattr(module, name)
        for parameter in model.parameters():
            assert not parameter._backward_hooks
            assert not parameter._post_accumulate_grad_hooks


def test_everything_is_gone_after_the_run():
    model = mlp()
    with NeuralDbg(model) as dbg:
        train(model)
        assert torch.autograd.backward is not BACKWARD
    assert_nothing_left(model)
    assert dbg.faults == []


def test_everything_is_gone_after_a_loop_that_raised():
    model = mlp()
    dbg = NeuralDbg(model)

    def loop():
        with dbg:
            train(model)
            model(torch.randn(2, 4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert_nothing_left(model)
    assert dbg.faults == []


def test_everything_is_gone_after_a_long_run():
    model = mlp()
    with NeuralDbg(model) as dbg:
        train(model, 150)
    assert_nothing_left(model)
    assert dbg.faults == []


def test_nested_and_overlapping_runs_leave_nothing():
    first, second = mlp(), mlp()
    with NeuralDbg(first) as one, NeuralDbg(second) as two, NeuralDbg(first) as three:
        train(first)
        train(second)
    assert_nothing_left(first, second)
    one = NeuralDbg(first)
    two = NeuralDbg(second)
    one.__enter__()
    two.__enter__()
    train(first)
    one.__exit__(None, None, None)
    train(second)
    two.__exit__(None, None, None)
    assert_nothing_left(first, second)
    assert [run.faults for run in (one, two, three)] == [[], [], []]


def test_hooks_of_others_stay():
    model = mlp()
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    with NeuralDbg(model) as dbg:
        train(model, 3)
    train(model, 2)
    assert len(seen) == 5
    assert len(model[0]._forward_hooks) == 1
    handle.remove()
    assert_nothing_left(model)
    assert dbg.faults == []


def test_a_patch_of_backward_by_others_stays():
    calls = []
    stop = watch_backward(BackwardWatcher(lambda _: calls.append("ours"), lambda: None))
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        calls.append("theirs")
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    stop()
    try:
        assert torch.autograd.backward is theirs
        torch.ones(1, requires_grad=True).sum().backward()
        assert calls == ["theirs"]
        again = watch_backward(BackwardWatcher(lambda _: calls.append("again"), lambda: None))
        torch.ones(1, requires_grad=True).sum().backward()
        assert calls[1:].count("again") == 1
        again()
    finally:
        torch.autograd.backward = ours
    watch_backward(BackwardWatcher(lambda _: None, lambda: None))()
    assert torch.autograd.backward is BACKWARD


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save"])
def test_copies_made_inside_are_silent(how):
    model = mlp()
    with NeuralDbg(model) as dbg:
        opt = train(model, 3)
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a, b)
        train(twin, 5)
        train(model, 3, opt)
    assert dbg.faults == []
    losses = dbg.series[dbg.series["kind"] == "loss"]
    assert losses["step"].tolist() == list(range(6))
    assert (losses["micro_batches"] == 1).all()
    train(twin, 2)
    assert len(dbg.series[dbg.series["kind"] == "loss"]) == 6


def test_a_pickled_copy_needs_no_neuraldbg_of_its_run():
    model = mlp()
    with NeuralDbg(model):
        train(model, 1)
        data = pickle.dumps(model)
    assert len(data) < 3 * len(pickle.dumps(model))


class Watched(nn.Module):
    """Keeps weak references to the tensors of its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.seen: list[weakref.ref] = []

    def forward(self, x):
        hidden = F.relu(self.first(x))
        out = self.second(hidden)
        self.seen += [weakref.ref(x), weakref.ref(hidden), weakref.ref(out)]
        return out


def step_and_note(model, opt, refs):
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    refs += [weakref.ref(loss), weakref.ref(y)]
    loss.backward()
    opt.step()


def alive(refs):
    gc.collect()
    return [ref() for ref in refs if ref() is not None]


@pytest.mark.parametrize("steps", [3, 60])
def test_no_tensor_of_the_run_is_kept_alive(steps):
    model = Watched()
    opt, refs = torch.optim.SGD(model.parameters(), lr=0.01), []
    with NeuralDbg(model) as dbg:
        for _ in range(steps):
            step_and_note(model, opt, refs)
        assert alive(refs + model.seen) == []  # not even inside, once the step is over
        model(torch.randn(16, 4))  # a pass left unfinished
    assert alive(refs + model.seen) == []
    assert dbg.faults == []


def test_no_tensor_is_kept_without_an_optimizer_or_a_backward_pass():
    model = Watched()
    with NeuralDbg(model) as dbg:
        model(torch.randn(16, 4)).sum().backward()
        model(torch.randn(16, 4))
    assert alive(model.seen) == []
    assert dbg.faults == []


def test_a_run_that_is_dropped_frees_the_model():
    model = mlp()
    dbg = NeuralDbg(model)
    with dbg:
        train(model)
    ref = weakref.ref(model)
    del model, dbg
    gc.collect()
    assert ref() is None


# Faults of its own ------------------------------------------------------------------------------

PLACES = [
    (ForwardSampler, "_note_entry"),
    (ForwardSampler, "collect"),
    (ParameterSampler, "read_gradients"),
    (ParameterSampler, "read_weights_before"),
    (ParameterSampler, "read_weights_after"),
    (ParameterSampler, "unset_gradients"),
    (Recorder, "_pulse"),
    (Recorder, "_record_of"),
]


def state(model, opt):
    return [*model.state_dict().values(), *(v["momentum_buffer"] for v in opt.state.values())]


def broken(*args, **kwargs):
    raise RuntimeError("a bug of our own")


@pytest.fixture
def _restore_warnings():
    with warnings.catch_warnings():
        yield


@pytest.mark.parametrize("warnings_are", ["always", "error"])
@pytest.mark.parametrize(("owner", "method"), PLACES, ids=lambda p: getattr(p, "__name__", p))
@pytest.mark.usefixtures("_restore_warnings")
def test_a_fault_of_its_own_never_reaches_the_loop(monkeypatch, owner, method, warnings_are):
    torch.manual_seed(3)
    bare = mlp()
    expected = state(bare, train(bare, 12))
    random_state = torch.get_rng_state()

    monkeypatch.setattr(owner, method, broken)
    torch.manual_seed(3)
    model = mlp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(warnings_are)
        with NeuralDbg(model) as dbg:
            opt = train(model, 12)
    own = [w for w in caught if issubclass(w.category, CaptureFaultWarning)]
    assert len(own) == len(caught) == (warnings_are == "always")
    for a, b in zip(expected, state(model, opt), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(random_state, torch.get_rng_state())
    assert dbg.faults
    assert "a bug of our own" in dbg.faults[0][1]
    assert_nothing_left(model)
    monkeypatch.undo()
    faults = dbg.events[dbg.events["event_type"] == "capture_fault"]
    assert len(faults) == len(dbg.faults)
    assert len(dbg.explain_failure())


def test_a_place_that_fails_again_and_again_is_left_alone():
    guard, calls = Guard(), []

    def callback():
        calls.append(1)
        raise ValueError("again")

    guarded = guard.wrap(callback)
    with pytest.warns(CaptureFaultWarning, match="ValueError: again"):
        guarded()
    for _ in range(10):  # without a warning, which would be an error here
        guarded()
    assert len(calls) == len(guard.faults) == MAX_FAULTS


def test_what_stops_a_program_is_not_swallowed():
    def callback():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard().wrap(callback)()


# Bounded memory ---------------------------------------------------------------------------------


@given(limit=st.integers(8, 200), count=st.integers(1, 1500))
def test_a_thinning_list_is_bounded_ordered_and_keeps_its_ends(limit, count):
    kept = ThinningList(limit=limit)
    for item in range(count):
        kept.append(item)
        assert len(kept.items) <= limit
        assert kept.items[-1] == item
    assert kept.items == sorted(set(kept.items))
    assert kept.items[0] == 0
    if count <= limit:
        assert kept.items == list(range(count))
    else:
        head = limit // 8
        assert kept.items[:head] == list(range(head))
        assert len(kept.items) >= limit // 2


def test_the_log_of_a_long_run_is_bounded(monkeypatch):
    model = mlp()
    with NeuralDbg(model) as dbg:
        log = dbg._recorder.log
        log.frames.limit, log.pulses.limit = 8, 16
        train(model, 60)
    assert dbg.faults == []
    assert len(log.frames.items) <= 8
    losses = dbg.series.query("kind == 'loss' and value.notna()")["step"].tolist()
    assert len(losses) <= 16
    assert (losses[0], losses[-1]) == (0, 59)
    assert dbg.explain_failure().steps == 60
