"""Statistics against plain loops over their values, and the samples that they are made from."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from neuraldbg import NeuralDbg
from neuraldbg.capture.activation_health import saturated_fraction
from neuraldbg.capture.parameter_sampler import norms
from neuraldbg.capture.sampling import MAX_UNITS, SAMPLE_SIZE, SampleBuffer, Samples, strided_sample
from neuraldbg.capture.statistics import (
    cosines,
    feature_spread,
    noise_scales,
    silent_units,
    summarise,
    unit_spread,
)

settings.register_profile("quick", max_examples=60, deadline=None)
settings.load_profile("quick")

ORDINARY = st.floats(-1e3, 1e3, width=32).map(lambda x: 0.0 if abs(x) < 1e-3 else x)
ANY = st.one_of(ORDINARY, st.sampled_from([0.0, math.nan, math.inf, -math.inf]))


def matrices(elements=ORDINARY, dtype=np.float32, least=1):
    shapes = st.tuples(st.integers(1, 6), st.integers(least, 30))
    return hnp.arrays(dtype, shapes, elements=elements)


def samples_of(*parts):
    values = np.zeros((len(parts), SAMPLE_SIZE), dtype=np.float32)
    for row, part in enumerate(parts):
        values[row, : part.size] = part.ravel()
    keys = [(row, "output") for row in range(len(parts))]
    return Samples(keys, values, [part.shape for part in parts])


def naive_summary(values):
    numbers = [float(v) for v in values.ravel()]
    finite = [v for v in numbers if math.isfinite(v)]
    count = max(len(finite), 1)
    mean = sum(finite) / count
    square = sum(v * v for v in finite) / count
    return {
        "count": len(numbers),
        "mean": mean,
        "std": math.sqrt(sum((v - mean) ** 2 for v in finite) / count),
        "rms": math.sqrt(square),
        "max_abs": max((abs(v) for v in finite), default=0.0),
        "zero_fraction": sum(v == 0 for v in finite) / count,
        "nonfinite_fraction": (len(numbers) - len(finite)) / max(len(numbers), 1),
    }


@given(st.lists(matrices(ANY), min_size=1, max_size=4))
def test_summaries(parts):
    columns = summarise(samples_of(*parts))
    for row, part in enumerate(parts):
        expected = naive_summary(part)
        for name, value in expected.items():
            # The variance is a difference of squares: exact to the size of the mean.
            slack = 2e-3 * (1 + expected["rms"]) if name == "std" else 1e-4 * (1 + expected["rms"])
            assert columns[name][row] == pytest.approx(value, rel=1e-3, abs=slack), name


@given(matrices(st.floats(-6e4, 6e4, width=16), np.float16))
def test_summaries_of_half_precision(part):
    buffer = SampleBuffer()
    buffer.copy(("fc", "output"), torch.from_numpy(part), 1)
    columns = summarise(buffer.drain().on_host())
    expected = naive_summary(part)
    assert columns["rms"][0] == pytest.approx(expected["rms"], rel=1e-3, abs=1e-4)
    assert columns["zero_fraction"][0] == pytest.approx(expected["zero_fraction"])
    assert columns["nonfinite_fraction"][0] == 0


def test_summaries_of_nothing():
    for name, column in summarise(SampleBuffer().drain().on_host()).items():
        assert column.shape == (0,), name
    empty = summarise(samples_of(np.zeros((0, 3), np.float32)))
    assert empty["nonfinite_fraction"][0] == 0
    assert empty["rms"][0] == 0


def test_summaries_of_values_whose_squares_overflow():
    columns = summarise(samples_of(np.full((2, 2), 1e30, np.float32)))
    assert columns["max_abs"][0] == pytest.approx(1e30)
    assert columns["nonfinite_fraction"][0] == 0


@given(matrices(ANY))
def test_unit_spread(sample):
    result = unit_spread(sample)
    if sample.shape[1] < 2 or not np.isfinite(sample).all():
        assert math.isnan(result)
        return
    square, total = 0.0, 0.0
    for row in sample.astype(float).tolist():
        mean = sum(row) / len(row)
        square += sum((v - mean) ** 2 for v in row)
        total += sum(v * v for v in row)
    assert result == pytest.approx(math.sqrt(square / total) if total else 0.0, abs=1e-6)
    assert 0 <= result <= 1 + 1e-9


@given(matrices(least=2), st.floats(0.01, 100))
def test_unit_spread_does_not_depend_on_scale(sample, factor):
    scaled = sample.astype(np.float64) * factor
    assert unit_spread(scaled) == pytest.approx(unit_spread(sample.astype(np.float64)), abs=1e-6)


@given(matrices(st.one_of(ANY, st.just(0.0))))
def test_silent_units(sample):
    expected = [all(v == 0 for v in column) for column in sample.T.tolist()]
    assert silent_units(sample).tolist() == expected


@given(matrices(ANY))
def test_feature_spread(sample):
    scales = []
    for column in sample.T.astype(float).tolist():
        scale = math.sqrt(sum(v * v for v in column) / len(column))
        if math.isfinite(scale) and scale > 0:
            scales.append(scale)
    scales.sort()
    result = feature_spread(sample)
    if len(scales) < 2:
        assert math.isnan(result)
    else:
        low, high = (scales[1], scales[-2]) if len(scales) >= 20 else (scales[0], scales[-1])
        assert result == pytest.approx(high / low, rel=1e-6)
        assert result >= 1 - 1e-9


@given(matrices(ANY), st.randoms(use_true_random=False))
def test_cosines(first, random):
    second = first.copy().ravel()
    order = list(range(second.size))
    random.shuffle(order)
    second = second[order].reshape(first.shape)
    for a, b, result in zip(first, second, cosines(first, second), strict=True):
        dot, aa, bb = (
            sum(float(x) * float(y) for x, y in zip(u, v, strict=True))
            for u, v in ((a, b), (a, a), (b, b))
        )
        if aa == 0 or bb == 0 or not all(map(math.isfinite, (dot, aa, bb))):
            assert math.isnan(result)
        else:
            assert result == pytest.approx(dot / math.sqrt(aa * bb), abs=1e-4)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_cosines_of_the_same_and_the_opposite(size):
    rows = np.full((1, 8), size, np.float32)
    assert cosines(rows, rows)[0] == pytest.approx(1)
    assert cosines(rows, -rows)[0] == pytest.approx(-1)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_cosines_of_tiny_and_huge_rows(size):
    # Squares of squares leave float32 long before the values do.
    rows = np.full((1, 8), size, np.float32)
    result = cosines(rows, -rows)[0]
    assert result == pytest.approx(-1)


def noisy_pairs(noise, size=SAMPLE_SIZE, pairs=200):
    """Pairs of gradients of unit norm but for noise, whose covariance has the trace ``noise``."""
    generator = np.random.default_rng(0)
    signal = np.full(size, 1 / math.sqrt(size))
    spread = math.sqrt(noise / size)
    return [signal + spread * generator.normal(size=(pairs, size)) for _ in range(2)]


@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0])
def test_noise_scale_is_the_trace_of_the_noise_over_the_square_of_the_signal(noise):
    first, second = noisy_pairs(noise)
    result = noise_scales(first, second, np.full(len(first), SAMPLE_SIZE))
    assert np.median(result) == pytest.approx(noise, rel=0.1)


def test_noise_scale_of_pure_noise_is_as_much_as_so_many_values_can_tell():
    first, second = noisy_pairs(1e6)
    sizes = np.full(len(first), SAMPLE_SIZE)
    assert np.median(noise_scales(first, second, sizes)) > 0.8 * math.sqrt(SAMPLE_SIZE)
    assert np.isfinite(noise_scales(first, -first, sizes)).all()


def test_noise_scale_of_the_same_gradient_is_zero_and_does_not_depend_on_size():
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    sizes = np.full(3, 64)
    np.testing.assert_allclose(noise_scales(rows, rows, sizes), 0, atol=1e-6)
    other = rows[::-1] + rows
    expected = noise_scales(rows, other, sizes)
    for factor in (1e-15, 1e15):
        scaled = noise_scales(rows * np.float32(factor), other * np.float32(factor), sizes)
        np.testing.assert_allclose(scaled, expected, rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_noise_scale_of_nothing_is_not_known(value):
    rows = np.ones((1, 4))
    assert math.isnan(noise_scales(rows, np.full((1, 4), value), np.array([4]))[0])
    assert math.isnan(noise_scales(np.full((1, 4), value), rows, np.array([4]))[0])


@given(st.lists(matrices(ANY), max_size=4), st.sampled_from([torch.float32, torch.float64]))
def test_norms(parts, dtype):
    result = norms([torch.from_numpy(part).to(dtype) for part in parts])
    assert result.shape == (len(parts),)
    for part, norm in zip(parts, result, strict=True):
        expected = math.sqrt(sum(float(v) ** 2 for v in part.ravel()))
        if math.isfinite(expected):
            assert norm == pytest.approx(expected, rel=1e-4, abs=1e-6)
        else:
            assert not math.isfinite(norm)


def test_norms_of_unlike_tensors():
    sparse = torch.sparse_coo_tensor(
        [[0, 0, 2]], torch.tensor([[1.0], [2.0], [4.0]]), (5, 1), check_invariants=True
    )
    mixed = [
        torch.full((3,), 2.0, dtype=torch.float16), sparse, torch.tensor(3.0), torch.zeros(0),
        torch.full((4,), 1e4, dtype=torch.float16), torch.ones(4, dtype=torch.bfloat16),
    ]  # fmt: skip
    np.testing.assert_allclose(norms(mixed), [math.sqrt(12), 5.0, 3.0, 0.0, 2e4, 2.0], rtol=1e-3)
    assert norms([]).shape == (0,)


@given(matrices(st.floats(-1, 1, width=32)))
def test_saturated_fraction(sample):
    values = [float(v) for v in sample.ravel()]
    clear = [v for v in values if abs(abs(v) - 0.99) > 1e-5]
    if len(clear) == len(values):
        expected = sum(abs(v) > 0.99 for v in values) / len(values)
        assert saturated_fraction(sample, (-1.0, 1.0)) == pytest.approx(expected)


def test_rows_of_gradients_and_updates_hold_the_statistics_of_their_values():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias[:3] = -100.0  # units that never switch on: exact zeros in the gradient
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    with NeuralDbg(model) as debugger:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            seen.append(model[0].weight.grad.clone().numpy())
            optimizer.step()
    assert debugger.faults == []
    series = debugger.series
    rows = series[series["layer"] == "0"].set_index(["kind", "step"])
    names = ("count", "mean", "std", "max_abs", "zero_fraction")
    for step, gradient in enumerate(seen):
        for kind, values in (("gradient", gradient), ("update", -0.5 * gradient)):
            expected = naive_summary(values)
            assert expected["zero_fraction"] >= 3 / 8
            for name in names:
                known = pytest.approx(expected[name], rel=1e-3, abs=1e-6)
                assert rows.loc[(kind, step), name] == known, (kind, name)
    first, second = (seen[step].reshape(1, -1) for step in (0, 1))
    expected = noise_scales(first, second, np.array([first.size]))[0]
    assert rows.loc[("gradient", 1), "noise_scale"] == pytest.approx(expected, rel=1e-4)
    assert math.isnan(rows.loc[("gradient", 0), "noise_scale"])


# Samples ----------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=5).filter(lambda s: math.prod(s) < 2e5)


@st.composite
def shapes_and_axes(draw):
    shape = draw(SHAPES)
    return tuple(shape), draw(st.integers(0, len(shape) - 1))


@given(shapes_and_axes())
def test_a_sample_is_small_covers_each_axis_and_is_a_view(case):
    shape, axis = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    sample = strided_sample(tensor, axis)
    assert sample.numel() <= SAMPLE_SIZE
    assert sample.dim() == len(shape)
    assert 1 <= sample.shape[-1] <= MAX_UNITS
    assert sample.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert sample.unique().numel() == sample.numel()
    sizes = [*(size for k, size in enumerate(shape) if k != axis), shape[axis]]
    for position, size in enumerate(sizes):
        index = torch.arange(size).view([-1 if k == position else 1 for k in range(len(sizes))])
        seen = strided_sample(index.expand(sizes).movedim(-1, axis), axis)
        places = sorted(set(seen.flatten().tolist()))
        assert len(places) == sample.shape[position]
        stride = -(-size // len(places)) + 1
        assert places[0] < stride + 1
        assert size - 1 - places[-1] <= stride + 1
        assert all(0 < b - a <= stride + 1 for a, b in itertools.pairwise(places))
    if math.prod(shape) <= SAMPLE_SIZE and shape[axis] <= MAX_UNITS:
        assert sample.numel() == tensor.numel()


@given(shapes_and_axes())
def test_the_last_axis_of_a_sample_runs_over_units(case):
    shape, axis = case
    units = torch.arange(shape[axis]).view([-1 if k == axis else 1 for k in range(len(shape))])
    sample = strided_sample(units.expand(shape), axis)
    sample = sample.reshape(-1, sample.shape[-1])
    assert (sample == sample[0]).all()
    assert sample[0].unique().numel() == sample.shape[-1]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 2)])
def test_an_empty_tensor_gives_an_empty_sample(shape):
    assert strided_sample(torch.zeros(shape), len(shape) - 1).numel() == 0


@st.composite
def steps_of_samples(draw):
    """A few steps, each with some of the keys, each tensor of any shape."""
    count = draw(st.integers(1, 12))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        keys = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
        steps.append([(key, *draw(shapes_and_axes())) for key in keys])
    return steps


@given(steps_of_samples(), st.integers(0, 4))
def test_a_buffer_gives_back_what_was_copied(steps, capacity):
    buffer = SampleBuffer(capacity)
    for number, step in enumerate(steps):
        tensors = {}
        for key, shape, axis in step:
            tensors[key] = torch.randn(shape) + number
            buffer.copy((key, "output"), tensors[key], axis)
        drained = buffer.drain().on_host()
        assert [key for key, _ in drained.keys] == [key for key, _, _ in step]
        for position, (key, _, axis) in enumerate(step):
            expected = strided_sample(tensors[key], axis).numpy()
            matrix = drained.matrix(position)
            assert matrix.shape[1] == expected.shape[-1]
            np.testing.assert_array_equal(matrix, expected.reshape(matrix.shape))
            assert not drained.values[position, expected.size :].any()
            assert drained.sizes[position] == expected.size
    assert len(buffer.drain().keys) == 0


def test_what_was_drained_is_not_overwritten_by_the_next_step():
    buffer = SampleBuffer()
    buffer.copy(("fc", "output"), torch.ones(2, 3), 1)
    first = buffer.drain().on_host()
    buffer.copy(("fc", "output"), torch.zeros(2, 3), 1)
    buffer.drain()
    assert (first.matrix(0) == 1).all()


def test_a_kept_layout_is_filled_again_through_its_views():
    buffer = SampleBuffer(4)
    source = torch.ones(2, 3)
    target, view = buffer.place(("fc", "weight"), source, 0)
    target.copy_(view)
    assert buffer.drain(keep=True).on_host().matrix(0).sum() == 6
    source.mul_(2)
    target.copy_(view)
    assert buffer.drain(keep=True).on_host().matrix(0).sum() == 12
