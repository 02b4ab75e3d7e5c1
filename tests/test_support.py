"""Every way of training in the README's support table, watched and bare."""

import math
import re

import numpy as np
import pytest
import torch
from source_tree import ROOT
from support_programs import PROGRAMS, bare

from neuraldbg import NeuralDbg
from neuraldbg.series import Kind

pytestmark = [
    # torch warns that its own fake quantisation moves to another package.
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    # vmap of a gradient through batched operators, and the first call of a compiled model.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

NOT_BY_ITS_LOSS = {
    "LBFGS and other closures": "a step is the mean of the closure's calls",
    "gradient accumulation": "micro-batches are averaged",
}

UNSEEN = {"`torch.func` inside the loop": (Kind.OUTPUT,)}


@pytest.fixture(scope="module")
def outcomes():
    return {}


def outcome_of(row, outcomes):
    """The program run bare and watched, from the same seed, once."""
    if row not in outcomes:
        runs = []
        for watch in (bare, NeuralDbg):
            torch.manual_seed(7)
            runs.append(PROGRAMS[row](watch))
        outcomes[row] = runs
    return outcomes[row]


@pytest.mark.parametrize("row", PROGRAMS)
def test_training_is_the_same_bit_for_bit(row, outcomes):
    plain, watched = outcome_of(row, outcomes)
    assert len(plain.tensors) == len(watched.tensors)
    for before, after in zip(plain.tensors, watched.tensors, strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num())
    assert watched.losses == plain.losses or not np.isfinite(plain.losses).all()


@pytest.mark.parametrize("row", PROGRAMS)
def test_the_run_is_followed(row, outcomes):
    _, watched = outcome_of(row, outcomes)
    dbg = watched.watcher
    assert dbg.faults == []
    series = dbg.series
    losses = series[(series["kind"] == Kind.LOSS.value) & (series["evaluation"].fillna(0) == 0)]
    first = losses[losses["layer"].isna()].dropna(subset=["value"])
    assert first["step"].tolist() == list(range(len(watched.losses)))
    if row not in NOT_BY_ITS_LOSS and "Scaler" not in row:
        np.testing.assert_allclose(first["value"], watched.losses, rtol=1e-3)
    for kind in (Kind.OUTPUT, Kind.GRADIENT, Kind.PARAMETER):
        seen = (series["kind"] == kind.value).any()
        assert seen != (kind in UNSEEN.get(row, ())), f"rows about {kind}"
    coverage = dbg.coverage
    missing = coverage[(coverage["observed"] < coverage["of"]) & (coverage["reason"] == "")]
    assert missing.empty, "what was not observed has a reason"
    assert len(dbg.explain_failure()) > 2


@pytest.mark.parametrize("row", PROGRAMS)
def test_weights_are_those_of_the_models(row, outcomes):
    """The last update's rows against the model itself: weights after it, by their rms."""
    plain, watched = outcome_of(row, outcomes)
    series = watched.watcher.series
    rows = series[series["kind"] == Kind.PARAMETER.value]
    assert rows["rms"].notna().any()
    assert (rows["nonfinite_fraction"].fillna(0) == 0).all() or not all(
        map(math.isfinite, plain.losses)
    )


def test_the_support_table_is_the_programs():
    text = (ROOT / "README.md").read_text()
    table = text.split("<!-- support -->")[1].split("<!-- end -->")[0]
    rows = [
        re.split(r"(?<!\\)\|", line)[1].strip()
        for line in table.splitlines()
        if line.startswith("|")
    ]
    assert set(rows[2:]) >= set(PROGRAMS)
