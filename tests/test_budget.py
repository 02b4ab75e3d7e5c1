"""The budget keeps capture within its share of the time, and the account says what was spent."""

import math

import pytest
import torch
from torch import nn

from neuraldbg import NeuralDbg
from neuraldbg.capture import Budget, Schedule
from neuraldbg.capture.budget import START_STEPS
from neuraldbg.capture.trip import CLOSE_STEPS, REST_STEPS, Trip


def simulate(budget: Budget, steps: int, bare: float, light: float, dear: float) -> float:
    """Share of the bare time spent after the start, by a clock of our own."""
    spent = 0.0
    for step in range(steps):
        captured = budget.captures(step)
        cost = dear if captured else light
        spent += cost * (step >= START_STEPS)
        budget.note_step(bare + cost, cost, captured)
    return spent / (bare * (steps - START_STEPS))


@pytest.mark.parametrize("bare", [1e-3, 2e-2, 1.0])
@pytest.mark.parametrize("overhead", [0.005, 0.02, 0.1])
def test_the_share_of_the_time_stays_within_the_budget(bare, overhead):
    light, dear = 0.1 * overhead * bare, 2e-3
    share = simulate(Budget(overhead=overhead), 6_000, bare, light, dear)
    longest = light / bare + dear / 1024 / bare  # it never stops looking altogether
    assert share <= max(overhead, longest) * 1.05


def test_a_looser_budget_looks_more_often():
    periods = []
    for overhead in (0.005, 0.02, 0.08):
        budget = Budget(overhead=overhead)
        simulate(budget, 2_000, 5e-3, 1e-5, 2e-3)
        periods.append(budget.period)
    assert periods == sorted(periods, reverse=True)
    assert len(set(periods)) == 3


def test_cheap_captures_are_dense_and_dear_ones_rare():
    cheap, dear = Budget(), Budget()
    simulate(cheap, 1_000, bare=1.0, light=1e-5, dear=5e-3)
    simulate(dear, 1_000, bare=1e-3, light=1e-6, dear=5e-2)
    assert cheap.period == 1
    assert dear.period == 1024


def test_a_dear_start_is_cut_short():
    budget = Budget()
    captured = []
    for step in range(64):
        now = budget.captures(step)
        captured += [step] * now
        budget.note_step(1.0 + 0.3 * now, 0.3 * now, now)
    assert captured == [0, 1, 2, 3, 16, 32, 48]


def test_hidden_costs_of_captured_steps_count():
    """Hooks slow a step down beyond what is measured inside them."""
    budget = Budget(overhead=0.02)
    for step in range(2_000):
        captured = budget.captures(step)
        budget.note_step(5e-3 + (4e-3 if captured else 0.0), 1e-4 if captured else 1e-5, captured)
    assert budget.period >= 4e-3 / (0.02 * 5e-3)


def test_ranks_with_budgets_of_their_own_meet_on_common_steps():
    fast, slow = Budget(), Budget()
    simulate(fast, 3_000, 1e-2, 1e-5, 1e-3)
    simulate(slow, 3_000, 1e-3, 1e-5, 1e-3)
    assert fast.period < slow.period
    assert slow.period % fast.period == 0


@pytest.mark.parametrize("overhead", [0.0, -0.1, math.nan, math.inf])
def test_an_impossible_budget_is_refused(overhead):
    with pytest.raises(ValueError, match="share of the step time above 0"):
        NeuralDbg(nn.Linear(1, 1), overhead=overhead)


def test_noise_is_no_shock_and_a_jump_is():
    generator = torch.Generator().manual_seed(0)
    losses = (1.0 + 0.3 * torch.randn(2_000, generator=generator)).clamp(min=0.05).tolist()
    trip = Trip()
    for step, loss in enumerate(losses):
        trip.note(step, loss, 1.0)
        assert not trip.active(step + 1)
    trip.note(len(losses), 20.0, 1.0)
    assert trip.active(len(losses) + 1)
    assert not trip.active(len(losses) + 1 + CLOSE_STEPS)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf)])
def test_the_first_value_that_is_not_finite_is_a_shock_and_only_the_first(loss, norm):
    trip = Trip()
    for step in range(10):
        trip.note(step, 1.0, 1.0)
    trip.note(10, loss, norm)
    assert trip.active(11)
    for step in range(11, 11 + REST_STEPS + 10):
        trip.note(step, loss, norm)
    assert not trip.active(11 + REST_STEPS + 10)


def test_a_run_that_is_nothing_but_shocks_stays_cheap():
    trip, watched = Trip(), 0
    for step in range(4_000):
        trip.note(step, 10.0 ** (step // 20 % 2 * 3), 1.0)
        watched += trip.active(step + 1)
    assert watched <= 4_000 / REST_STEPS * (CLOSE_STEPS + 1) + CLOSE_STEPS


def train(model: nn.Module, steps: int, shock: int | None = None, **options: object) -> NeuralDbg:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NeuralDbg(model, **options) as dbg:
        for step in range(steps):
            inputs = torch.randn(16, 4) * (30.0 if step == shock else 1.0)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
            optimizer.step()
    assert dbg.faults == []
    return dbg


def test_a_shock_is_looked_at_step_by_step():
    schedule = Schedule(dense_steps=1, periods=((1, 50),))
    dbg = train(nn.Linear(4, 1), 120, shock=70, schedule=schedule)
    captured = set(dbg.series.loc[dbg.series["kind"] == "output", "step"])
    assert captured == {0, 50, 100, *range(71, 71 + CLOSE_STEPS)}


def test_every_step_has_its_loss_gradient_norm_and_flag():
    dbg = train(nn.Linear(4, 1), 200, schedule=Schedule(dense_steps=1, periods=((1, 50),)))
    loss = dbg.series[dbg.series["kind"] == "loss"]
    steps = dbg.series[dbg.series["kind"] == "optimizer"]
    assert loss["step"].tolist() == steps["step"].tolist() == list(range(200))
    assert loss["value"].notna().all()
    assert (loss["norm"] > 0).all()
    assert (steps["step_applied"] == 1).all()


def test_the_account_counts_steps_and_time():
    dbg = train(nn.Linear(4, 1), 100, schedule=Schedule(dense_steps=10, periods=((10, 30),)))
    cost = dbg.cost
    assert (cost.steps, cost.captured_steps, cost.period) == (100, 13, 30)
    assert 0 < cost.seconds < cost.run_seconds
    assert cost.share == pytest.approx(cost.seconds / (cost.run_seconds - cost.seconds))
    again = dbg.cost
    assert (again.seconds, again.run_seconds) == (cost.seconds, cost.run_seconds)


def test_the_account_of_a_run_that_has_not_begun_is_empty():
    cost = NeuralDbg(nn.Linear(1, 1)).cost
    assert (cost.seconds, cost.steps, cost.captured_steps, cost.share) == (0.0, 0, 0, 0.0)
