"""Moments: however values are split, merged moments give the statistics of all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from neuraldbg.capture.moments import Moments
from neuraldbg.capture.sampling import SAMPLE_SIZE, Samples
from neuraldbg.capture.statistics import summarise
from neuraldbg.rank_merge import combine_shards
from neuraldbg.series import build_series

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")

ORDINARY = st.one_of(st.floats(-1e3, 1e3, width=32), st.just(0.0))
ANY = st.one_of(ORDINARY, st.sampled_from([math.nan, math.inf, -math.inf]))
NAMES = ("count", "mean", "std", "rms", "max_abs", "zero_fraction", "nonfinite_fraction")


def vectors(elements=ANY, least=0):
    return hnp.arrays(np.float32, st.integers(least, 40), elements=elements)


def moments_of(**parts):
    """Moments of one sample under each name."""
    values = np.zeros((len(parts), SAMPLE_SIZE), dtype=np.float32)
    for row, part in enumerate(parts.values()):
        values[row, : part.size] = part
    shapes = [(1, part.size) for part in parts.values()]
    return Moments.of(Samples([(name, "output") for name in parts], values, shapes))


def expected_of(values):
    """By numpy, in double precision, of the finite values."""
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    return {
        "count": values.size,
        "mean": finite.mean() if finite.size else 0.0,
        "std": finite.std() if finite.size else 0.0,
        "rms": np.sqrt(np.mean(finite**2)) if finite.size else 0.0,
        "max_abs": np.abs(finite).max(initial=0.0),
        "zero_fraction": np.mean(finite == 0) if finite.size else 0.0,
        "nonfinite_fraction": 1 - finite.size / values.size if values.size else 0.0,
    }


def assert_statistics(columns, row, values):
    expected = expected_of(values)
    assert set(columns) == set(NAMES)
    for name in NAMES:
        # The variance is a difference of squares: exact to the size of the values.
        slack = 1e-6 * (1e-3 + expected["rms"]) if name == "std" else 1e-9 * (1 + expected["rms"])
        assert columns[name][row] == pytest.approx(expected[name], rel=1e-9, abs=slack), name


@given(st.lists(vectors(), min_size=1, max_size=5))
def test_merged_moments_are_those_of_all_values(parts):
    merged = moments_of(fc=parts[0])
    for part in parts[1:]:
        merged = merged.merge(moments_of(fc=part))
    assert_statistics(merged.columns(), 0, np.concatenate(parts))


@given(vectors(least=1), st.lists(st.integers(0, 40), max_size=4), st.randoms())
def test_any_split_in_any_order_gives_the_same(values, cuts, random):
    parts = np.split(values, sorted(cut for cut in cuts if cut <= values.size))
    random.shuffle(parts)
    whole, merged = moments_of(fc=values), moments_of(fc=parts[0])
    for part in parts[1:]:
        merged = moments_of(fc=part).merge(merged)
    np.testing.assert_allclose(merged.sums, whole.sums, rtol=1e-12, atol=1e-9)
    np.testing.assert_array_equal(merged.largest, whole.largest)


@given(
    *[st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), vectors(), max_size=4)] * 2,
)
def test_rows_are_merged_by_key(first, second):
    merged = moments_of(**first).merge(moments_of(**second))
    names = [*first, *(name for name in second if name not in first)]
    assert [name for name, _ in merged.keys] == names
    for row, name in enumerate(names):
        parts = [given[name] for given in (first, second) if name in given]
        assert_statistics(merged.columns(), row, np.concatenate(parts))


@given(st.lists(vectors(), min_size=2, max_size=4))
def test_rows_brought_under_one_key_are_merged(parts):
    several = moments_of(**{f"call {n}": part for n, part in enumerate(parts)})
    keys = [("fc", ""), *[("other", "")] * (len(parts) - 1)]
    united = several.under(keys)
    assert united.keys == [("fc", ""), ("other", "")]
    assert_statistics(united.columns(), 0, parts[0])
    assert_statistics(united.columns(), 1, np.concatenate(parts[1:]))


def test_columns_come_in_the_order_asked_for_and_are_missing_without_a_row():
    moments = moments_of(a=np.ones(2, np.float32), b=np.full(3, 2.0, np.float32))
    columns = moments.columns([("b", "output"), ("c", "output"), ("a", "output")])
    np.testing.assert_array_equal(columns["count"], [3, math.nan, 2])
    np.testing.assert_array_equal(columns["rms"], [2, math.nan, 1])
    assert all(column.shape == (0,) for column in moments.columns([]).values())


def test_merging_leaves_both_parts_as_they_were():
    first, second = (moments_of(a=np.full(2, x, np.float32)) for x in (1.0, 3.0))
    first.merge(second)
    assert first.columns()["mean"][0] == 1
    assert second.columns()["mean"][0] == 3


def test_sums_do_not_lose_small_values_beside_large_ones():
    # In single precision the sum of squares would stay at 2**24 times the first square.
    values = np.ones(SAMPLE_SIZE, np.float32)
    values[0] = 2.0**13
    merged = moments_of(fc=values)
    for _ in range(63):
        merged = merged.merge(moments_of(fc=values))
    assert_statistics(merged.columns(), 0, np.tile(values, 64))


@pytest.mark.parametrize("value", [1e30, -1e30, 1e-30, 3e38])
def test_squares_beyond_single_precision(value):
    columns = moments_of(fc=np.full(5, value, np.float32)).columns()
    assert columns["rms"][0] == pytest.approx(abs(value))
    assert columns["max_abs"][0] == pytest.approx(abs(value))
    assert columns["nonfinite_fraction"][0] == 0


def test_moments_of_no_samples_are_neutral():
    nothing = moments_of()
    some = moments_of(a=np.arange(4, dtype=np.float32))
    assert all(column.shape == (0,) for column in nothing.columns().values())
    for merged in (nothing.merge(some), some.merge(nothing)):
        assert merged.keys == some.keys
        np.testing.assert_array_equal(merged.sums, some.sums)


def test_the_samples_given_are_not_written_to():
    values = np.zeros((1, SAMPLE_SIZE), dtype=np.float32)
    values[0, :3] = [1.0, math.nan, math.inf]
    given = values.copy()
    Moments.of(Samples([("fc", "output")], values, [(1, 3)]))
    np.testing.assert_array_equal(values, given)


@given(vectors(ANY, least=2), st.integers(1, 39))
def test_ranks_rows_combine_to_what_merged_moments_give(values, cut):
    # Two ways to one number: the rows of two ranks, combined after the run, and merged moments.
    parts = [part for part in np.split(values, [min(cut, values.size - 1)]) if part.size]
    rows = [moments_of(fc=part).columns() for part in parts]
    ranks = len(rows)
    series = build_series(
        {
            "step": [0] * ranks, "rank": list(range(ranks)), "layer": ["fc"] * ranks,
            "layer_index": [0] * ranks, "kind": ["parameter"] * ranks, "shards": [ranks] * ranks,
            **{name: [float(row[name][0]) for row in rows] for name in NAMES},
        }
    )  # fmt: skip
    combined, whole = combine_shards(series), moments_of(fc=values).columns()
    if not np.isfinite(values).any():
        return  # nothing to weigh the parts with
    for name in NAMES:
        slack = 1e-3 * (1e-3 + whole["rms"][0])
        assert combined[name][0] == pytest.approx(whole[name][0], rel=1e-3, abs=slack), name


def test_a_summary_is_made_of_moments():
    values = np.zeros((2, SAMPLE_SIZE), dtype=np.float32)
    values[0, :2] = [3.0, 4.0]
    columns = summarise(Samples([("a", ""), ("b", "")], values, [(1, 2), (1, 4)]))
    assert columns["count"].tolist() == [2, 4]
    assert columns["max_abs"].tolist() == [4, 0]
    assert columns["zero_fraction"].tolist() == [0, 1]
