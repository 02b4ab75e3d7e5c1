"""A run kept on disk: what is written, what survives, and who may write."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from pyarrow import ipc, parquet
from source_tree import find_modules, imported_names
from torch import nn

import neuraldbg
from neuraldbg import EventType, NeuralDbg, Thresholds
from neuraldbg.capture import CaptureFaultWarning, run_writer
from neuraldbg.capture.run_format import (
    SCHEMA_VERSION,
    UnreadableRunError,
    part_name,
    stack_series,
    to_arrow,
)
from neuraldbg.capture.run_lock import RunInUseError
from neuraldbg.capture.run_reader import in_order
from neuraldbg.capture.run_thinning import read_thinned
from neuraldbg.capture.run_writer import RunExistsError, RunSink, SeriesStreamer, open_run
from neuraldbg.series import build_series
from neuraldbg.stored_run import DamagedRunWarning

HERE = Path(__file__).parent


@pytest.fixture
def every_step(monkeypatch):
    """Write after every step instead of now and then."""
    monkeypatch.setattr(run_writer, "FIRST_INTERVAL", 0.0)
    monkeypatch.setattr(run_writer, "LONGEST_INTERVAL", 0.0)


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "runs" / "today"


def train(*, steps=12, rate=0.05, each_step=str, **options) -> NeuralDbg:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with NeuralDbg(model, **options) as dbg:
        for step in range(steps):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            each_step(step)
    return dbg


def frames(first: int, count: int, rank: int = 0, layers=("a", "b")) -> pd.DataFrame:
    """Rows of made-up steps: of each a loss, an optimizer and an output a layer."""
    rows = [
        (step, kind, layer, index, value)
        for step in range(first, first + count)
        for kind, layer, index, value in (
            *(("output", name, i, step + i) for i, name in enumerate(layers)),
            ("loss", None, -1, 1 / (1 + step)),
            ("optimizer", None, -1, 0.1),
        )
    ]
    step, kind, layer, index, value = zip(*rows, strict=True)
    return build_series(
        {"step": step, "rank": [rank] * len(step), "layer": layer, "layer_index": index,
         "kind": kind, "value": value}
    )  # fmt: skip


def write_frames(place, parts: int = 3, finished: bool | None = None, **options) -> RunSink:
    sink = open_run(place, **options)
    for number in range(parts):
        sink.append(frames(2 * number, 2, options.get("rank", 0)))
    if finished is not None:
        sink.close(finished)
    return sink


def steps_of(run) -> list[int]:
    return sorted(set(run.series["step"]))


# Giving back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 100.0])
@pytest.mark.parametrize("often", [False, True])
def test_a_stored_run_gives_back_what_was_watched(place, monkeypatch, rate, often) -> None:
    if often:
        monkeypatch.setattr(run_writer, "FIRST_INTERVAL", 0.0)
        monkeypatch.setattr(run_writer, "LONGEST_INTERVAL", 0.0)
    watched = train(run=place, rate=rate, steps=60)
    stored = neuraldbg.load(place)
    pd.testing.assert_frame_equal(stored.series, watched.series)
    pd.testing.assert_frame_equal(stored.events, watched.events)
    assert repr(stored.explain_failure().to_dicts()) == repr(watched.explain_failure().to_dicts())
    assert stored.get_root_causes() == watched.get_root_causes()
    assert bool(stored.get_root_causes()) == (rate > 1)
    assert stored.export_mermaid_causal_graph() == watched.export_mermaid_causal_graph()
    assert repr(stored.trace_causal_chain(EventType.LOSS_NON_FINITE)) == repr(
        watched.trace_causal_chain(EventType.LOSS_NON_FINITE)
    )
    assert stored.finished
    assert stored.steps == watched.steps == 60


def test_a_finished_run_is_one_parquet_file_and_its_facts(place, every_step) -> None:
    train(run=place)
    left = sorted(p.relative_to(place).as_posix() for p in place.rglob("*"))
    assert left == ["rank-0", "rank-0/meta.json", "rank-0/series.parquet"]
    meta = neuraldbg.load(place).meta
    assert meta["models"] == ["Sequential"]
    assert meta["torch"] == torch.__version__
    assert meta["steps"] == 12
    assert meta["cost"]["steps"] == 12
    assert meta["faults"] == []
    assert meta["schema_version"] == SCHEMA_VERSION
    assert meta["started"] < meta["ended"]
    assert parquet.read_schema(place / "rank-0/series.parquet").metadata == {
        b"neuraldbg.schema_version": b"1",
        b"neuraldbg.covers": b"12",
    }


def test_the_coverage_of_a_stored_run_is_that_of_the_watched_one(place) -> None:
    watched = train(run=place).coverage
    stored = neuraldbg.load(place).coverage
    assert set(stored.pop("rank")) == {0}
    pd.testing.assert_frame_equal(stored, watched)


def test_thresholds_of_the_run_are_those_it_is_judged_by(place) -> None:
    limits = Thresholds(minimum_steps=5, loss_flat=0.99, loss_slow=float("inf"))
    watched = train(run=place, thresholds=limits, rate=1e-9, steps=20)
    stored = neuraldbg.load(place)
    assert stored.thresholds == limits
    pd.testing.assert_frame_equal(stored.events, watched.events)
    assert len(stored.events) > len(neuraldbg.load(place, thresholds=Thresholds()).events)


def test_a_run_can_be_read_while_it_goes_on(place, every_step) -> None:
    seen = []
    train(run=place, steps=6, each_step=lambda _: seen.append(neuraldbg.load(place)))
    assert [run.steps for run in seen] == [1, 2, 3, 4, 5, 6]
    assert {run.state for run in seen} == {"running"}
    assert [run.meta["steps"] for run in seen] == [1, 2, 3, 4, 5, 6]


def test_the_first_step_is_written_at_once(place) -> None:
    seen = []
    train(run=place, steps=1, each_step=lambda _: seen.append(neuraldbg.load(place).steps))
    assert seen == [1]


def test_the_cost_of_a_stored_run_is_that_of_the_watched_one(place) -> None:
    watched = train(run=place)
    stored = neuraldbg.load(place).cost
    assert stored is not None
    assert (stored.steps, stored.captured_steps, stored.period) == (
        watched.cost.steps, watched.cost.captured_steps, watched.cost.period,
    )  # fmt: skip
    assert 0 < stored.seconds < stored.run_seconds


def test_a_run_is_read_whole_though_it_is_merged_meanwhile(place, monkeypatch) -> None:
    sink = write_frames(place)
    read = neuraldbg.capture.run_reader.RunFolder.read
    closing = []

    def read_late(folder, name):
        if name == part_name(2) and not closing:
            closing.append(True)
            sink.close()
        return read(folder, name)

    monkeypatch.setattr(neuraldbg.capture.run_reader.RunFolder, "read", read_late)
    run = neuraldbg.load(place)
    assert closing
    assert run.finished
    assert steps_of(run) == list(range(6))


def test_a_run_that_ends_with_an_error_is_kept_with_its_name(place) -> None:
    def fail(step):
        if step == 7:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(run=place, each_step=fail)
    run = neuraldbg.load(place)
    assert (run.steps, run.finished, run.meta["ended_by"]) == (8, True, "ZeroDivisionError")


def test_a_second_with_goes_on_with_the_same_run(place, every_step) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dbg = NeuralDbg(model, run=place)
    for _ in range(3):
        with dbg:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    run = neuraldbg.load(place)
    pd.testing.assert_frame_equal(run.series, dbg.series)
    assert run.steps == 12


def test_backward_calls_taken_for_steps_at_first_are_counted_anew(place, every_step) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NeuralDbg(model, run=place) as dbg:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(5):
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        during = neuraldbg.load(place)
    run = neuraldbg.load(place)
    assert run.steps == during.steps == dbg.steps == 3
    losses = run.series[run.series["kind"] == "loss"]
    assert losses["micro_batches"].tolist() == [5, 5, 5]
    pd.testing.assert_frame_equal(run.series, dbg.series)
    pd.testing.assert_frame_equal(during.series, dbg.series)


def test_a_loop_without_an_optimizer_is_written_while_it_runs(place, every_step) -> None:
    model = nn.Linear(4, 1)
    with NeuralDbg(model, run=place):
        for _ in range(5):
            model(torch.randn(8, 4)).square().mean().backward()
        assert neuraldbg.load(place).steps >= 3


def test_a_long_run_is_read_in_part_and_keeps_its_start_its_end_and_its_extremes() -> None:
    whole = frames(0, 2_000)
    is_loss = (whole["kind"] == "loss").to_numpy()
    for name in ("lowest", "highest"):
        whole[name] = whole["value"].where(is_loss)
    whole.loc[is_loss & (whole["step"] == 901), ["value", "lowest", "highest"]] = 77.0
    whole.loc[(whole["kind"] == "output") & (whole["step"] % 4 != 0), "kind"] = np.nan
    whole = whole.dropna(subset="kind").reset_index(drop=True)
    validation = frames(999, 1).query("kind == 'loss'").assign(evaluation=np.float32(1.0))
    whole = stack_series([whole, validation])
    tables = [to_arrow(whole[whole["step"] // 50 == n].reset_index(drop=True)) for n in range(40)]

    pd.testing.assert_frame_equal(
        in_order(read_thinned(lambda: tables, len(whole))), in_order(whole)
    )
    thinned = read_thinned(lambda: tables, 800)
    assert len(thinned) <= 800
    losses = thinned[(thinned["kind"] == "loss") & (thinned["evaluation"] != 1)]
    outputs = thinned[thinned["kind"] == "output"]
    assert losses["step"].tolist()[:12] == list(range(12))
    assert losses["step"].tolist()[-25:] == list(range(1975, 2000))
    assert outputs["step"].unique().tolist()[:30] == list(range(0, 120, 4))
    assert not (losses["value"] == 77).any()
    assert losses.loc[losses["highest"] == 77, "step"].item() <= 901
    assert losses["lowest"].min() == whole["value"][whole["kind"] == "loss"].min()
    assert (thinned["evaluation"] == 1).sum() == 1
    validated = thinned[thinned["evaluation"] == 1]
    assert validated[["lowest", "highest"]].isna().all(axis=None)


# Being killed ---------------------------------------------------------------------------------


def test_fifty_runs_killed_at_random_moments_open_with_all_that_was_written(tmp_path) -> None:
    kills = 50
    subprocess.run(
        [sys.executable, HERE / "run_killing.py", tmp_path, str(kills)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    whole = neuraldbg.load(tmp_path / "whole").series
    told = json.loads((tmp_path / "told.json").read_text(encoding="utf-8"))
    found = []
    for number, known in enumerate(told):
        run = neuraldbg.load(tmp_path / f"run-{number}")  # a warning would be an error
        assert run.problems == ()
        assert run.steps >= known
        assert run.state in ("broken off", "finished")
        expected = whole[whole["step"] < run.steps].reset_index(drop=True)
        pd.testing.assert_frame_equal(run.series, expected, check_categorical=False)
        found.append(run.steps)
    assert len(found) == kills
    assert len(set(found)) > 4, "they all died at the same moment"


def test_a_process_killed_before_it_wrote_anything_leaves_a_run_without_steps(place) -> None:
    (place / "rank-0" / "series").mkdir(parents=True)
    with pytest.warns(DamagedRunWarning, match=r"rank-0/meta\.json is missing"):
        run = neuraldbg.load(place)
    assert run.steps == 0
    assert len(run.events) == 0


@pytest.mark.parametrize("left", [0.0, 0.3, 0.9])
def test_a_torn_part_is_left_out_with_a_warning(place, left) -> None:
    write_frames(place, parts=3)
    part = place / "rank-0" / part_name(2)
    part.write_bytes(part.read_bytes()[: int(left * part.stat().st_size)])
    with pytest.warns(DamagedRunWarning, match=r"rank-0/series/part-000002\.arrow is damaged"):
        run = neuraldbg.load(place)
    assert steps_of(run) == [0, 1, 4, 5]


def test_damage_anywhere_in_a_part_never_raises(place) -> None:
    write_frames(place, parts=2)
    part = place / "rank-0" / part_name(2)
    whole = part.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(whole)
        for position in random.integers(0, len(whole), 8):
            damaged[position] = random.integers(0, 256)
        part.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamagedRunWarning)
            assert set(steps_of(neuraldbg.load(place))) >= {0, 1}


def test_a_lost_part_is_told(place) -> None:
    write_frames(place, parts=3)
    (place / "rank-0" / part_name(2)).unlink()
    with pytest.warns(DamagedRunWarning, match="part-000002.arrow is missing"):
        assert steps_of(neuraldbg.load(place)) == [0, 1, 4, 5]


def test_a_torn_merged_file_is_told(place) -> None:
    write_frames(place, finished=True)
    merged = place / "rank-0/series.parquet"
    merged.write_bytes(merged.read_bytes()[:-40])
    with pytest.warns(DamagedRunWarning, match=r"series\.parquet is damaged"):
        assert neuraldbg.load(place).steps == 0


def test_torn_facts_are_told_and_the_rows_are_read(place) -> None:
    write_frames(place, finished=True)
    (place / "rank-0/meta.json").write_text('{"schema_ver', encoding="utf-8")
    with pytest.warns(DamagedRunWarning, match=r"meta\.json is damaged"):
        assert neuraldbg.load(place).steps == 6


def test_a_part_that_was_damaged_before_merging_is_told_afterwards(place) -> None:
    sink = write_frames(place)
    (place / "rank-0" / part_name(2)).write_bytes(b"nonsense")
    sink.close()
    with pytest.warns(DamagedRunWarning, match="part-000002.arrow is damaged"):
        assert steps_of(neuraldbg.load(place)) == [0, 1, 4, 5]


# Who may write --------------------------------------------------------------------------------

HOLDING = """
import sys
from neuraldbg.capture.run_writer import open_run
sink = open_run(sys.argv[1])
print("holding", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(place):
    """Another process that writes to the run, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline().strip() == b"holding"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_second_process_is_told_who_writes_and_one_that_is_dead_does_not_count(place) -> None:
    with another_process(place) as process:
        with pytest.raises(RunInUseError) as refused:
            train(run=place)
        assert f"process {process.pid} on " in str(refused.value)
        assert "choose another folder" in str(refused.value)
        with pytest.raises(RunInUseError):
            train(run=place, overwrite=True)
        assert neuraldbg.load(place).state == "running"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert neuraldbg.load(place).state == "broken off"
        train(run=place)  # nothing had been written
    assert neuraldbg.load(place).finished


def test_a_zombie_counts_as_dead(place) -> None:
    with another_process(place) as process:
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        train(run=place)


def test_two_runs_of_one_process_do_not_share_a_folder(place) -> None:
    sink = open_run(place)
    with pytest.raises(RunInUseError, match="this very process"):
        open_run(place)
    sink.close()


ELSEWHERE = {"host": "elsewhere", "pid": 1, "token": "another"}


def test_a_lock_of_another_machine_is_not_taken_over(place) -> None:
    sink = open_run(place)
    lock = place / "rank-0/lock.json"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | ELSEWHERE))
    with pytest.raises(RunInUseError, match=r"process 1 on elsewhere.*delete .*lock\.json"):
        open_run(place, overwrite=True)
    sink.close()
    assert lock.exists(), "a lock that is no longer its own is left alone"


def test_a_process_number_used_again_does_not_keep_a_lock_alive(place) -> None:
    sink = open_run(place)
    lock = place / "rank-0/lock.json"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"started": "1", "token": "old"}))
    open_run(place).close()
    sink.close()


@pytest.mark.parametrize("finished", [True, False])
def test_an_earlier_run_is_only_replaced_when_that_is_asked_for(place, finished) -> None:
    write_frames(place, finished=finished)
    with pytest.raises(RunExistsError, match=r"holds a run already.*overwrite=True"):
        train(run=place)
    assert neuraldbg.load(place).steps == 6
    assert not (place / "rank-0/lock.json").exists()
    train(run=place, overwrite=True, steps=9)
    assert neuraldbg.load(place).steps == 9


def test_a_folder_that_cannot_be_made_stops_the_run_before_it_begins(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        train(run=tmp_path / "file" / "run")
    with pytest.raises(ValueError, match="nowhere"):
        train(run="nowhere://run")


def test_a_forked_child_leaves_the_run_to_its_parent(place) -> None:
    sink = write_frames(place)
    sink._process += 1  # what a child sees
    sink.append(frames(6, 2))
    sink.close()
    sink._process -= 1
    assert neuraldbg.load(place).steps == 6
    assert (place / "rank-0/lock.json").exists()
    sink.close()


# Ranks ----------------------------------------------------------------------------------------


def test_ranks_are_read_as_one_run(place) -> None:
    for rank in (1, 0):
        write_frames(place, rank=rank, world_size=2, parts=2 + rank, finished=rank == 0)
    run = neuraldbg.load(place)
    assert run.ranks == [0, 1]
    assert not run.finished
    assert run.series.groupby("rank")["step"].max().to_dict() == {0: 3, 1: 5}
    assert run.metas[1]["rank"] == 1
    assert run.steps == 6


def test_a_rank_that_left_nothing_is_told(place) -> None:
    write_frames(place, rank=1, world_size=3, finished=True)
    with pytest.warns(DamagedRunWarning, match="nothing is there of rank 0, 2 of 3"):
        assert neuraldbg.load(place).ranks == [1]


def test_ranks_of_an_earlier_larger_run_do_not_mix_with_a_new_one(place) -> None:
    for rank in range(3):
        write_frames(place, rank=rank, world_size=3, finished=True)
    for rank in range(2):
        with pytest.raises(RunExistsError):
            open_run(place, rank=rank, world_size=2)
        write_frames(place, rank=rank, world_size=2, parts=1, finished=True, overwrite=True)
    run = neuraldbg.load(place)
    assert run.ranks == [0, 1]
    assert run.steps == 2


# Strangers' files -----------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (os.environ["BOMB"],))


def test_no_file_of_a_stranger_runs_code(place, tmp_path, monkeypatch) -> None:
    blown = tmp_path / "blown"
    monkeypatch.setenv("BOMB", str(blown))
    payload = pickle.dumps(Bomb())
    write_frames(place, finished=False)
    field = pa.field(
        "detail",
        pa.binary(),
        metadata={
            b"ARROW:extension:name": b"arrow.py_extension_type",
            b"ARROW:extension:metadata": payload,
        },
    )
    schema = pa.schema([("step", pa.int64()), field], metadata={b"neuraldbg.schema_version": b"1"})
    with ipc.new_file(str(place / "rank-0" / part_name(2)), schema) as writer:
        writer.write(pa.record_batch([pa.array([0]), pa.array([payload])], schema=schema))
    (place / "rank-0" / part_name(3)).write_bytes(payload)
    (place / "rank-0/meta.json").write_bytes(payload)
    (place / "rank-0/series.parquet").write_bytes(payload)
    with pytest.warns(DamagedRunWarning) as told:
        run = neuraldbg.load(place)
    run.explain_failure()
    assert not blown.exists()
    for name in ("part-000002", "part-000003", "meta.json", "series.parquet"):
        assert name in str(told[0].message)


@pytest.mark.parametrize(
    "facts",
    [
        {"thresholds": {"minimum_steps": "many"}},
        {"thresholds": {"loss_flat": -1}},
        {"thresholds": [1], "faults": {"a": 1}, "coverage": 3, "world_size": "two"},
        {"faults": [[1], "x", [1, 2, 3]], "coverage": [1], "problems": 3, "void_before": "x"},
        {"cost": {"seconds": "long", "run_seconds": 1.0}},
        {"cost": dict.fromkeys(("seconds", "run_seconds", "steps", "captured_steps"), 1)},
        {
            "cost": dict.fromkeys(
                ("seconds", "run_seconds", "steps", "captured_steps", "period"), 10**400
            )
        },
    ],
)
def test_facts_of_the_wrong_kind_do_no_harm(place, facts) -> None:
    write_frames(place, finished=True)
    meta = place / "rank-0/meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | facts))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedRunWarning)
        run = neuraldbg.load(place)
    assert run.thresholds == Thresholds()
    assert run.steps == 6
    assert (run.faults, len(run.coverage), run.cost) == ([], 0, None)
    run.explain_failure()


def test_nothing_that_writes_or_reads_runs_knows_pickle() -> None:
    for name, path in find_modules().items():
        if name.startswith(("neuraldbg.capture.run_", "neuraldbg.stored_run")):
            assert {"pickle", "torch.save", "joblib", "dill"}.isdisjoint(imported_names(name, path))


def raise_version(place: Path, name: str) -> None:
    path = place / "rank-0" / name
    newer = {b"neuraldbg.schema_version": str(SCHEMA_VERSION + 1).encode()}
    if name.endswith(".json"):
        facts = json.loads(path.read_text()) | {"schema_version": SCHEMA_VERSION + 1}
        path.write_text(json.dumps(facts))
    elif name.endswith(".parquet"):
        parquet.write_table(parquet.read_table(path).replace_schema_metadata(newer), path)
    else:
        table = ipc.open_file(path.read_bytes()).read_all().replace_schema_metadata(newer)
        with ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("name", ["meta.json", "series.parquet", part_name(1)])
def test_a_newer_schema_is_refused_with_what_to_do(place, name) -> None:
    write_frames(place, finished=name == "series.parquet")
    raise_version(place, name)
    with pytest.raises(UnreadableRunError, match=r"schema version 2.*pip install --upgrade"):
        neuraldbg.load(place)


def test_columns_and_kinds_of_a_later_release_are_left_out(place) -> None:
    write_frames(place, finished=True)
    path = place / "rank-0/series.parquet"
    table = parquet.read_table(path)
    kinds = ["aura" if kind == "output" else kind for kind in table["kind"].to_pylist()]
    kinds = pa.array(kinds).dictionary_encode()
    table = table.set_column(table.column_names.index("kind"), "kind", kinds)
    table = table.append_column("colour", pa.array(["red"] * len(table)))
    parquet.write_table(table, path)
    run = neuraldbg.load(place)
    assert set(run.series["kind"]) == {"loss", "optimizer"}
    assert "colour" not in run.series


def test_what_is_no_run_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no run at"):
        neuraldbg.load(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UnreadableRunError, match=r"holds no run.*notes\.txt"):
        neuraldbg.load(tmp_path)


# Other file systems ---------------------------------------------------------------------------


class Bucket(MemoryFileSystem):
    """As an object store: objects are put whole; no appending, no renaming, no folders."""

    protocol = "bucket"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    failing = False

    def _open(self, path, mode="rb", **options):
        assert mode == "rb", f"nothing is written in pieces, as mode {mode} would"
        return super()._open(path, mode, **options)

    def pipe_file(self, path, value, **_):
        if self.failing:
            raise OSError(28, "No space left on device")
        self.store[path] = MemoryFile(self, path, value)

    def makedirs(self, path, exist_ok=False):
        """Object stores have no folders."""

    def mv(self, *_, **__):
        raise AssertionError("object stores do not rename")

    cp_file = mkdir = mv


@pytest.fixture
def bucket():
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    Bucket.clear_instance_cache()
    Bucket.store.clear()
    Bucket.failing = False
    yield "bucket://runs/today"
    Bucket.failing = False


@pytest.mark.parametrize("url", ["memory://runs/{}", "file://{}/run", "bucket"])
def test_any_file_system_will_do(url, bucket, tmp_path, every_step) -> None:
    url = bucket if url == "bucket" else url.format(tmp_path)
    during = []
    watched = train(run=url, each_step=lambda _: during.append(neuraldbg.load(url).steps))
    assert during == list(range(1, 13))
    stored = neuraldbg.load(url)
    pd.testing.assert_frame_equal(stored.series, watched.series)
    assert stored.finished
    with pytest.raises(RunExistsError):
        train(run=url)
    holder = open_run(url, overwrite=True)
    with pytest.raises(RunInUseError):
        train(run=url)
    holder.close()


# Trouble inside the loop ----------------------------------------------------------------------


def test_a_full_disk_costs_one_warning_and_no_step(bucket, every_step) -> None:
    def fill(step):
        Bucket.failing = step >= 3

    bare = train(steps=20)
    with pytest.warns(CaptureFaultWarning, match="No space left") as told:
        watched = train(run=bucket, steps=20, each_step=fill)
    assert len(told) == 1
    pd.testing.assert_frame_equal(watched.series, bare.series)
    assert {message for _, message in watched.faults} == {
        "OSError: [Errno 28] No space left on device"
    }
    assert watched.faults[0][0] == 4
    assert EventType.CAPTURE_FAULT.value in set(watched.events["event_type"])
    assert watched.explain_failure()[0].cause == bare.explain_failure()[0].cause
    assert not watched._recorder.log.streaming
    Bucket.failing = False
    assert neuraldbg.load(bucket).steps == 4


def test_what_could_not_be_written_is_written_later(bucket, every_step) -> None:
    def fill(step):
        Bucket.failing = step in (3, 9)

    with pytest.warns(CaptureFaultWarning):
        watched = train(run=bucket, each_step=fill)
    run = neuraldbg.load(bucket)
    assert run.problems == ()
    pd.testing.assert_frame_equal(run.series, watched.series)
    assert run.faults == watched.faults
    assert len(run.faults) == 2


def test_a_vanished_folder_costs_one_warning_and_no_step(place, every_step) -> None:
    with pytest.warns(CaptureFaultWarning) as told:
        watched = train(run=place, each_step=lambda step: step == 3 and shutil.rmtree(place.parent))
    assert len(told) == 1
    assert watched.steps == 12
    assert not place.exists()


def test_rows_that_were_never_written_are_told(bucket, every_step) -> None:
    def fill(step):
        Bucket.failing = 3 <= step < 8

    with pytest.warns(CaptureFaultWarning):
        train(run=bucket, each_step=fill)
    with pytest.warns(DamagedRunWarning, match="rank-0 could not write all of its rows"):
        assert neuraldbg.load(bucket).steps == 4


def test_training_is_the_same_to_the_bit_with_its_run_on_disk(place, every_step) -> None:
    def weights(**options) -> list[torch.Tensor]:
        dbg = train(steps=15, **options)
        return [*dbg._recorder.models[0].parameters(), torch.get_rng_state()]

    backward = torch.autograd.backward
    for bare, kept in zip(weights(), weights(run=place), strict=True):
        assert torch.equal(bare, kept)
    assert torch.autograd.backward is backward


# How often ------------------------------------------------------------------------------------


class Source:
    """Two steps a second, whose rows take some time to write."""

    def __init__(self, seconds: float) -> None:
        self.streaming = False
        self.undrained = 0
        self.now = 0.0
        self.written: list[float] = []
        self._seconds = seconds
        self._rows = frames(0, 1)

    def drain_rows(self) -> pd.DataFrame:
        self.written.append(self.now)
        self.now += self._seconds
        self.undrained = 0
        return self._rows

    def run(self, sink, seconds: float, steps_per_second: float = 2.0) -> None:
        streamer = SeriesStreamer(self, sink, clock=lambda: self.now)
        while self.now < seconds:
            self.now += 1 / steps_per_second
            self.undrained += 1
            if streamer.is_due:
                streamer.flush()


@pytest.fixture
def sink():
    made = open_run("memory://how-often", overwrite=True)
    made.append = list
    yield made
    made.close(False)


def test_quick_writes_come_every_two_seconds(sink) -> None:
    source = Source(0.004)
    source.run(sink, 60)
    assert 25 <= len(source.written) <= 30


def test_slow_writes_take_half_a_percent_of_the_time(sink) -> None:
    source = Source(0.1)
    source.run(sink, 1_000)
    assert 0.1 * len(source.written) <= 0.0055 * 1_000
    assert len(source.written) > 40


def test_a_long_run_is_written_every_minute_at_least_and_in_few_files(sink) -> None:
    source = Source(0.001)
    source.run(sink, 30_000, steps_per_second=0.2)
    assert len(source.written) < 1_400
    assert max(np.diff(source.written)) <= 65


def test_fast_steps_do_not_pile_up(sink) -> None:
    source = Source(0.001)
    source.run(sink, 4, steps_per_second=10_000)
    assert len(source.written) >= 9
