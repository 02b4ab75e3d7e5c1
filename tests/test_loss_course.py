"""The course of the training loss: spikes, periods, an end too early; silent on ordinary runs."""

import numpy as np
import pytest
import torch
from torch import nn

from neuraldbg import NeuralDbg
from neuraldbg.capture import detect_events
from neuraldbg.capture.detectors.loss_trend import theil_sen
from neuraldbg.capture.loss_curve import noise_of
from neuraldbg.evaluation.healthy_recipes import HEALTHY_RECIPES
from neuraldbg.evaluation.watched import watch
from neuraldbg.series import build_series

F = nn.functional
OF_THE_COURSE = {"loss_spiking", "loss_periodic", "loss_still_falling"}
STEPS = 240


def events_of(losses, rates=None, optimizers=1):
    """The event types of a run with these losses."""
    count = len(losses)
    names = [None] + [f"optimizer {k}" for k in range(1, optimizers)]
    columns = {"step": [], "kind": [], "layer": [], "value": []}
    for name in names:
        for kind, values in (("loss", losses), ("optimizer", rates)):
            if values is not None:
                columns["step"] += list(range(count))
                columns["kind"] += [kind] * count
                columns["layer"] += [name] * count
                columns["value"] += list(values)
    rows = len(columns["step"])
    series = build_series({**columns, "rank": [0] * rows, "layer_index": [-1] * rows})
    return detect_events(series)


def course_of(losses, **kwargs):
    table = events_of(losses, **kwargs)
    return [name for name in table["event_type"] if name in OF_THE_COURSE]


def converging(noise=0.1, seed=0, steps=STEPS):
    rng = np.random.default_rng(seed)
    course = 0.2 + 2.1 * np.exp(-np.arange(steps) / 30)
    return course * np.exp(noise * rng.standard_normal(steps))


def spiked(at, height=3.0, lasting=6):
    losses = converging()
    for start in at:
        losses[start : start + lasting] += height * 0.6 ** np.arange(lasting)
    return losses


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_a_converging_loss_has_no_course_worth_an_event(noise, seed):
    assert course_of(converging(noise, seed)) == []


def test_spikes_that_recover_are_found_where_they_are():
    table = events_of(spiked(at=(100, 170)))
    found = table[table["event_type"] == "loss_spiking"]
    assert found["step_start"].tolist() == [100, 170]
    assert (found["step_end"] - found["step_start"]).between(1, 8).all()
    assert found["value"].min() > 10


def test_a_single_spike_or_single_odd_batches_are_no_habit():
    assert course_of(spiked(at=(100,))) == []
    assert course_of(spiked(at=(60, 100, 140, 170), lasting=1)) == []


def test_a_jump_that_is_small_for_the_run_is_no_spike():
    losses = spiked(at=(150, 200), height=0.3)
    losses[120:] -= 0.19  # nearly zero: the jumps are manifold now
    assert course_of(losses) == []


def test_a_loss_that_stays_up_does_not_spike():
    losses = converging()
    losses[120:] += 3.0
    assert "loss_spiking" not in course_of(losses)


def saw(period, seed=0, steps=STEPS):
    phase = np.arange(steps) % period / period
    return converging(0.1, seed, steps) * (0.6 + 1.2 * phase)


@pytest.mark.parametrize("period", [25, 40, 60])
def test_a_saw_is_found_with_its_period(period):
    table = events_of(saw(period))
    found = table[table["event_type"] == "loss_periodic"]
    assert found["value"].tolist() == [period]


