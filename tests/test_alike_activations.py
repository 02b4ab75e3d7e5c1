"""Networks that come to put out the same for every sample, and those that only look like it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from neuraldbg.capture.detectors import detect_activations_alike
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.sampling import SampleBuffer
from neuraldbg.capture.unit_similarity import similarity_columns
from neuraldbg.events import EventType, SemanticEvent
from neuraldbg.series import build_series
from neuraldbg.thresholds import Thresholds

STEPS = 40


def series_of(spread: np.ndarray) -> pd.DataFrame:
    """Of spreads of shape (steps, layers)."""
    steps, layers = spread.shape
    return build_series(
        {
            "step": np.repeat(np.arange(steps), layers),
            "rank": np.zeros(spread.size),
            "layer": [f"layer{k}" for k in range(layers)] * steps,
            "layer_index": list(range(layers)) * steps,
            "kind": ["output"] * spread.size,
            "row_spread": spread.ravel(),
        }
    )


def found_in(spread: np.ndarray) -> list[SemanticEvent]:
    return list(detect_activations_alike(Panels(series_of(spread)), Thresholds()))


def collapsing(*layers: bool, at: int = 10, to: float = 1e-4) -> np.ndarray:
    """Spreads that fall at a step, in the layers said."""
    spread = np.full((STEPS, len(layers)), 0.8)
    spread[at:, list(layers)] = to
    return spread


def test_the_first_layer_from_which_on_all_is_alike_is_named() -> None:
    (event,) = found_in(collapsing(False, True, True, True))
    assert event.event_type is EventType.ACTIVATIONS_ALIKE
    assert (event.layer, event.layer_index) == ("layer1", 1)
    assert (event.step_start, event.step_end) == (10, STEPS - 1)
    assert event.value == pytest.approx(1e-4)


@pytest.mark.parametrize(
    "spread",
    [
        collapsing(False, False, False),
        collapsing(False, True, False),  # others go round it
        collapsing(False, False, True),  # an output may be constant
        collapsing(True, True, True, to=0.05),  # less varied, and far from alike
        np.full((STEPS, 3), 0.005),  # small from the start
        collapsing(True, True, True, at=STEPS - 2),  # too short to tell
        collapsing(True, True, True)[:6],
        np.full((STEPS, 3), np.nan),
    ],
)
def test_nothing_is_said_of_other_runs(spread: np.ndarray) -> None:
    assert found_in(spread) == []


def test_a_layer_that_recovers_is_no_event() -> None:
    spread = collapsing(False, True, True)
    spread[-1] = 0.8
    assert found_in(spread) == []


def test_a_single_output_unit_tells_nothing_of_its_own() -> None:
    spread = collapsing(False, True, True)
    spread[:, 2] = np.nan
    assert [event.layer for event in found_in(spread)] == ["layer1"]


def test_rarely_looked_at_is_enough() -> None:
    spread = collapsing(False, True, True)
    spread[np.arange(STEPS) % 4 > 0] = np.nan
    assert [event.step_start for event in found_in(spread)] == [12]


def trained(rate: float, steps: int = 120) -> list[SemanticEvent]:
    """The events of a network, of which each step's outputs are sampled."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    buffer = SampleBuffer()

    def sample(module: nn.Module, args: object, output: Tensor) -> None:
        buffer.copy((module, "output"), output.detach(), 1)

    for module in model:
        module.register_forward_hook(sample)
    spreads = []
    rule = torch.randn(20, 10)
    for _ in range(steps):
        x = torch.randn(32, 20)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x @ rule).argmax(1)).backward()
        optimizer.step()
        samples = buffer.drain().on_host()
        spreads.append(similarity_columns(samples, range(len(samples.keys)))["row_spread"])
    return found_in(np.array(spreads))


def test_a_network_thrown_off_by_its_updates_is_found() -> None:
    (event,) = trained(rate=1.0)
    assert event.layer_index in (1, 2, 3)
    assert event.step_start > 0


def test_the_same_network_that_learns_is_not() -> None:
    assert trained(rate=0.01) == []
