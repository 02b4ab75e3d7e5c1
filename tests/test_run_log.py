"""The log's rows against plain computations: merging, thinning, draining, bounded bytes."""

import numpy as np
import pandas as pd
import torch
from torch import nn

from neuraldbg import NeuralDbg
from neuraldbg.capture import Schedule
from neuraldbg.capture.blocks import Block, merge_blocks
from neuraldbg.capture.layers import find_layers
from neuraldbg.capture.run_log import MAX_FRAME_BYTES, MAX_PULSES, Pulse, RunLog
from neuraldbg.series import Kind

LAYERS = find_layers([nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))])
A, B, C = LAYERS


def block(kind: Kind, layers: list, **columns: list) -> Block:
    return Block(0, kind, layers, {name: np.array(values) for name, values in columns.items()})


def test_rows_of_one_layer_and_kind_become_one_and_later_numbers_win():
    log = RunLog()
    log.add_frame(
        [
            block(Kind.OUTPUT, [A, B], rms=[1.0, 2.0], mean=[0.1, np.nan]),
            block(Kind.GRADIENT, [A], norm=[5.0]),
            block(Kind.OUTPUT, [B, C], mean=[0.2, 0.3], detail=["float16", None]),
        ],
        step=3,
    )
    table = log.series()
    output = table[table["kind"] == "output"]
    assert output["layer"].tolist() == ["0", "1", "2"]
    np.testing.assert_array_equal(output["rms"], [1.0, 2.0, np.nan])
    np.testing.assert_allclose(output["mean"], [0.1, 0.2, 0.3], rtol=1e-6)
    assert output["detail"].tolist()[1] == "float16"
    assert (table["step"] == 3).all()
    assert len(table) == 4


def test_two_steps_of_optimizers_that_see_the_same_layer_are_one_row():
    log = RunLog()
    log.add_frame([block(Kind.PARAMETER, [A, B], rms=[1.0, 2.0], gain=[0.5, 0.6])], step=0)
    log.add_frame([block(Kind.PARAMETER, [B, C], rms=[3.0, 4.0])], step=0)
    table = log.series()
    assert table["layer"].tolist() == ["0", "1", "2"]
    assert table["rms"].tolist() == [1.0, 3.0, 4.0]
    np.testing.assert_allclose(table["gain"], [0.5, 0.6, np.nan], rtol=1e-6)


def test_inputs_targets_and_evaluation_rows_stay_apart():
    log = RunLog()
    log.add_frame([block(Kind.INPUT, [A, A], rms=[1.0, 2.0], target=[0.0, 1.0])], step=0)
    log.add_rows([block(Kind.INPUT, [A], rms=[3.0], evaluation=[1.0])])
    assert sorted(log.series()["rms"]) == [1.0, 2.0, 3.0]


def test_what_is_thinned_away_leaves_its_extremes():
    generator = np.random.default_rng(0)
    values = generator.lognormal(size=1_000).astype(np.float32)
    values[333], values[444] = 1e4, 1e-4
    log = RunLog()
    log.frames.limit = 32
    for step, value in enumerate(values):
        log.add_frame([block(Kind.OUTPUT, [A], rms=[value])], step)
    table = log.series()
    assert len(table) <= 32
    assert table["highest"].max() == np.float32(1e4)
    assert table["lowest"].min() == np.float32(1e-4)
    assert (table["lowest"] <= table["rms"]).all()
    assert (table["rms"] <= table["highest"]).all()
    age = np.diff(table["step"])
    assert age[-4:].max() == 1  # the recent end is complete, the past ever sparser
    assert age.max() > 16


def pulse(step: int, loss: float) -> Pulse:
    return Pulse(step, 0, loss, 1.0, 0.1, 1)


def test_every_loss_is_kept_until_there_are_too_many_and_then_its_extremes():
    log = RunLog()
    for step in range(3 * MAX_PULSES):
        log.add_pulse(pulse(step, 100.0 if step == 5_001 else 1.0))
    losses = log.series()
    losses = losses[losses["kind"] == "loss"]
    assert len(losses) <= MAX_PULSES
    assert losses["highest"].max() == 100.0
    assert losses["lowest"].min() == 1.0


def test_draining_gives_every_row_once_before_any_thinning():
    log = RunLog(streaming=True)
    log.frames.limit = 16
    drained = []
    for step in range(100):
        log.add_frame([block(Kind.OUTPUT, [A], rms=[step])], step)
        log.add_pulse(pulse(step, float(step)))
        if step % 7 == 0:
            drained.append(log.drain_rows())
    log.add_rows([block(Kind.METRIC, [None], value=[0.5])])
    drained.append(log.drain_rows())
    table = pd.concat(drained)
    assert table.loc[table["kind"] == "output", "rms"].tolist() == list(range(100))
    assert table.loc[table["kind"] == "loss", "value"].tolist() == list(range(100))
    assert (table["kind"] == "metric").sum() == 1
    assert log.drain_rows().empty
    assert log.undrained == 0


def test_models_with_many_layers_keep_fewer_frames_not_more_bytes():
    layers = find_layers([nn.Sequential(*[nn.Linear(2, 2) for _ in range(2_000)])])
    columns = {name: np.ones(2_000) for name in ("rms", "mean", "std", "max_abs", "zero_fraction")}
    log = RunLog()
    for step in range(600):
        log.add_frame([Block(step, Kind.OUTPUT, layers, dict(columns))], step)
    held = sum(b.size for frame in log.frames.items for b in frame)
    assert held <= MAX_FRAME_BYTES * 1.5  # window extremes come on top


def test_merging_nothing_gives_nothing():
    assert merge_blocks([], 0) == []
    assert RunLog().series().empty


def test_events_of_a_thinned_run_are_those_of_the_whole_run():
    """A layer that dies for a while, long before the log is thinned."""

    def run(limit: int | None) -> pd.DataFrame:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with NeuralDbg(model, schedule=Schedule(dense_steps=10_000)) as dbg:
            if limit is not None:
                dbg._recorder.log.frames.limit = limit
            for step in range(300):
                inputs = torch.randn(64, 4)
                if step in (60, 140):
                    with torch.no_grad():
                        model[2].bias.sub_(100.0)
                if step in (90, 165):
                    with torch.no_grad():
                        model[2].bias.add_(100.0)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), inputs[:, :1]).backward()
                optimizer.step()
        assert dbg.faults == []
        spans = dbg.events[dbg.events["event_type"] == "activation_dead"]
        return spans[["layer", "step_start", "step_end"]].reset_index(drop=True)

    whole, thinned = run(None), run(40)
    assert len(whole) == 2
    pd.testing.assert_frame_equal(thinned, whole)
