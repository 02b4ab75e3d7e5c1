"""Batch normalisation and dropout: batches too small, statistics that lag, too much dropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from neuraldbg import NeuralDbg
from neuraldbg.capture.transfer import Transfers

KINDS = {"batch_too_small", "statistics_lagging", "dropout_strong"}


def train(model: nn.Module, batch: int = 32, steps: int = 60, shift: float = 3.0) -> NeuralDbg:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NeuralDbg(model) as debugger:
        for _ in range(steps):
            x = shift + torch.randn(batch, 8, generator=generator)
            optimizer.zero_grad()
            mse_loss(model(x), (x - shift)[:, :1]).backward()
            optimizer.step()
    assert debugger.faults == []
    return debugger


def found(debugger: NeuralDbg) -> list[tuple[str, str, str]]:
    events = debugger.events
    chosen = events[events["event_type"].isin(KINDS)]
    return list(zip(chosen["event_type"], chosen["layer"], chosen["to_state"], strict=True))


def normed(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16, momentum=momentum), nn.ReLU(), nn.Linear(16, 1)
    )


@pytest.mark.parametrize(("batch", "state"), [(2, "tiny"), (4, "small")])
def test_batches_too_small_for_their_statistics_are_found(batch: int, state: str) -> None:
    assert found(train(normed(), batch)) == [("batch_too_small", "1", state)]


@pytest.mark.parametrize("batch", [16, 64])
def test_ordinary_batches_are_no_fault(batch: int) -> None:
    assert found(train(normed(), batch)) == []


def test_a_small_last_batch_is_no_fault() -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NeuralDbg(model) as debugger:
        for step in range(60):
            x = torch.randn(2 if step % 5 == 4 else 32, 8)
            optimizer.zero_grad()
            mse_loss(model(x), x[:, :1]).backward()
            optimizer.step()
    assert found(debugger) == []


def test_tiny_batches_without_a_batch_norm_are_no_fault() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    assert found(train(model, 2)) == []


@pytest.mark.parametrize("momentum", [0.003, 0.0])
def test_running_statistics_that_lag_are_found(momentum: float) -> None:
    assert found(train(normed(momentum))) == [("statistics_lagging", "1", "lagging")]


@pytest.mark.parametrize("momentum", [0.1, 0.3, 1.0, None])
def test_running_statistics_that_settle_are_no_fault(momentum: float | None) -> None:
    assert found(train(normed(momentum))) == []


def test_slow_statistics_that_were_right_from_the_start_are_no_fault() -> None:
    model = normed(0.5)
    train(model)
    model[1].momentum = 0.001
    assert found(train(model)) == []


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "as on an accelerator"])
def test_distance_and_lag_are_those_of_the_whole_batch(
    deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deferring(Transfers):
        def __init__(self, deliver: object) -> None:
            super().__init__(deliver, always_defer=deferred)  # type: ignore[arg-type]

    monkeypatch.setattr("neuraldbg.capture.recorder.Transfers", Deferring)
    model = normed(0.05)
    norm = model[1]
    expected = []

    def compare(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        x = args[0].detach()
        scale = norm.running_var.sqrt()
        shift = (x.mean(0) - norm.running_mean) / scale
        stretch = x.std(0, unbiased=False) / scale - 1
        expected.append(float((shift**2 + stretch**2).mean().sqrt()))

    norm.register_forward_pre_hook(compare)
    series = train(model, batch=24, steps=12).series
    rows = series.query("kind == 'output' and layer == '1'").set_index("step")
    assert len(rows) >= 8
    np.testing.assert_allclose(rows["running_distance"], np.array(expected)[rows.index], rtol=1e-3)
    np.testing.assert_allclose(rows["running_lag"], 0.95 ** (rows.index + 1.0), rtol=1e-5)
    assert set(rows["values_per_channel"]) == {24.0}


def test_values_per_channel_count_positions_and_samples() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 1)
    )
    with NeuralDbg(model) as debugger:
        model(torch.randn(5, 1, 8, 8)).mean().backward()
    row = debugger.series.query("kind == 'output' and layer == '1'").iloc[0]
    assert (row["batch_size"], row["values_per_channel"]) == (5.0, 5.0 * 36)


def dropping(p: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 1))


def test_strong_dropout_is_found_in_its_place() -> None:
    debugger = train(dropping(0.9))
    assert found(debugger) == [("dropout_strong", "2", "strong")]
    event = debugger.events.query("event_type == 'dropout_strong'").iloc[0]
    assert event["value"] == pytest.approx(0.9)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.6])
def test_usual_dropout_is_no_fault(p: float) -> None:
    assert found(train(dropping(p))) == []


def test_strong_dropout_that_is_switched_off_is_no_fault() -> None:
    assert found(train(dropping(0.9).eval())) == []


def test_dropout_between_recurrent_layers_counts_as_theirs() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1, 8, 2, dropout=0.8, batch_first=True)
            self.head = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x[..., None])[0][:, -1])

    assert found(train(Recurrent(), steps=12)) == [("dropout_strong", "lstm", "strong")]


class Functional(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.last, self.p = nn.Linear(8, 64), nn.Linear(64, 1), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.relu(self.first(x)), self.p, self.training)
        return self.last(hidden)


def test_strong_dropout_by_a_function_counts_with_the_layer_before_it() -> None:
    debugger = train(Functional(0.8), steps=20)
    assert found(debugger) == [("dropout_strong", "first", "strong")]
    event = debugger.events.query("event_type == 'dropout_strong'").iloc[0]
    assert event["value"] == pytest.approx(0.8, abs=1e-3)


@pytest.mark.parametrize("model", [Functional(0.3), Functional(0.8).eval()])
def test_usual_dropout_by_a_function_is_no_fault(model: nn.Module) -> None:
    assert found(train(model, steps=20)) == []
