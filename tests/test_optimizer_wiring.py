"""The optimizer's surroundings: each fault of order, scale or settings beside what is ordinary."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import clip_grad_norm_ as clip_imported_early

from neuraldbg import EventType, NeuralDbg
from neuraldbg.capture import transfer
from neuraldbg.capture.detectors import (
    detect_learning_rate_starts_high,
    detect_update_spiking,
)
from neuraldbg.capture.panel import Panels
from neuraldbg.capture.probe import Deferred
from neuraldbg.series import build_series
from neuraldbg.thresholds import Thresholds

MINE = {
    "gradient_reset_early",
    "micro_batches_summed",
    "gradient_clipped",
    "gradient_clipped_scaled",
    "step_skipped",
    "learning_rate_falling",
    "learning_rate_starts_high",
    "epsilon_lost",
    "weight_decay_dominant",
    "weights_shrinking",
    "update_spiking",
    "gradient_spiking",
}

Optimizer = torch.optim.Optimizer
Scheduler = torch.optim.lr_scheduler.LRScheduler


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def batches(steps: int, size: int = 16) -> Iterable[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(size, 8, generator=generator)
        yield x, torch.tanh(x[:, :1] - x[:, 1:2])


def events_of(debugger: NeuralDbg) -> dict[str, list[float]]:
    assert debugger.faults == []
    found: dict[str, list[float]] = {}
    for event in debugger.events.itertuples():
        if event.event_type in MINE:
            found.setdefault(str(event.event_type), []).append(float(event.value))
    return found


def optimizer_rows(debugger: NeuralDbg) -> pd.DataFrame:
    series = debugger.series
    return series[(series["kind"] == "optimizer") & series["layer"].isna()].set_index("step")


def train(
    steps: int = 60,
    of: Callable[[nn.Module], Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05
    ),
    before_step: Callable[[nn.Module], object] = lambda _: None,
    schedule: Callable[[Optimizer], Scheduler] | None = None,
    model: nn.Module | None = None,
) -> NeuralDbg:
    model = model or network()
    optimizer = of(model)
    scheduler = None if schedule is None else schedule(optimizer)
    with NeuralDbg(model) as debugger:
        for x, y in batches(steps):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            before_step(model)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return debugger


# Settings ---------------------------------------------------------------------------------------


def test_settings_stand_on_every_step_s_row() -> None:
    debugger = train(
        steps=80, of=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.8, 0.95))
    )
    rows = optimizer_rows(debugger)
    assert len(rows) == 80
    for column, value in {
        "value": 1e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01,
    }.items():  # fmt: skip
        assert rows[column].to_numpy() == pytest.approx(np.full(80, value))
    assert rows["momentum"].isna().all()
    assert events_of(debugger) == {}


def test_groups_that_differ_have_rows_of_their_own_and_tell_layers_what_holds_them() -> None:
    def of(model: nn.Module) -> Optimizer:
        assert isinstance(model, nn.Sequential)
        body, head = model[0].parameters(), model[2].parameters()
        groups = [{"params": body, "momentum": 0.5}, {"params": head, "lr": 0.1}]
        return torch.optim.SGD(groups, lr=0.01, weight_decay=1e-4)

    series = train(steps=5, of=of).series
    first = series[series["step"] == 0].set_index("layer")
    assert first.loc["group 0", ["value", "momentum"]].tolist() == pytest.approx([0.01, 0.5])
    assert first.loc["group 1", ["value", "momentum"]].tolist() == pytest.approx([0.1, 0.0])
    parameters = series[series["kind"] == "parameter"].groupby("layer", observed=True)
    assert parameters["learning_rate"].first().to_dict() == pytest.approx({"0": 0.01, "2": 0.1})


def test_groups_that_are_alike_have_no_rows() -> None:
    def of(model: nn.Module) -> Optimizer:
        return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.01)

    series = train(steps=5, of=of).series
    assert series.loc[series["kind"] == "optimizer", "layer"].isna().all()


# Clipping ---------------------------------------------------------------------------------------


def test_the_exact_norm_before_clipping_and_the_threshold_are_told() -> None:
    norms: list[float] = []

    def clip(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
        clip_imported_early(model.parameters(), 0.5)

    debugger = train(steps=70, before_step=clip)
    rows = optimizer_rows(debugger)
    assert rows["norm_before_clip"].to_numpy() == pytest.approx(norms, rel=1e-4)
    assert set(rows["clip_threshold"]) == {0.5}
    assert rows["clipped"].to_numpy().tolist() == [float(norm > 0.5) for norm in norms]
    assert 0 < rows["clipped"].mean() < 1
    assert events_of(debugger) == {}


def test_clipping_far_below_every_norm_is_found() -> None:
    found = events_of(train(before_step=lambda m: clip_imported_early(m.parameters(), 1e-3)))
    assert set(found) == {"gradient_clipped"}
    assert found["gradient_clipped"][0] > 30


def test_clipping_of_another_model_is_not_ours() -> None:
    other = network()
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    debugger = train(before_step=lambda _: clip_imported_early(other.parameters(), 1e-6))
    assert optimizer_rows(debugger)["clip_threshold"].isna().all()


def test_clipping_by_value_tells_its_threshold() -> None:
    debugger = train(steps=5, before_step=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.25))
    assert set(optimizer_rows(debugger)["clip_threshold"]) == {0.25}
    assert events_of(debugger) == {}


def test_nothing_stays_replaced_after_runs_that_overlap_or_fail() -> None:
    from torch.amp.grad_scaler import GradScaler
    from torch.nn.utils import clip_grad

    def seen() -> list[object]:
        return [clip_grad._clip_grads_with_norm_, nn.utils.clip_grad_value_, GradScaler.step]

    before = seen()
    first, second = NeuralDbg(network()), NeuralDbg(network())
    with pytest.raises(RuntimeError, match="in the loop"), first:  # noqa: PT012
        second.__enter__()
        assert all(now is not then for now, then in zip(seen(), before, strict=True))
        raise RuntimeError("in the loop")
    assert all(now is not then for now, then in zip(seen(), before, strict=True))
    second.__exit__(None, None, None)
    assert all(now is then for now, then in zip(seen(), before, strict=True))


# Loss scaling -----------------------------------------------------------------------------------


def train_scaled(
    scale: float,
    unscale: bool = False,
    clip: float | None = None,
    steps: int = 60,
    spoil: Callable[[int], bool] = lambda _: False,
    fused: bool = False,
) -> NeuralDbg:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with NeuralDbg(model) as debugger:
        for step, (x, y) in enumerate(batches(steps)):
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            if spoil(step):
                model[0].weight.grad[0, 0] = torch.inf
            if unscale:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip_imported_early(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return debugger


def test_clipping_before_unscaling_is_found() -> None:
    found = events_of(train_scaled(2.0**12, clip=1.0))
    assert set(found) == {"gradient_clipped_scaled"}


def test_clipping_after_unscaling_is_no_fault() -> None:
    debugger = train_scaled(2.0**12, unscale=True, clip=1.0)
    assert events_of(debugger) == {}
    assert set(optimizer_rows(debugger)["loss_scale"]) == {2.0**12}


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_the_scaler_skips_are_steps_that_were_not_applied(fused: bool) -> None:
    debugger = train_scaled(2.0**12, spoil=lambda step: step % 3 == 1, fused=fused)
    rows = optimizer_rows(debugger)
    assert len(rows) == 60
    assert rows["step_applied"].to_numpy().tolist() == [float(s % 3 != 1) for s in range(60)]
    assert set(events_of(debugger)) == {"step_skipped"}


def test_a_scale_that_comes_down_in_the_first_steps_is_ordinary() -> None:
    debugger = train_scaled(2.0**12, spoil=lambda step: step < 6)
    assert optimizer_rows(debugger)["step_applied"].sum() == 54
    assert events_of(debugger) == {}


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_still_scaled_say_so(fused: bool) -> None:
    series = train_scaled(2.0**12, steps=10, fused=fused).series
    flags = series.loc[series["kind"] == "gradient", "loss_scaled"]
    assert (flags == 1).all() if fused else flags.isna().all()


def test_training_with_a_scaler_and_clipping_is_unchanged() -> None:
    def run(watched: bool) -> Tensor:
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
        debugger = NeuralDbg(model)
        if watched:
            debugger.__enter__()
        for x, y in batches(40):
            for part in range(2):
                scaler.scale(F.mse_loss(model(x[part::2]), y[part::2]) / 2).backward()
            scaler.unscale_(optimizer)
            clip_imported_early(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if watched:
            debugger.__exit__(None, None, None)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(watched=True), run(watched=False))


# Accumulation -----------------------------------------------------------------------------------


def accumulate(
    micro: int = 4,
    factor: float = 1.0,
    reset_between: bool = False,
    to_none: bool = True,
    average_gradients: bool = False,
    reset_before_step: bool = False,
    same_batch: bool = False,
    steps: int = 40,
) -> dict[str, list[float]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = iter(batches(steps * micro, 4))
    with NeuralDbg(model) as debugger:
        for _ in range(steps):
            x, y = next(data)
            for number in range(micro):
                if number and not same_batch:
                    x, y = next(data)
                if reset_between:
                    optimizer.zero_grad(set_to_none=to_none)
                (F.mse_loss(model(x), y) * factor).backward()
            if average_gradients:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad /= micro
            if reset_before_step:
                optimizer.zero_grad(set_to_none=to_none)
            optimizer.step()
            optimizer.zero_grad()
    return events_of(debugger)


def test_micro_batches_that_are_summed_are_found() -> None:
    assert accumulate() == {"micro_batches_summed": [4.0]}


def test_averaged_micro_batches_are_no_fault() -> None:
    assert accumulate(factor=1 / 4) == {}


def test_gradients_averaged_by_hand_are_no_fault() -> None:
    assert accumulate(average_gradients=True) == {}


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_reset_between_micro_batches_are_found(to_none: bool) -> None:
    found = accumulate(factor=1 / 4, reset_between=True, to_none=to_none)
    assert found == {"gradient_reset_early": [1.0]}


def test_two_passes_over_the_same_batch_may_reset_between() -> None:
    assert accumulate(micro=2, reset_between=True, same_batch=True) == {}


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_reset_before_the_step_are_found(to_none: bool) -> None:
    found = accumulate(micro=1, reset_before_step=True, to_none=to_none)
    assert found == {"gradient_reset_early": [1.0]}


def test_two_losses_with_passes_of_their_own_are_no_fault() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NeuralDbg(model) as debugger:
        for x, y in batches(30):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            model(x + 0.1).abs().mean().backward()
            optimizer.step()
    assert events_of(debugger) == {}


def test_a_closure_that_is_called_again_and_again_is_no_fault() -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    with NeuralDbg(model) as debugger:
        for x, y in batches(20):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert events_of(debugger) == {}


def test_an_adversarial_loop_is_no_fault() -> None:
    model = nn.ModuleDict({"G": network(), "D": nn.Linear(1, 1)})
    of_generator = torch.optim.Adam(model["G"].parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(model["D"].parameters(), lr=1e-3)
    with NeuralDbg(model) as debugger:
        for x, y in batches(30):
            of_critic.zero_grad()
            F.softplus(-model["D"](y)).mean().backward()
            F.softplus(model["D"](model["G"](x).detach())).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            F.softplus(-model["D"](model["G"](x))).mean().backward()
            of_generator.step()
    assert events_of(debugger) == {}


@pytest.mark.parametrize("of", [torch.optim.SGD, torch.optim.Adam])
def test_accumulation_and_clipping_make_no_device_wait(
    of: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def depart(step: int, rows: list[Deferred], tensors: list[Tensor]) -> transfer._Journey:
        size = sum(tensor.numel() for tensor in tensors)
        return transfer._Journey(step, rows, torch.zeros(size, device="cpu"))

    monkeypatch.setattr(transfer, "_depart", depart)
    with torch.device("meta"):  # any read of a value raises there
        model = network()
        optimizer = of(model.parameters(), lr=0.01)
        with NeuralDbg(model) as debugger:
            for step in range(30):
                for _ in range(3):
                    (model(torch.randn(4, 8)).mean() / 3).backward()
                clip_imported_early(model.parameters(), 1.0)
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert debugger.faults == []


# Learning rate ----------------------------------------------------------------------------------


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def test_a_rate_that_decays_per_batch_instead_of_per_epoch_is_found() -> None:
    debugger = train(
        steps=200, of=adam, schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)
    )
    assert set(events_of(debugger)) == {"learning_rate_falling"}
    [event] = debugger.events.query("event_type == 'learning_rate_falling'").itertuples()
    assert 15 <= event.step_start <= 30


SCHEDULES: dict[str, Callable[[Optimizer], Scheduler]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 200),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, total_steps=201),
    "stages": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [100, 150], 0.1),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 200),
    "per epoch": lambda o: torch.optim.lr_scheduler.StepLR(o, 20, 0.7),
    "warm-up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, step / 20)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_planned_schedules_are_no_fault(name: str) -> None:
    assert events_of(train(steps=200, of=adam, schedule=SCHEDULES[name])) == {}


# Weight decay -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=1.0),
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=30.0),
    ],
    ids=["L2", "decoupled"],
)
def test_weight_decay_that_outweighs_the_gradient_is_found(
    of: Callable[[nn.Module], Optimizer],
) -> None:
    assert {"weight_decay_dominant", "weights_shrinking"} <= set(events_of(train(150, of=of)))


@pytest.mark.parametrize(
    "of",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
        lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, weight_decay=0.1),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    ],
    ids=["L2", "decoupled", "none"],
)
def test_ordinary_weight_decay_is_no_fault(of: Callable[[nn.Module], Optimizer]) -> None:
    assert events_of(train(150, of=of)) == {}


# Spikes, precision ------------------------------------------------------------------------------


def adam_series(beta2: float, seed: int = 0) -> pd.DataFrame:
    """Adam on 64 weights: ordinary gradients, a long quiet stretch, ordinary ones again."""
    rng = np.random.default_rng(seed)
    moment, square = np.zeros(64), np.zeros(64)
    updates, norms = [], []
    for step in range(900):
        gradient = rng.standard_normal(64) * (1e-4 if 100 <= step < 880 else 1.0)
        if step >= 880:
            gradient = np.abs(gradient)
        moment = 0.9 * moment + 0.1 * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        adapted = np.sqrt(square / (1 - beta2 ** (step + 1))) + 1e-8
        updates.append(float(np.sqrt(np.mean((moment / adapted) ** 2))) * 1e-3)
        norms.append(float(np.linalg.norm(gradient)))
    parts = [
        {"kind": "update", "rms": updates},
        {"kind": "gradient", "norm": norms},
        {"kind": "parameter", "learning_rate": [1e-3] * 900},
        {"kind": "optimizer", "beta2": [beta2] * 900},
    ]
    tables = []
    for part in parts:
        layer = None if part["kind"] == "optimizer" else "fc"
        keys = {"step": range(900), "rank": [0] * 900, "layer": [layer] * 900}
        kind = [part["kind"]] * 900
        tables.append(build_series({**keys, "layer_index": [0] * 900, **part, "kind": kind}))
    return pd.concat(tables, ignore_index=True).astype({"layer": "category", "kind": "category"})


def test_a_second_moment_that_forgets_in_a_quiet_stretch_makes_updates_spike() -> None:
    events = list(detect_update_spiking(Panels(adam_series(beta2=0.99)), Thresholds()))
    assert {event.event_type for event in events} == {EventType.UPDATE_SPIKING}
    assert all(880 <= event.step_start < 890 for event in events)


def test_updates_of_a_second_moment_that_keeps_up_do_not_spike() -> None:
    assert list(detect_update_spiking(Panels(adam_series(beta2=0.9)), Thresholds())) == []


@pytest.mark.parametrize(("steps", "found"), [((50, 70), True), ((50,), False)])
def test_gradients_that_jump_above_all_before_again_and_again_are_found(
    steps: tuple[int, ...], found: bool
) -> None:
    def spoil() -> Callable[[nn.Module], None]:
        count = iter(range(1000))

        def scale(model: nn.Module) -> None:
            if next(count) in steps:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad *= 100

        return scale

    debugger = train(80, of=lambda m: torch.optim.SGD(m.parameters(), lr=1e-3), before_step=spoil())
    assert ("gradient_spiking" in events_of(debugger)) == found


@pytest.mark.parametrize(
    ("dtype", "eps", "lost"),
    [
        (torch.float16, 1e-8, True),
        (torch.float16, 1e-4, False),
        (torch.bfloat16, 1e-8, False),
        (torch.float32, 1e-8, False),
    ],
)
def test_an_eps_below_the_number_format_is_found(
    dtype: torch.dtype, eps: float, lost: bool
) -> None:
    model = network().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=eps)
    with NeuralDbg(model) as debugger:
        for x, y in batches(3):
            optimizer.zero_grad()
            F.mse_loss(model(x.to(dtype)).float(), y).backward()
            optimizer.step()
    events = debugger.events.query("event_type == 'epsilon_lost'")
    assert len(events) == lost
    if lost:
        assert events["detail"].tolist() == ["float16"]


# A start at full rate ---------------------------------------------------------------------------


def full_rate_series(loss_at_end: float, warm_up: bool = False) -> pd.DataFrame:
    """A loss that jumps in the first steps, with updates that are large there only."""
    steps = np.arange(100)
    loss = np.where(steps < 4, 2.3 + 0.7 * steps, loss_at_end)
    ratio = np.where(steps < 6, 0.08, 4e-3)
    rates = np.where(steps < 20, 1e-2 * (steps + 1) / 20, 1e-2) if warm_up else np.full(100, 1e-2)
    keys = {"step": steps, "rank": [0] * 100, "layer_index": [0] * 100}
    tables = [
        build_series({**keys, "layer": [layer] * 100, "kind": [kind] * 100, column: values})
        for kind, layer, column, values in (
            ("loss", None, "value", loss),
            ("optimizer", None, "value", rates),
            ("update", "fc", "ratio", ratio),
        )
    ]
    return pd.concat(tables, ignore_index=True).astype({"layer": "category", "kind": "category"})


@pytest.mark.parametrize(
    ("loss_at_end", "warm_up", "found"),
    [(2.4, False, True), (0.4, False, False), (2.4, True, False)],
    ids=["stays up", "recovers", "was warmed up"],
)
def test_first_updates_far_above_the_rest_are_found_where_the_loss_stays_up(
    loss_at_end: float, warm_up: bool, found: bool
) -> None:
    panels = Panels(full_rate_series(loss_at_end, warm_up))
    events = list(detect_learning_rate_starts_high(panels, Thresholds()))
    assert [event.event_type for event in events] == (
        [EventType.LEARNING_RATE_STARTS_HIGH] if found else []
    )