def test_a_fixed_order_of_mixed_batches_is_no_saw():
    rng = np.random.default_rng(1)
    hardness = np.exp(0.5 * rng.standard_normal(30))
    losses = converging(0.05) * np.tile(hardness, STEPS // 30)
    assert course_of(losses) == []


def test_two_rounds_are_no_period_and_one_burst_is_no_saw():
    assert course_of(saw(110)) == []
    burst = converging() * np.where(np.arange(STEPS) % 60 >= 55, 6.0, 1.0)
    assert "loss_periodic" not in course_of(burst)


def test_a_learning_rate_that_goes_up_and_down_explains_the_saw():
    assert course_of(saw(40), rates=np.cos(np.arange(STEPS) % 40 / 40) * 0.1) == []
    assert course_of(saw(40), rates=np.full(STEPS, 0.1)) == ["loss_periodic"]


def falling(steps=STEPS, end=0.5, noise=0.03, seed=0):
    rng = np.random.default_rng(seed)
    return np.linspace(2.3, 2.3 * end, steps) + noise * rng.standard_normal(steps)


@pytest.mark.parametrize("seed", range(3))
def test_a_straight_fall_to_the_end_is_still_falling(seed):
    table = events_of(falling(seed=seed))
    found = table[table["event_type"] == "loss_still_falling"]
    assert found["step_end"].tolist() == [STEPS - 1]
    assert found["value"].iloc[0] == pytest.approx(0.1, rel=0.3)  # 0.115 of 1.15


def test_what_levels_off_or_has_come_down_is_no_end_too_early():
    assert course_of(np.concatenate([falling(160), np.full(80, 1.15)])) == []
    assert course_of(falling(end=0.1)) == []


def test_noise_without_a_trend_does_not_fall():
    for seed in range(20):
        noise = np.random.default_rng(seed).standard_normal(STEPS)
        assert course_of(2.3 + 0.2 * noise) == []


def test_losses_that_say_nothing_about_progress_are_left_alone():
    for losses in (falling(), spiked(at=(100, 170)), saw(25)):
        assert course_of(losses, optimizers=2) == []  # generator and discriminator
        assert course_of(losses - 1.5) == []  # a loss that changes its sign


def test_the_slope_is_the_median_of_all_pairs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.standard_normal(9)
        pairs = [(values[j] - values[i]) / (j - i) for j in range(9) for i in range(j)]
        slope, share = theil_sen(values)
        assert slope == pytest.approx(np.median(pairs))
        assert share == pytest.approx(np.mean(np.array(pairs) < 0))


def test_noise_is_measured_beside_trend_and_jumps():
    rng = np.random.default_rng(0)
    values = np.linspace(5, 1, 400) ** 2 + 0.3 * rng.standard_normal(400)
    values[200] += 50
    assert noise_of(values) == pytest.approx(0.3, rel=0.15)


def train(order, epochs, rate=3e-3):
    """Five classes of 80 samples each, in batches of 16."""
    generator = torch.Generator().manual_seed(3)
    centres = 2 * torch.randn(5, 10, generator=generator)
    labels = torch.arange(5).repeat_interleave(80)
    inputs = centres[labels] + torch.randn(400, 10, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with NeuralDbg(model) as dbg:
        for _ in range(epochs):
            rows = torch.randperm(400, generator=generator) if order == "shuffled" else None
            for batch in (torch.arange(400) if rows is None else rows).split(16):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
    assert dbg.faults == []
    return {name for name in dbg.events["event_type"] if name in OF_THE_COURSE}


def test_sorted_data_saw_and_shuffled_data_do_not():
    assert train("sorted", epochs=8, rate=1e-3) == {"loss_periodic"}
    assert train("shuffled", epochs=8, rate=1e-3) == set()


def test_a_run_that_stops_early_is_told_from_one_that_is_done():
    assert train("shuffled", epochs=6, rate=4e-4) == {"loss_still_falling"}
    assert train("shuffled", epochs=12, rate=4e-3) == set()


@pytest.mark.parametrize(
    "recipe",
    ["mlp-digits-sgd", "mlp-diabetes-adam", "cnn_batchnorm-textures-adamw", "lstm-tokens-rmsprop"],
)
def test_healthy_networks_have_an_ordinary_course(recipe):
    events = watch(HEALTHY_RECIPES[recipe], seed=7).debugger.events
    assert OF_THE_COURSE.isdisjoint(set(events["event_type"]))
