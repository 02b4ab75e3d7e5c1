"""Half precision: activations near overflow, gradients flushed to zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from neuraldbg import NeuralDbg
from neuraldbg.capture.probes.number_formats import flushed_fraction

KINDS = ("activation_near_overflow", "gradient_underflow")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def train(
    model: nn.Module, scale: float = 1.0, steps: int = 10, lr: float = 0.01, autocast: bool = False
) -> NeuralDbg:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    dtype = next(model.parameters()).dtype
    with NeuralDbg(model) as debugger:
        for _ in range(steps):
            x = torch.randn(16, 8, generator=generator).to(dtype)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                output = model(x)
            (scale * cross_entropy(output.float(), x.argmax(1) % 4)).backward()
            optimizer.step()
    assert debugger.faults == []
    return debugger


def found(debugger: NeuralDbg) -> list[tuple[str, str]]:
    events = debugger.events
    chosen = events[events["event_type"].isin(KINDS)]
    return list(zip(chosen["event_type"], chosen["layer"], strict=True))


def large(model: nn.Sequential, factor: float) -> nn.Sequential:
    with torch.no_grad():
        model[2].weight.mul_(factor)
    return model


@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
def test_outputs_near_the_limit_of_float16_are_found(autocast: bool) -> None:
    model = large(network(), 4e4)
    debugger = train(model if autocast else model.half(), autocast=autocast, lr=0.0)
    assert found(debugger) == [("activation_near_overflow", "2")]
    event = debugger.events.query("event_type == 'activation_near_overflow'").iloc[0]
    assert event["detail"] == "float16"
    assert 0.25 < event["value"] <= 1.0


def test_an_output_that_overflows_in_part_is_near_overflow_before_it() -> None:
    debugger = train(large(network(), 2e5).half(), lr=0.0, steps=3)
    assert ("activation_near_overflow", "2") in found(debugger)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_values_are_no_fault_in_wider_formats(dtype: torch.dtype) -> None:
    assert found(train(large(network(), 4e4).to(dtype), lr=0.0)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_training_in_any_format_is_no_fault(dtype: torch.dtype) -> None:
    assert found(train(network().to(dtype))) == []


def test_the_largest_value_is_found_outside_any_sample() -> None:
    model = nn.Sequential(nn.Linear(8, 4000), nn.ReLU(), nn.Linear(4000, 4))
    with torch.no_grad():
        model[0].bias[1237] = 4e4
        model[2].weight[:, 1237] = 0
    assert found(train(model.half(), lr=0.0, steps=3)) == [
        ("activation_near_overflow", "0"),
        ("activation_near_overflow", "1"),
    ]


def test_the_formats_are_named_on_the_rows() -> None:
    series = train(network().half(), steps=2).series
    for kind in ("output", "parameter"):
        assert set(series[series["kind"] == kind]["detail"]) == {"float16"}
    assert train(network(), steps=2).series["detail"].isna().all()


@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
def test_gradients_flushed_to_zero_are_found(autocast: bool) -> None:
    model = network() if autocast else network().half()
    events = found(train(model, 3e-6, autocast=autocast))
    assert {kind for kind, _ in events} == {"gradient_underflow"}
    assert {layer for _, layer in events} >= {"0", "2"}


def test_the_same_gradients_are_no_fault_in_float32() -> None:
    assert found(train(network(), 3e-6)) == []


def test_zeros_of_dead_units_are_no_underflow() -> None:
    model = network()
    with torch.no_grad():
        model[0].bias[:28] = -50.0
    assert found(train(model.half())) == []


def test_an_embedding_s_unused_rows_are_no_underflow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Flatten(), nn.Linear(64, 4)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NeuralDbg(model) as debugger:
        for _ in range(6):
            tokens = torch.randint(500, (8, 4))
            optimizer.zero_grad()
            cross_entropy(model(tokens).float(), tokens[:, 0] % 4).backward()
            optimizer.step()
    assert found(debugger) == []


@pytest.mark.parametrize("scale", [1e-9, 3e-8, 1e-7, 1e-6, 1e-3])
def test_the_flushed_share_is_that_of_the_values_lost_in_the_cast(scale: float) -> None:
    wide = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * scale
    half = wide.half()
    lost = float((half == 0).float().mean())
    assert flushed_fraction(half.float().numpy()) == pytest.approx(lost, abs=0.03)


def test_gradients_unscaled_from_a_loss_scale_are_no_underflow() -> None:
    values = np.random.default_rng(0).normal(size=(16, 16)) * 1e-9
    assert flushed_fraction(values.astype(np.float32)) == 0.0


def lost(model: nn.Sequential, lr: float) -> set[str]:
    events = train(model, lr=lr).events
    return set(events[events["to_state"] == "update_lost"]["layer"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_below_the_precision_of_the_weights_are_found(dtype: torch.dtype) -> None:
    assert lost(network().to(dtype), 1e-7) == {"0", "2", "4"}


@pytest.mark.parametrize(
    ("dtype", "lr"),
    [(torch.float32, 1e-7), (torch.float16, 0.01), (torch.bfloat16, 0.1), (torch.float16, 0.0)],
)
def test_updates_that_arrive_and_steps_of_no_size_are_no_fault(
    dtype: torch.dtype, lr: float
) -> None:
    assert lost(network().to(dtype), lr) == set()


def test_one_layer_of_huge_weights_is_no_lost_update() -> None:
    assert lost(large(network(), 1e4).half(), 1e-3) == set()
