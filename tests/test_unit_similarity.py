"""How alike units and rows are, against slow computations and known cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from neuraldbg.capture.sampling import SAMPLE_SIZE, Samples
from neuraldbg.capture.unit_similarity import (
    MOST_ROWS,
    MOST_UNITS,
    effective_rank,
    row_spread,
    similarity_columns,
    unit_similarity,
)

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")

VALUES = st.floats(-100, 100, width=32).map(lambda x: 0.0 if abs(x) < 1e-2 else x)
MATRICES = hnp.arrays(np.float32, st.tuples(st.integers(2, 6), st.integers(2, 6)), elements=VALUES)
FUNCTIONS = (unit_similarity, row_spread, effective_rank)


def samples_of(*parts):
    values = np.zeros((len(parts), SAMPLE_SIZE), dtype=np.float32)
    for row, part in enumerate(parts):
        values[row, : part.size] = part.ravel()
    return Samples([(row, "output") for row in range(len(parts))], values, [p.shape for p in parts])


@given(MATRICES)
def test_unit_similarity_is_the_mean_cosine_of_all_pairs(sample):
    units = [unit for unit in sample.T.astype(float) if unit.any()]
    pairs = [
        abs(a @ b) / (math.sqrt(a @ a) * math.sqrt(b @ b))
        for a, b in itertools.combinations(units, 2)
    ]
    result = unit_similarity(sample)
    if pairs:
        assert result == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    else:
        assert math.isnan(result)


@given(MATRICES)
def test_row_spread_is_the_deviation_between_rows_over_the_size(sample):
    wide = sample.astype(float)
    size = math.sqrt(np.mean(wide**2))
    spread = math.sqrt(np.mean(wide.std(axis=0) ** 2))
    assert row_spread(sample) == pytest.approx(spread / size if size else 0.0, abs=1e-6)


@given(MATRICES)
def test_effective_rank_is_the_participation_ratio_of_squared_singular_values(sample):
    squares = np.linalg.svd(sample.astype(float), compute_uv=False) ** 2
    result = effective_rank(sample)
    if not sample.any():
        assert math.isnan(result)
        return
    assert result == pytest.approx(squares.sum() ** 2 / (squares**2).sum(), rel=1e-6)
    assert 1 - 1e-9 <= result <= min(sample.shape) + 1e-9


@given(MATRICES, st.floats(1e-3, 1e3))
def test_none_depends_on_scale(sample, factor):
    for function in FUNCTIONS:
        expected = function(sample.astype(np.float64))
        result = function(sample.astype(np.float64) * factor)
        assert result == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)


def test_units_that_are_copies_are_alike_and_independent_ones_are_not():
    generator = np.random.default_rng(0)
    unit = generator.normal(size=(32, 1))
    copies = unit @ np.ones((1, 16))
    assert unit_similarity(copies) == pytest.approx(1)
    assert effective_rank(copies) == pytest.approx(1)
    assert row_spread(copies) > 0.9
    independent = generator.normal(size=(32, 16))
    assert unit_similarity(independent) < 0.3
    assert effective_rank(independent) > 8
    assert row_spread(independent) > 0.9


def test_rows_that_are_all_the_same_have_no_spread_and_rank_one():
    generator = np.random.default_rng(0)
    constant = np.ones((32, 1)) @ generator.normal(size=(1, 16))
    assert row_spread(constant) == pytest.approx(0, abs=1e-12)
    assert effective_rank(constant) == pytest.approx(1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_give_no_number(value):
    sample = np.ones((3, 3))
    sample[1, 1] = value
    assert all(math.isnan(function(sample)) for function in FUNCTIONS)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_values_are_as_good_as_others(size):
    generator = np.random.default_rng(0)
    sample = generator.normal(size=(8, 8)).astype(np.float32)
    for function in FUNCTIONS:
        scaled = (sample * np.float32(size)).astype(np.float32)
        assert function(scaled) == pytest.approx(function(sample), rel=1e-4)


def test_columns_are_of_the_positions_asked_for():
    generator = np.random.default_rng(0)
    varied = generator.normal(size=(8, 4)).astype(np.float32)
    constant = np.ones((8, 4), np.float32)
    columns = similarity_columns(samples_of(varied, constant, varied), [1, 2])
    assert columns["row_spread"][0] == 0
    assert columns["row_spread"][1] == pytest.approx(row_spread(varied))
    assert columns["effective_rank"][1] == pytest.approx(effective_rank(varied))
    assert columns["unit_similarity"][1] == pytest.approx(unit_similarity(varied))


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (0, 4), (4, 0)])
def test_a_sample_of_one_row_or_one_unit_tells_nothing(shape):
    columns = similarity_columns(samples_of(np.ones(shape, np.float32)), [0])
    assert set(columns) == {"unit_similarity", "row_spread", "effective_rank"}
    assert all(math.isnan(column[0]) for column in columns.values())


def test_large_samples_are_thinned_evenly():
    # Constant except in a stretch of rows: thinning must not miss that, nor the last units.
    sample = np.ones((128, 16), np.float32)
    sample[64:96] = -1.0
    spread = similarity_columns(samples_of(sample), [0])["row_spread"][0]
    assert spread == pytest.approx(row_spread(sample), rel=1e-6)
    wide = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    rank = similarity_columns(samples_of(wide), [0])["effective_rank"][0]
    assert rank == pytest.approx(effective_rank(wide[:, ::2]), rel=1e-6)
    assert MOST_ROWS == MOST_UNITS == 32


def test_no_positions_give_empty_columns():
    assert all(column.shape == (0,) for column in similarity_columns(samples_of(), []).values())
