"""Gradients that are nothing but noise, beside healthy ones that are noisy too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuraldbg import NeuralDbg
from neuraldbg.capture.detectors import detect_gradient_noise
from neuraldbg.capture.panel import Panels
from neuraldbg.events import SemanticEvent
from neuraldbg.series import build_series
from neuraldbg.thresholds import Thresholds

STEPS = 60
FLAT = np.full(STEPS, 2.3)
FALLING = np.linspace(2.3, 0.3, STEPS)


def series_of(noise: np.ndarray, cosine: np.ndarray, loss: np.ndarray) -> pd.DataFrame:
    steps = list(range(len(loss)))
    return build_series(
        {
            "step": steps * 2,
            "rank": [0] * 2 * len(steps),
            "layer": [*["fc"] * len(steps), *[None] * len(steps)],
            "layer_index": [*[0] * len(steps), *[-1] * len(steps)],
            "kind": [*["gradient"] * len(steps), *["loss"] * len(steps)],
            "noise_scale": [*noise, *[np.nan] * len(steps)],
            "cosine": [*cosine, *[np.nan] * len(steps)],
            "value": [*[np.nan] * len(steps), *loss],
        }
    )


def found_in(noise: float, cosine: float, loss: np.ndarray) -> list[SemanticEvent]:
    series = series_of(np.full(len(loss), noise), np.full(len(loss), cosine), loss)
    return list(detect_gradient_noise(Panels(series), Thresholds()))


def test_noise_alone_under_a_flat_loss_is_an_event_of_the_whole_run() -> None:
    (event,) = found_in(40.0, 0.0, FLAT)
    assert (event.step_start, event.step_end, event.layer) == (0, STEPS - 1, None)
    assert event.value == pytest.approx(40.0)
    assert event.threshold == Thresholds().gradient_noise


@pytest.mark.parametrize(
    ("noise", "cosine", "loss"),
    [
        (40.0, 0.0, FALLING),  # noisy, and learning all the same
        (5.0, 0.15, FLAT),  # no progress for another reason
        (40.0, -0.5, FLAT),  # overshooting: the gradients differ since they oppose each other
        (40.0, 0.0, FLAT - 2.3),  # a loss whose level says nothing
        (40.0, 0.0, FLAT[:10]),  # too short to tell
        (np.nan, np.nan, FLAT),
    ],
)
def test_nothing_is_said_of_other_runs(noise: float, cosine: float, loss: np.ndarray) -> None:
    assert found_in(noise, cosine, loss) == []


def test_noise_that_comes_late_is_that_of_any_run_that_has_learned() -> None:
    noise = np.where(np.arange(STEPS) < 12, 1.0, 40.0)
    series = series_of(noise, np.zeros(STEPS), FLAT)
    assert list(detect_gradient_noise(Panels(series), Thresholds())) == []


def train(targets: Callable[[Tensor], Tensor], size: int, rate: float) -> NeuralDbg:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                          nn.Linear(128, 10))  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with NeuralDbg(model) as debugger:
        for _ in range(STEPS):
            x = torch.randn(size, 20)
            optimizer.zero_grad()
            cross_entropy(model(x), targets(x)).backward()
            optimizer.step()
    assert debugger.faults == []
    return debugger


def noisy_events(debugger: NeuralDbg) -> int:
    return int((debugger.events["event_type"] == "gradient_noisy").sum())


def test_labels_at_random_in_tiny_batches_are_noise() -> None:
    debugger = train(lambda x: torch.randint(0, 10, (len(x),)), size=4, rate=0.01)
    assert noisy_events(debugger) == 1


def test_labels_that_follow_from_the_input_are_not() -> None:
    rule = torch.randn(20, 10, generator=torch.Generator().manual_seed(1))
    debugger = train(lambda x: (x @ rule).argmax(1), size=32, rate=0.1)
    assert noisy_events(debugger) == 0
    gradients = debugger.series.query("kind == 'gradient'")
    assert 0.1 < gradients["noise_scale"].median() < 15


def test_more_samples_a_step_make_less_noise() -> None:
    rule = torch.randn(20, 10, generator=torch.Generator().manual_seed(1))

    def noise(size: int) -> float:
        debugger = train(lambda x: (x @ rule).argmax(1), size=size, rate=1e-4)
        return float(debugger.series.query("kind == 'gradient'")["noise_scale"].median())

    # The variance of a mean over samples falls with their number.
    assert noise(64) / noise(256) == pytest.approx(4.0, rel=0.3)
