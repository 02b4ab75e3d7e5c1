"""Several processes train one model, each watched on its own, and their records make one run."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pandas as pd
import pytest
from torch import nn

from neuraldbg import EventType
from neuraldbg.capture.event_detection import detect_events
from neuraldbg.capture.layers import find_layers
from neuraldbg.capture.ranks import Rank, current_rank
from neuraldbg.evaluation.distributed_programs import read_series
from neuraldbg.rank_merge import combine_shards, view_ranks
from neuraldbg.series import build_series

MODULE = "neuraldbg.evaluation.distributed_programs"
OF_TWO = (
    "replicated",
    "accumulating",
    "bypassed",
    "unequal_start",
    "scaled_on_one_rank",
    "sharded",
    "sharded_as_one",
)
OF_FOUR = ("scaled_on_one_rank", "sharded")
HEALTHY = [(2, "replicated"), (2, "accumulating"), (2, "sharded"), (2, "sharded_as_one"),
           (4, "sharded")]  # fmt: skip
ALL = [(2, name) for name in OF_TWO] + [(4, name) for name in OF_FOUR]


@dataclass(frozen=True)
class Run:
    """What the ranks of one program left: their series as one table, and what each measured."""

    series: pd.DataFrame
    told: list[dict]

    @property
    def departures(self) -> pd.DataFrame:
        events = detect_events(self.series)
        return events[events["event_type"] == EventType.RANKS_DIFFER.value]


@cache
def launch(processes: int) -> Path:
    """Run all programs of that many processes by torchrun, once, and give where they wrote."""
    folder = Path(mkdtemp(prefix="ranks-"))
    names = (*OF_TWO, "rank_dies") if processes == 2 else OF_FOUR
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(processes), "-m", MODULE, str(folder), *names,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return folder


def run(processes: int, name: str) -> Run:
    folder = launch(processes)
    told = [json.loads((folder / f"{name}-{r}.json").read_text()) for r in range(processes)]
    return Run(read_series(folder, name), told)


# The training ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "name"), ALL)
def test_no_rank_trains_differently_or_communicates_more_while_watched(processes, name):
    for told in run(processes, name).told:
        bare, watched = told["weights"]
        assert bare == watched
        bare, watched = told["collectives"]
        assert bare == watched
        assert (bare > 0) == (name != "bypassed")
        assert told["faults"] == []
        assert told["steps"] == 12


@pytest.mark.parametrize(("processes", "name"), ALL)
def test_each_rank_records_its_own(processes, name):
    found = run(processes, name)
    losses = found.series[found.series["kind"] == "loss"].pivot(
        index="step", columns="rank", values="value"
    )
    assert losses.shape == (12, processes)
    assert (losses.nunique(axis=1) == processes).all()
    what = "local shards only" if "sharded" in name else "its own batches only"
    assert [told["coverage"] for told in found.told] == [
        f"rank {rank} of {processes}, {what}" for rank in range(processes)
    ]


def test_layers_have_the_names_of_the_bare_model_under_the_wrapper():
    wrapped, bare = run(2, "replicated").series, run(2, "accumulating").series
    assert set(wrapped["layer"].dropna()) == set(bare["layer"].dropna())
    parallel = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert [layer.name for layer in find_layers([parallel])] == ["0", "1"]


def test_when_a_rank_dies_the_others_end_and_can_explain_their_own_run():
    folder = launch(2)
    told = json.loads((folder / "rank_dies-0.json").read_text())
    assert told["error"]
    assert told["causes"] > 1
    assert told["steps"] == 6
    assert not (folder / "rank_dies-1.json").exists()
    series = read_series(folder, "rank_dies")
    assert series.loc[series["kind"] == "loss", "step"].tolist()[:6] == [0, 1, 2, 3, 4, 5]


# Replicas that part ---------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "name"), HEALTHY)
def test_a_healthy_run_of_several_ranks_has_no_events(processes, name):
    assert detect_events(run(processes, name).series)["event_type"].tolist() == []


def test_gradients_that_are_never_averaged_show_from_the_first_step():
    [event] = run(2, "bypassed").departures.to_dict("records")
    assert (event["step_start"], event["step_end"], event["to_state"]) == (0, 11, "gradients")
    assert pd.isna(event["layer"])


def test_weights_that_differ_from_the_start_show_against_rank_0():
    [event] = run(2, "unequal_start").departures.to_dict("records")
    assert (event["step_start"], event["rank"], event["to_state"]) == (0, 1, "weights")


@pytest.mark.parametrize("processes", [2, 4])
def test_the_rank_layer_and_step_of_an_operation_on_one_rank_only_are_named(processes):
    [event] = run(processes, "scaled_on_one_rank").departures.to_dict("records")
    assert event["rank"] == processes - 1
    assert (event["layer"], event["step_start"], event["step_end"]) == ("body.0", 6, 11)


def ranks_series(weights, gradients=None, layers=("fc",)):
    """A series from arrays of shape (ranks, steps, layers)."""
    parts = []
    for kind, values in (("parameter", weights), ("gradient", gradients)):
        if values is None:
            continue
        ranks, steps, places = (axis.ravel() for axis in np.indices(np.shape(values)))
        flat = np.ravel(values)
        parts.append(
            {
                "rank": ranks, "step": steps, "layer": np.array(layers, object)[places],
                "layer_index": places, "kind": [kind] * len(flat),
                **({"rms": flat, "mean": 0 * flat, "max_abs": 2 * flat, "std": flat}
                   if kind == "parameter" else {"norm": flat}),
            }
        )  # fmt: skip
    return pd.concat([build_series(part) for part in parts], ignore_index=True).astype(
        {"layer": "category"}
    )


def departures(series):
    events = detect_events(series)
    return events[events["event_type"] == EventType.RANKS_DIFFER.value].to_dict("records")


DRIFT = np.linspace(1.0, 1.2, 20)[:, None]


def test_a_rank_whose_optimizer_stops_is_the_one_that_departs():
    weights = np.stack([DRIFT, DRIFT])
    weights[0, 12:] = DRIFT[11]
    [event] = departures(ranks_series(weights))
    assert (event["rank"], event["step_start"]) == (0, 12)


def test_steps_that_only_some_ranks_captured_are_not_compared():
    series = ranks_series(np.stack([DRIFT, np.where(np.arange(20)[:, None] < 10, 1, 2) * DRIFT]))
    assert [event["step_start"] for event in departures(series)] == [10]
    late = series["step"] >= 10
    assert departures(series[~(late & (series["rank"] == 0))]) == []


def test_ranks_that_average_their_weights_from_time_to_time_do_not_depart():
    apart = np.arange(20) % 8 / 100
    weights = np.stack([DRIFT, DRIFT + apart[:, None]])
    assert departures(ranks_series(weights)) == []


def test_layers_of_each_ranks_own_are_no_departure_but_unequal_replicas_are():
    weights = np.stack([np.hstack([DRIFT, DRIFT]), np.hstack([DRIFT, 1.1 * DRIFT])])
    equal = np.ones_like(weights)
    own = equal.copy()
    own[1, :, 1] = 1.3
    assert departures(ranks_series(weights, own, ("shared", "expert"))) == []
    [event] = departures(ranks_series(weights, equal, ("shared", "head")))
    assert (event["layer"], event["rank"]) == ("head", 1)


def test_rounding_is_no_departure():
    weights = np.stack([DRIFT, DRIFT * (1 + 2e-7)])
    assert departures(ranks_series(weights)) == []


# Events of several ranks ------------------------------------------------------------------------


def rank_losses(values_by_rank):
    parts = [
        build_series(
            {"step": np.arange(len(v)), "rank": [rank] * len(v), "layer": [None] * len(v),
             "layer_index": [-1] * len(v), "kind": ["loss"] * len(v), "value": v,
             "nonfinite_fraction": ~np.isfinite(v), "micro_batches": [1] * len(v)}
        )
        for rank, v in enumerate(values_by_rank)
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


FLAT, FALLING = np.full(60, 2.3), np.geomspace(2.3, 0.1, 60)


def test_what_most_ranks_show_is_one_event_and_what_few_show_is_none():
    assert detect_events(rank_losses([FLAT] * 4))["event_type"].tolist() == ["loss_flat"]
    assert detect_events(rank_losses([FLAT, FALLING, FALLING, FALLING])).empty
    first = detect_events(rank_losses([FLAT]))
    pd.testing.assert_frame_equal(detect_events(rank_losses([FLAT] * 4)), first)


def test_a_loss_that_is_not_finite_on_one_rank_names_the_rank():
    broken = FALLING.copy()
    broken[30:] = np.nan
    events = detect_events(rank_losses([FALLING, FALLING, broken, FALLING]))
    assert events[["event_type", "rank", "step_start"]].values.tolist() == [
        ["loss_non_finite", 2, 30]
    ]


def test_ranks_that_died_early_do_not_outvote_the_others():
    assert not detect_events(rank_losses([FLAT, FLAT[:10]])).empty


def test_events_of_a_single_rank_carry_its_number():
    series = rank_losses([FLAT])
    assert detect_events(series.assign(rank=np.int16(3)))["rank"].tolist() == [3]


# Shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("processes", "name"), [(2, "sharded"), (2, "sharded_as_one"),
                                                  (4, "sharded")])  # fmt: skip
def test_combined_shards_have_the_statistics_of_the_whole_tensors(processes, name):
    found = run(processes, name)
    whole = view_ranks(found.series)[0]
    for kind, columns in (
        ("parameter", ("mean", "std", "rms", "max_abs", "zero_fraction")),
        ("gradient", ("norm",)),
    ):
        rows = whole[whole["kind"] == kind].set_index(["step", "layer"])
        for step, measured in enumerate(found.told[0]["statistics"]):
            for layer in ("entry.0", "body.0", "head"):
                weight, bias = measured[f"{layer}.weight"], measured[f"{layer}.bias"]
                weight["norm"] = np.sqrt(weight["gradient_square"] + bias["gradient_square"])
                for column in columns:
                    expected = pytest.approx(weight[column], rel=1e-5, abs=1e-6)
                    assert rows.loc[(step, layer), column] == expected, (kind, layer, column)


def shard_rows(kind, parts, copies=1, **more):
    rows = [part for part in parts for _ in range(copies)]
    columns = {
        name: [row[name] for row in rows] for name in rows[0]
    } | more  # each part as often as there are copies
    count = len(rows)
    return build_series(
        {"step": [0] * count, "rank": range(count), "layer": ["fc"] * count,
         "layer_index": [0] * count, "kind": [kind] * count, "shards": [len(parts)] * count,
         **columns}
    )  # fmt: skip


def test_shards_of_any_sizes_combine_exactly():
    rng = np.random.default_rng(0)
    values = rng.normal(0.5, 2.0, 1_000)
    values[rng.random(1_000) < 0.1] = 0.0
    parts = [
        {"count": len(x), "mean": x.mean(), "std": x.std(), "rms": np.sqrt((x**2).mean()),
         "max_abs": np.abs(x).max(), "zero_fraction": (x == 0).mean(), "nonfinite_fraction": 0.0}
        for x in np.split(values, [10, 600, 601])
    ]  # fmt: skip
    [found] = combine_shards(shard_rows("parameter", parts)).to_dict("records")
    expected = {
        "count": 1_000, "mean": values.mean(), "std": values.std(),
        "rms": np.sqrt((values**2).mean()), "max_abs": np.abs(values).max(),
        "zero_fraction": (values == 0).mean(), "nonfinite_fraction": 0.0, "shards": 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("copies", [1, 2])
def test_norms_of_shards_add_up_in_the_square_however_many_ranks_hold_each(copies):
    parts = [{"norm": 3.0, "count": 4, "nonfinite_fraction": 0.0},
             {"norm": 4.0, "count": 2, "nonfinite_fraction": 0.0}]  # fmt: skip
    [found] = combine_shards(shard_rows("gradient", parts, copies)).to_dict("records")
    assert found["norm"] == pytest.approx(5.0)
    assert found["rms"] == pytest.approx(5.0 / np.sqrt(6.0))


def test_a_shard_without_values_does_not_count_and_one_that_is_not_finite_does():
    empty = {"norm": np.nan, "count": 0, "nonfinite_fraction": np.nan}
    whole = {"norm": 4.0, "count": 2, "nonfinite_fraction": 0.0}
    broken = {"norm": np.nan, "count": 2, "nonfinite_fraction": 1.0}
    [found] = combine_shards(shard_rows("gradient", [whole, empty])).to_dict("records")
    assert (found["norm"], found["nonfinite_fraction"]) == (4.0, 0.0)
    [found] = combine_shards(shard_rows("gradient", [whole, broken])).to_dict("records")
    assert np.isnan(found["norm"])
    assert found["nonfinite_fraction"] > 0


def test_the_cosine_of_whole_gradients_follows_from_those_of_their_parts():
    rng = np.random.default_rng(1)
    before, now = rng.normal(size=(2, 30)), rng.normal(size=(2, 30))
    now[1] *= 5.0

    def cosine(a, b):
        return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))

    rows = [
        {"step": step, "rank": rank, "norm": np.linalg.norm(values[rank]), "cosine":
         cosine(before[rank], now[rank]) if step else np.nan}
        for step, values in enumerate((before, now)) for rank in range(2)
    ]  # fmt: skip
    table = build_series(
        {"layer": ["fc"] * 4, "layer_index": [0] * 4, "kind": ["gradient"] * 4, "count": [30] * 4,
         "shards": [2] * 4, **{name: [row[name] for row in rows] for name in rows[0]}}
    )  # fmt: skip
    found = combine_shards(table)["cosine"].to_numpy()
    assert found[1] == pytest.approx(cosine(before, now), rel=1e-5)


# Which rank this is ---------------------------------------------------------------------------


def test_torchruns_environment_tells_the_rank_before_the_process_group_does(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert current_rank() == Rank(2, 4)
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert current_rank() == Rank(0, 1)
    monkeypatch.delenv("RANK")
    assert current_rank() == Rank(0, 1)
