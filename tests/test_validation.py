"""Evaluations are a series of their own, `record` takes the rest, and overfitting shows in it."""

import contextlib
import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuraldbg import NeuralDbg
from neuraldbg.capture.late_rows import LateRows
from neuraldbg.capture.loss_function_watch import LOSS_FUNCTIONS
from neuraldbg.capture.metrics import MetricWarning, is_validation_loss
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.probe import Deferred
from neuraldbg.event_table import events_from_table
from neuraldbg.models import default_network
from neuraldbg.series import Kind

F = nn.functional
OF_VALIDATION = {"validation_loss_rising", "evaluation_gap"}
WITHOUT_GRADIENT = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "eval_mode_alone": contextlib.nullcontext,
}


def classifier(hidden=16, dropout=0.0, norm=False, momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, hidden),
        *([nn.BatchNorm1d(hidden, momentum=momentum)] if norm else []),
        nn.ReLU(),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(hidden, 5),
    )


def samples(count, seed, noise=1.0, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(5, 10, generator=torch.Generator().manual_seed(5))
    labels = torch.randint(5, (count,), generator=generator)
    noisy = centres[labels] + noise * torch.randn(count, 10, generator=generator)
    return offset + noisy, labels


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)  # looked up at the call, as nearly all code does


def train_epoch(model, optimizer, data, generator, loss_fn=cross_entropy, batch_size=16):
    model.train()
    inputs, labels = data
    for rows in torch.randperm(len(inputs), generator=generator).split(batch_size):
        optimizer.zero_grad()
        loss_fn(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()


def run(model, epochs=4, rate=3e-3, train=None, valid=None, evaluate=None):
    """Trains on one set and evaluates on another after each epoch; the losses of evaluations."""
    train, valid = train or samples(160, 1), valid or samples(120, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    losses = []
    with NeuralDbg(model) as dbg:
        for _ in range(epochs):
            train_epoch(model, optimizer, train, generator)
            model.eval()
            losses.append((evaluate or evaluated)(model, valid))
    assert dbg.faults == []
    return dbg, losses


def evaluated(model, data, context=torch.no_grad, loss_fn=cross_entropy, batch_size=40):
    inputs, labels = data
    with context():
        parts = [
            loss_fn(model(x), y).item()
            for x, y in zip(inputs.split(batch_size), labels.split(batch_size), strict=True)
        ]
    return sum(parts) / len(parts)


def rows_of(dbg, kind="loss"):
    series = dbg.series
    return series[(series["kind"] == kind) & (series["evaluation"] == 1)]


# The series of evaluations ------------------------------------------------------------------------


@pytest.mark.parametrize("way", WITHOUT_GRADIENT)
def test_the_loss_of_evaluations_is_seen_unasked(way):
    def evaluate(model, data):
        return evaluated(model, data, WITHOUT_GRADIENT[way])

    dbg, losses = run(classifier(), evaluate=evaluate)
    rows = rows_of(dbg)
    assert rows["step"].tolist() == [10, 20, 30, 40]  # optimizer steps before each
    np.testing.assert_allclose(rows["value"], losses, rtol=1e-5)
    assert set(rows["detail"]) == {"cross_entropy"}
    assert (rows["comparable"] == 1).all()


def test_outputs_of_evaluations_are_those_of_its_first_batch_and_no_training_rows():
    dbg, _ = run(classifier(norm=True))
    watched = rows_of(dbg, "output")
    assert watched["layer"].unique().tolist() == ["0", "1", "2", "3"]
    inputs = rows_of(dbg, "input")
    expected = samples(120, 2)[0][:40].square().mean().sqrt().item()
    np.testing.assert_allclose(inputs["rms"], expected, rtol=1e-5)

    bare = classifier(norm=True)
    optimizer = torch.optim.Adam(bare.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    with NeuralDbg(bare) as without:
        for _ in range(4):
            train_epoch(bare, optimizer, samples(160, 1), generator)
    for kind in (Kind.OUTPUT, Kind.LOSS, Kind.INPUT):
        with_evaluations, alone = (Panels(d.series).of(kind) for d in (dbg, without))
        assert with_evaluations.layers == alone.layers
        at = np.isin(with_evaluations.steps, alone.steps)
        for name in ("rms", "value", "mean"):
            np.testing.assert_array_equal(
                with_evaluations[name][at],
                alone[name][np.isin(alone.steps, with_evaluations.steps)],
            )


def test_an_evaluation_in_mid_step_does_not_pass_for_a_sample_of_the_step():
    model = classifier()
    far = samples(40, 2, offset=100.0)
    optimizer = torch.optim.Adam(model.parameters())
    with NeuralDbg(model) as dbg:
        for _ in range(3):
            evaluated(model.eval(), far, contextlib.nullcontext)
            train_epoch(model, optimizer, samples(16, 1), None)
    rows = dbg.series.query("kind == 'input' and evaluation != 1")
    assert len(rows) == 3
    assert rows["rms"].max() < 10
    assert rows_of(dbg, "input")["rms"].min() > 50


def test_an_evaluation_before_training_and_one_at_the_end_are_kept():
    model, data = classifier(), samples(40, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with NeuralDbg(model) as dbg:
        before = evaluated(model.eval(), data)
        model.train()
        for micro in range(8):  # the first step has two micro-batches
            F.cross_entropy(model(data[0]), data[1]).backward()
            if micro % 2:
                optimizer.step()
                optimizer.zero_grad()
        after = evaluated(model.eval(), data)
    rows = rows_of(dbg)
    assert rows["step"].tolist() == [0, 4]
    np.testing.assert_allclose(rows["value"], [before, after], rtol=1e-5)


@pytest.mark.parametrize(
    ("loss_fn", "name", "comparable"),
    [
        (nn.CrossEntropyLoss(), "cross_entropy", 1),
        (lambda z, y: F.cross_entropy(z, y, reduction="sum") / len(y), "cross_entropy", 1),
        (lambda z, y: F.cross_entropy(z, y, label_smoothing=0.5), "cross_entropy", 0),
        (lambda z, y: F.cross_entropy(z, y, weight=torch.arange(1.0, 6.0)), "cross_entropy", 0),
        (lambda z, y: F.nll_loss(F.log_softmax(z, 1), y), "nll_loss", 1),
        (lambda z, y: F.mse_loss(z, F.one_hot(y, 5).float()), "mse_loss", 0),
    ],
)
def test_losses_are_compared_only_with_their_like(loss_fn, name, comparable):
    dbg, losses = run(
        classifier(), 3, evaluate=lambda model, data: evaluated(model, data, loss_fn=loss_fn)
    )
    rows = rows_of(dbg)
    np.testing.assert_allclose(rows["value"], losses, rtol=1e-5)
    assert set(rows["detail"]) == {name}
    assert set(rows["comparable"]) == {comparable}


def test_of_several_functions_the_one_that_is_trained_on_is_the_loss():
    def evaluate(model, data):
        with torch.no_grad():
            logits = model(data[0])
            F.mse_loss(logits, F.one_hot(data[1], 5).float())  # a metric
            return F.cross_entropy(logits, data[1]).item()

    dbg, losses = run(classifier(), 3, evaluate=evaluate)
    np.testing.assert_allclose(rows_of(dbg)["value"], losses, rtol=1e-5)


class WithLoss(nn.Module):
    """Returns its own loss, by no function that could be seen."""

    def __init__(self):
        super().__init__()
        self.net = classifier()

    def forward(self, inputs, labels):
        logits = self.net(inputs)
        return {"loss": (logits - F.one_hot(labels, 5)).square().mean(), "logits": logits}


def test_a_loss_that_the_model_returns_is_taken():
    model, data = WithLoss(), samples(40, 1)
    optimizer = torch.optim.Adam(model.parameters())
    values = []
    with NeuralDbg(model) as dbg:
        for _ in range(4):
            optimizer.zero_grad()
            model(*data)["loss"].backward()
            optimizer.step()
            with torch.no_grad():
                values.append([model(*samples(30, seed))["loss"].item() for seed in (7, 8, 9)])
    rows = rows_of(dbg)
    assert rows["step"].tolist() == [1, 2, 3, 4]
    # The first evaluation is noticed when its first pass is already under way.
    np.testing.assert_allclose(rows["value"].iloc[1:], np.mean(values[1:], axis=1), rtol=1e-5)
    assert dbg.faults == []


def checkpointed(model, inputs):
    return model[2](checkpoint(lambda x: model[1](model[0](x)), inputs, use_reentrant=True))


def without_gradient_below(model, inputs):
    with torch.no_grad():
        features = model[1](model[0](inputs))
    return model[2](features)


@pytest.mark.parametrize("forward", [checkpointed, without_gradient_below])
def test_parts_of_training_without_gradients_are_no_evaluation(forward):
    model, data = classifier(), samples(40, 1)
    data[0].requires_grad_()
    optimizer = torch.optim.Adam(model.parameters())
    with NeuralDbg(model) as dbg:
        for step in range(12):
            optimizer.zero_grad()
            F.cross_entropy(forward(model, data[0]), data[1]).backward()
            optimizer.step()
            if step == 8:
                value = evaluated(model, data)
    assert dbg.faults == []
    rows = rows_of(dbg)
    assert rows["step"].tolist() == [9]
    np.testing.assert_allclose(rows["value"], [value], rtol=1e-5)


def test_training_in_eval_mode_is_no_evaluation_but_its_validation_is():
    model, data = classifier().eval(), samples(40, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with NeuralDbg(model) as dbg:
        for step in range(12):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()
            if step % 4 == 3:
                evaluated(model, data)
    assert rows_of(dbg)["step"].tolist() == [4, 8, 12]
    assert len(dbg.series.query("kind == 'output' and evaluation != 1")) == 12 * 3


def test_a_phase_at_every_step_does_not_fill_the_log():
    model, data = classifier(), samples(16, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with NeuralDbg(model) as dbg:
        for _ in range(600):
            with torch.no_grad():
                F.cross_entropy(model(data[0]), data[1])
            optimizer.zero_grad()
            F.cross_entropy(model(data[0]), data[1]).backward()
            optimizer.step()
            dbg.record(step_time=1.0)
    assert len(rows_of(dbg)) < 400
    assert rows_of(dbg, "output")["step"].nunique() < 200
    recorded = dbg.series[dbg.series["kind"] == "metric"]
    assert len(recorded) < 500
    assert recorded["step"].iloc[-1] == 600


# Leaving no trace ---------------------------------------------------------------------------------


def test_functions_and_hooks_are_put_back_and_others_patches_stay(monkeypatch):
    before = {name: getattr(F, name) for name in LOSS_FUNCTIONS}
    model, data = classifier(), samples(40, 1)
    with NeuralDbg(model), pytest.raises(RuntimeError, match="mat1"), NeuralDbg(model):
        model.eval()(data[0].T)
    assert {name: getattr(F, name) for name in LOSS_FUNCTIONS} == before
    assert not any(module._forward_hooks for module in model.modules())

    with NeuralDbg(model):
        ours = F.mse_loss

        def theirs(*args):
            return ours(*args)

        monkeypatch.setattr(F, "mse_loss", theirs)
    assert F.mse_loss is theirs
    assert F.mse_loss(torch.ones(1), torch.zeros(1)) == 1
    monkeypatch.undo()


def test_evaluations_see_the_same_numbers_and_training_ends_at_the_same_weights():
    def weights(watched):
        model = classifier(dropout=0.5, norm=True)
        optimizer = torch.optim.Adam(model.parameters())
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(1)
        losses = []
        with NeuralDbg(model) if watched else contextlib.nullcontext():
            for _ in range(3):
                train_epoch(model, optimizer, samples(160, 1), generator)
                losses.append(evaluated(model.eval(), samples(80, 2), torch.inference_mode))
        return losses, list(model.state_dict().values())

    (losses, with_us), (bare_losses, without) = weights(True), weights(False)
    assert losses == bare_losses
    assert all(torch.equal(a, b) for a, b in zip(with_us, without, strict=True))


def test_a_model_is_copied_and_pickled_in_the_middle_of_an_evaluation():
    def evaluate(model, data):
        value = evaluated(model, data)
        assert evaluated(copy.deepcopy(model), data) == value
        pickle.loads(pickle.dumps(model))
        return value

    dbg, losses = run(classifier(), 2, evaluate=evaluate)
    np.testing.assert_allclose(rows_of(dbg)["value"], losses, rtol=1e-5)


def test_loss_functions_compile_without_a_break():
    model, data = classifier(), samples(16, 1)

    def loss_of(inputs, labels):
        return F.cross_entropy(model(inputs), labels)

    with NeuralDbg(model):
        compiled = torch.compile(loss_of, fullgraph=True, backend="eager")
        assert compiled(*data) == loss_of(*data)


def test_rows_wait_for_their_tensors_and_travel_with_a_captured_step():
    logged = []
    rows = LateRows(logged.extend)
    elsewhere = torch.ones(1, device="meta")
    rows.add(Deferred(lambda arrays: [float(arrays[0][0])], [elsewhere]))
    rows.add(Deferred(lambda _: [3.0]))
    rows.log_ready()
    assert logged == [3.0]
    (travelling,) = rows.board()
    assert travelling.tensors == [elsewhere]
    assert list(travelling.make([np.array([5.0])])) == []
    assert logged == [3.0, 5.0]
    assert rows.board() == []


# record -------------------------------------------------------------------------------------------


def test_metrics_are_rows_of_their_own_at_the_step_they_belong_to():
    model, data = classifier(), samples(40, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with NeuralDbg(model) as dbg:
        for step in range(3):
            train_epoch(model, optimizer, data, None, batch_size=40)
            dbg.record(
                val_loss=0.5 / (step + 1), accuracy=np.float32(0.5), top=torch.tensor([1]), n=7
            )
    dbg.record(test_loss=torch.tensor(0.25, requires_grad=True))
    rows = dbg.series[dbg.series["kind"] == "metric"]
    assert rows[rows["layer"] == "val_loss"]["step"].tolist() == [1, 2, 3]
    found = rows[rows["step"] == 3].set_index("layer")["value"].to_dict()
    assert found == pytest.approx(
        {"val_loss": 0.5 / 3, "accuracy": 0.5, "top": 1.0, "n": 7.0, "test_loss": 0.25}
    )


def test_what_is_no_number_is_left_out_with_one_warning_and_never_raises():
    model, data = classifier(), samples(40, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with NeuralDbg(model) as dbg:
        train_epoch(model, optimizer, data, None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                dbg.record(val_loss=torch.zeros(3), accuracy=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dbg.record(other="high")
    assert [w.category for w in caught] == [MetricWarning]
    assert "record(val_loss=...): Tensor of shape (3,)" in str(caught[0].message)
    assert "int, float" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert set(dbg.series.query("kind == 'metric'")["layer"]) == {"accuracy"}
    assert dbg.faults == []


def test_recording_before_the_run_says_what_to_do():
    with pytest.raises(RuntimeError, match="with NeuralDbg"):
        NeuralDbg(classifier()).record(val_loss=1.0)


def test_names_tell_whether_a_metric_is_a_validation_loss():
    yes = (
        "val_loss",
        "valid_nll",
        "test_error",
        "dev_perplexity",
        "eval/loss",
        "valLoss",
        "val_mse",
    )
    no = (
        "loss",
        "train_loss",
        "val_accuracy",
        "test_f1",
        "evaluations",
        "interval_loss",
        "lossy_val",
    )
    assert [name for name in (*yes, *no) if is_validation_loss(name)] == list(yes)


# What it shows ------------------------------------------------------------------------------------


def found_in(dbg):
    return [e for e in events_from_table(dbg.events) if e.event_type.value in OF_VALIDATION]


def test_overfitting_shows_as_a_validation_loss_that_turns_round():
    few, noisy = samples(48, 1, noise=4.0), samples(200, 2, noise=4.0)
    dbg, losses = run(classifier(128), 40, 1e-2, few, noisy)
    (event,) = found_in(dbg)
    assert event.event_type.value == "validation_loss_rising"
    assert event.to_state == "strongly_rising"
    best = int(np.argmin(losses))
    assert event.step_start == 3 * (best + 1)
    assert event.value == pytest.approx(losses[-1] / losses[best], rel=0.2)


def test_a_recorded_validation_loss_serves_as_well_and_comes_first():
    few = samples(48, 1, noise=4.0)
    model = classifier(128)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with NeuralDbg(model) as dbg:
        for epoch in range(40):
            train_epoch(model, optimizer, few, None)
            dbg.record(val_loss=1.0 + 0.05 * (epoch - 8) ** 2 / 8, accuracy=0.5)
    (event,) = found_in(dbg)
    assert event.detail == "val_loss"
    assert event.step_start == 3 * 9


@pytest.mark.parametrize(
    ("dropout", "norm", "noise"), [(0.0, False, 1.0), (0.5, False, 2.0), (0.2, True, 3.0)]
)
def test_runs_that_carry_over_raise_no_alarm(dropout, norm, noise):
    train, valid = samples(320, 1, noise), samples(120, 2, noise)
    dbg, _ = run(classifier(16, dropout, norm), 8, train=train, valid=valid)
    assert len(rows_of(dbg)) == 8
    assert found_in(dbg) == []


def test_a_rise_that_is_nothing_beside_what_was_gained_is_no_overfitting():
    model, data = classifier(), samples(80, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with NeuralDbg(model) as dbg:
        for epoch in range(20):
            train_epoch(model, optimizer, data, None)
            dbg.record(val_loss=2.3 * 0.3**epoch + 0.001 * epoch)
    assert found_in(dbg) == []


def test_running_statistics_that_lag_show_at_the_layer_where_they_are():
    shifted = samples(320, 1, offset=8.0), samples(80, 2, offset=8.0)
    dbg, _ = run(classifier(32, norm=True, momentum=0.003), 6, 3e-3, *shifted)
    (event,) = [e for e in found_in(dbg) if e.event_type.value == "evaluation_gap"]
    assert (event.layer, event.to_state) == ("1", "eval_worse")
    dbg, _ = run(classifier(32, norm=True), 6, 3e-3, *shifted)
    assert found_in(dbg) == []


def test_strong_dropout_shows_as_training_that_is_held_back():
    dbg, _ = run(classifier(32, dropout=0.9), 12, 3e-3, samples(400, 1), samples(200, 2))
    (event,) = found_in(dbg)
    assert event.to_state == "eval_better"


def test_validation_data_of_another_scale_is_no_gap_of_the_mode():
    def scaled(model, data):
        with torch.no_grad():
            model(10 * data[0])
        return 0.0

    dbg, _ = run(classifier(), 6, evaluate=scaled)
    assert len(rows_of(dbg, "output"))
    assert found_in(dbg) == []


def test_evaluations_count_as_no_evidence_about_training():
    dbg, _ = run(classifier(), 4)
    network = default_network()
    training = dbg.series[dbg.series["evaluation"] != 1]
    evidence = network.read_evidence(dbg.events, dbg.series)
    about_evaluations = {"mode_gap", "validation_course"}
    assert network.read_evidence(dbg.events, training) == {
        name: state for name, state in evidence.items() if name not in about_evaluations
    }
