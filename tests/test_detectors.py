"""Each detector on small hand-made series: fires on its sign, silent on the healthy twin."""

import math

import numpy as np
import pandas as pd
import pytest

from neuraldbg.capture import detect_events
from neuraldbg.capture.detectors import DETECTORS
from neuraldbg.capture.panel import Panels
from neuraldbg.event_table import EVENT_COLUMNS
from neuraldbg.series import build_series, empty_series
from neuraldbg.thresholds import Thresholds

STEPS = 60
LAYERS = ("in", "mid", "out")
HEALTHY = {
    "input": {"rms": 1.0, "max_abs": 3.0, "feature_spread": 2.0, "nonfinite_fraction": 0.0},
    "output": {
        "rms": 1.0, "silent_fraction": 0.1, "dead_fraction": 0.0, "saturated_fraction": 0.1,
        "nonfinite_fraction": 0.0,
    },
    "gradient": {"norm": 1.0, "rms": 0.1, "cosine": 0.0, "nonfinite_fraction": 0.0},
    "parameter": {
        "rms": 0.1, "gain": 0.6, "unit_spread": 1.0, "trainable": 1.0, "in_optimizer": 1.0,
        "nonfinite_fraction": 0.0,
    },
    "update": {"rms": 1e-4, "ratio": 1e-3},
    "loss": {"expected": 2.3, "nonfinite_fraction": 0.0},
    "optimizer": {"value": 0.01, "gradient_kept": 0.0},
}  # fmt: skip
RUN_WIDE = ("loss", "optimizer")


class Series:
    """A healthy run of three layers, to be spoiled one number at a time."""

    def __init__(self, steps=STEPS, every=1) -> None:
        self.steps = list(range(0, steps, every))
        self.rows = {
            (step, kind, layer): dict(columns)
            for step in self.steps
            for kind, columns in HEALTHY.items()
            for layer in ((None,) if kind in RUN_WIDE else ("in",) if kind == "input" else LAYERS)
        }
        for step in self.steps:
            self.rows[step, "loss", None]["value"] = 2.3 * 0.97**step

    def put(self, kind, layer, steps=None, **columns):
        """Set columns of a layer; each value a number or a function of the step."""
        for step in self.steps if steps is None else steps:
            row = self.rows.setdefault((step, kind, layer), {})
            for name, value in columns.items():
                row[name] = value(step) if callable(value) else value
        return self

    def drop(self, kind):
        self.rows = {key: row for key, row in self.rows.items() if key[1] != kind}
        return self

    def table(self):
        names = sorted({name for row in self.rows.values() for name in row})
        index = {None: -1, **{name: k for k, name in enumerate(LAYERS)}}
        return build_series(
            {
                "step": [step for step, _, _ in self.rows],
                "rank": [0] * len(self.rows),
                "kind": [kind for _, kind, _ in self.rows],
                "layer": [layer for _, _, layer in self.rows],
                "layer_index": [index.get(layer, -1) for _, _, layer in self.rows],
                **{name: [row.get(name, np.nan) for row in self.rows.values()] for name in names},
            }
        )

    def events(self, **kwargs):
        return detect_events(self.table(), **kwargs)

    def found(self):
        """(type, layer, first step, last step, state) of each event."""
        return [
            (row.event_type, None if pd.isna(row.layer) else row.layer, row.step_start,
             row.step_end, row.to_state)
            for row in self.events().itertuples()
        ]  # fmt: skip


LAST = STEPS - 1


@pytest.mark.parametrize("every", [1, 4])
def test_a_healthy_run_has_no_events(every):
    assert Series(every=every).found() == []


def test_an_empty_series_has_no_events():
    events = detect_events(empty_series())
    assert len(events) == 0
    assert list(events.columns) == list(EVENT_COLUMNS)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", ["nothing", *HEALTHY])
def test_a_detector_does_without_any_kind_of_rows(detector, kind):
    table = empty_series() if kind == "nothing" else Series().drop(kind).table()
    assert list(detector(Panels(table), Thresholds())) == []


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_detector_does_with_a_single_row(detector, kind):
    layer = None if kind in RUN_WIDE else "in"
    series = Series(1)
    series.rows = {(0, kind, layer): series.rows[0, kind, layer]}
    assert list(detector(Panels(series.table()), Thresholds())) == []


# Weights and inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (0.01, ("weights_small_at_start", "collapsed")),
        (0.1, ("weights_small_at_start", "small")),
        (4.0, ("weights_large_at_start", "large")),
        (9.0, ("weights_large_at_start", "extreme")),
        (0.0, None),
        (math.nan, None),
        (1.4, None),
    ],
)
def test_initial_weights(gain, expected):
    found = Series().put("parameter", "mid", gain=gain).found()
    assert found == ([] if expected is None else [(expected[0], "mid", 0, 0, expected[1])])


def test_weights_that_become_small_later_did_not_start_so():
    assert Series().put("parameter", "mid", range(5, STEPS), gain=0.01).found() == []


def test_identical_units():
    assert Series().put("parameter", "mid", unit_spread=0.0).found() == [
        ("units_identical", "mid", 0, LAST, "identical")
    ]


@pytest.mark.parametrize(
    ("steps", "columns"),
    [(range(2), {}), (range(1, STEPS), {}), (range(STEPS), {"trainable": 0.0})],
    ids=["they_come_apart", "later", "frozen"],
)
def test_units_that_may_be_identical(steps, columns):
    assert Series().put("parameter", "mid", steps, unit_spread=0.0, **columns).found() == []


def test_identical_units_end_when_they_come_apart():
    assert Series().put("parameter", "mid", range(20), unit_spread=0.0).found() == [
        ("units_identical", "mid", 0, 19, "identical")
    ]


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        ({"rms": 5.0, "max_abs": 20.0}, "odd"),
        ({"rms": 130.0, "max_abs": 255.0}, "extreme"),
        ({"rms": 1e-3, "max_abs": 1e-2}, "extreme"),
        ({"feature_spread": 100.0}, "odd"),
        ({"feature_spread": 1e4}, "extreme"),
        ({"rms": 0.05, "max_abs": 1.0}, None),
        ({"rms": 0.0, "max_abs": 0.0}, None),
        ({"rms": math.nan, "max_abs": math.nan, "feature_spread": math.nan}, None),
    ],
)
def test_input_scale(columns, state):
    found = Series().put("input", "in", **columns).found()
    assert found == ([] if state is None else [("input_off_scale", "in", 0, LAST, state)])


def test_a_target_is_no_input():
    series = Series().put("input", "in", target=0.0)
    series.put("input", None, target=1.0, rms=500.0, max_abs=900.0, nonfinite_fraction=0.0)
    assert series.found() == []


# Activations ------------------------------------------------------------------------------------


def test_saturation():
    series = Series().put("output", "mid", range(10, 30), saturated_fraction=0.9)
    assert series.found() == [("activation_saturated", "mid", 10, 29, "saturated")]


@pytest.mark.parametrize(
    ("layer", "steps", "share"),
    [("mid", range(10, 12), 0.9), ("mid", range(STEPS), 0.4), ("out", range(STEPS), 0.9)],
    ids=["short", "few", "the_last_layer"],
)
def test_saturation_that_does_no_harm(layer, steps, share):
    assert Series().put("output", layer, steps, saturated_fraction=share).found() == []


def test_dead_units_begin_where_the_silence_began():
    series = Series().put("output", "mid", range(20, STEPS), silent_fraction=0.9)
    series.put("output", "mid", range(28, STEPS), dead_fraction=0.8)
    assert series.found() == [("activation_dead", "mid", 20, LAST, "dead")]


def test_units_dead_from_the_start():
    series = Series().put("output", "mid", silent_fraction=1.0)
    series.put("output", "mid", range(8, STEPS), dead_fraction=1.0)
    assert series.found() == [("activation_dead", "mid", 0, LAST, "dead")]


def test_silent_units_that_come_back_are_not_dead():
    assert Series().put("output", "mid", range(20, 24), silent_fraction=1.0).found() == []


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(0.1, "activation_fading"), (4.0, "activation_blowup"), (0.5, None), (2.0, None)],
)
def test_signal_propagation(factor, expected):
    series = Series()
    for k, layer in enumerate(LAYERS):
        series.put("output", layer, rms=factor**k)
    assert series.found() == ([] if expected is None else [(expected, "out", 0, 0, "anomalous")])


def test_activations_that_run_away():
    series = Series().put("output", "mid", range(30, STEPS), rms=100.0)
    assert series.found() == [("activation_blowup", "mid", 30, LAST, "anomalous")]


def test_activations_that_come_up_from_near_zero():
    series = Series().put("output", "mid", [0], rms=1e-3)
    assert "activation_blowup" not in [event for event, *_ in series.found()]


# Loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "state"), [(10.0, "high"), (100.0, "extreme"), (5.0, None)])
def test_a_loss_that_starts_high(first, state):
    series = Series().put("loss", None, value=lambda step: first * 0.9**step)
    expected = [] if state is None else [("loss_high_at_start", None, 0, 0, state)]
    assert [event for event in series.found() if event[0] != "loss_flat"] == expected


@pytest.mark.parametrize(
    ("course", "state"),
    [
        (lambda step: 2.3 if step < 30 else 5.0, "rising"),
        (lambda step: 2.3 if step < 30 else 500.0, "diverging"),
        (lambda step: 2.3 * 0.9**step if not 30 <= step < 40 else 5.0, "spiked"),
    ],
)
def test_a_loss_that_rises(course, state):
    found = Series().put("loss", None, value=course).found()
    assert [(event, start, to) for event, _, start, _, to in found] == [("loss_rising", 30, state)]


def test_the_onset_of_a_rise_is_no_earlier_bad_batch():
    series = Series().put("loss", None, value=lambda step: 2.3 if step < 40 else 50.0)
    series.put("loss", None, [5], value=10.0)
    [(event, _, start, end, state)] = series.found()
    assert (event, start, end, state) == ("loss_rising", 40, LAST, "diverging")


@pytest.mark.parametrize("bad", [[12], [12, 30]])
def test_single_bad_batches_are_no_rise(bad):
    assert Series().put("loss", None, bad, value=50.0).found() == []


def test_noise_is_no_rise():
    noise = np.random.default_rng(0).normal(1, 0.3, STEPS)
    series = Series().put("loss", None, value=lambda s: 2.3 * 0.97**s * max(noise[s], 0.2))
    assert series.found() == []


@pytest.mark.parametrize(
    ("end", "state"), [(2.3, "flat"), (2.29, "flat"), (2.2, "slow"), (1.0, None)]
)
def test_a_loss_that_does_not_fall(end, state):
    series = Series().put("loss", None, value=lambda s: 2.3 + (end - 2.3) * min(s / 40, 1))
    expected = [] if state is None else [("loss_flat", None, 0, LAST, state)]
    assert series.found() == expected


def test_a_loss_that_falls_to_what_guessing_scores_is_flat():
    series = Series().put("loss", None, value=lambda step: 2.3 + 4 * 0.7**step)
    assert [(event, to) for event, *_, to in series.found()] == [("loss_flat", "flat")]


def test_a_short_run_is_not_flat():
    assert Series(30).put("loss", None, value=2.3).found() == []


def test_losses_that_oppose_each_other_or_change_sign_are_not_judged():
    two = Series().put("loss", None, value=2.3)
    two.put("loss", "optimizer 1", value=lambda step: 1.0 + step)
    assert two.found() == []
    assert Series().put("loss", None, value=math.sin).found() == []


# Gradients --------------------------------------------------------------------------------------


def test_gradients_that_vanish_towards_the_input():
    series = Series()
    for layer, size in zip(LAYERS, (1e-6, 1e-4, 1.0), strict=True):
        series.put("gradient", layer, norm=size, rms=size)
    assert sorted(series.found()) == [
        ("gradient_vanishing", "in", 0, LAST, "vanishing"),
        ("gradient_vanishing", "mid", 0, LAST, "vanishing"),
    ]


def test_a_faint_layer_between_others_is_no_vanishing_gradient():
    series = Series().put("gradient", "mid", norm=1e-4, rms=1e-5)
    assert series.found() == []


def test_gradients_below_the_floor_vanish_whatever_the_others_do():
    series = Series()
    for layer in LAYERS:
        series.put("gradient", layer, range(30, STEPS), norm=1e-8, rms=1e-9)
    assert series.found() == [
        ("gradient_vanishing", layer, 30, LAST, "vanishing") for layer in reversed(LAYERS)
    ]


def test_layers_without_weight_matrices_are_not_compared():
    series = Series().put("parameter", "in", gain=math.nan)
    series.put("gradient", "in", norm=1e-5, rms=1e-6)
    assert series.found() == []


def test_gradients_that_explode():
    series = Series().put("gradient", "mid", range(25, STEPS), norm=200.0, rms=20.0)
    assert series.found() == [("gradient_exploding", "mid", 25, LAST, "exploding")]


def test_gradients_that_explode_within_the_first_steps():
    series = Series()
    for layer in LAYERS:
        series.put("gradient", layer, range(2, STEPS), norm=500.0, rms=50.0)
    found = series.found()
    assert [(event, start) for event, _, start, *_ in found] == [("gradient_exploding", 2)] * 3
    assert [layer for _, layer, *_ in found] == ["out", "mid", "in"]


def test_gradients_that_come_up_from_near_zero_do_not_explode():
    series = Series().put("gradient", "mid", [0, 1, 2], norm=1e-5, rms=1e-6)
    assert [event for event, *_ in series.found() if event == "gradient_exploding"] == []


@pytest.mark.parametrize(
    ("cosine", "expected"),
    [(-0.8, "gradients_opposed"), (0.99, "gradients_aligned"), (0.4, None), (-0.1, None)],
)
def test_gradient_direction(cosine, expected):
    series = Series()
    for layer in LAYERS:
        series.put("gradient", layer, range(1, STEPS), cosine=cosine)
        series.put("gradient", layer, [0], cosine=math.nan)
    assert [event for event, *_ in series.found()] == ([expected] if expected else [])


# Updates and wiring -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "state"), [(1e-6, "tiny"), (1e-4, "small"), (1e-3, None), (0.0, "tiny")]
)
def test_small_updates(ratio, state):
    series = Series()
    for layer in LAYERS:
        series.put("update", layer, ratio=ratio)
    expected = [] if state is None else [("update_too_small", None, 0, LAST, state)]
    assert series.found() == expected


def test_one_layer_that_moves_is_enough():
    series = Series().put("update", "in", ratio=1e-6).put("update", "mid", ratio=1e-6)
    assert series.found() == []


def test_a_run_that_has_converged_moves_little_and_rightly():
    series = Series()
    for layer in LAYERS:
        series.put("update", layer, range(35, STEPS), ratio=1e-6)
    assert series.found() == []


@pytest.mark.parametrize(
    ("steps", "ratio", "state"),
    [
        (range(STEPS), 0.2, "large"),
        (range(10, 14), 0.9, "huge"),
        ([0], 0.9, "huge"),
        ([0], 0.2, None),
        (range(STEPS), 0.05, None),
    ],
)
def test_large_updates(steps, ratio, state):
    found = Series().put("update", "mid", steps, ratio=ratio).found()
    first, last = steps[0], steps[-1]
    assert found == ([] if state is None else [("update_too_large", "mid", first, last, state)])


def test_growing_weights():
    series = Series().put("parameter", "mid", rms=lambda step: 0.1 * (1 + step / 5))
    assert series.found() == [("weights_growing", "mid", 21, LAST, "growing")]


def test_weights_that_grow_from_a_meant_zero():
    series = Series().put("parameter", "mid", rms=lambda step: 1e-6 + step * 1e-3)
    series.put("parameter", "mid", [0], gain=6e-6 / 1)
    assert "weights_growing" not in [event for event, *_ in series.found()]


@pytest.mark.parametrize(("steps", "fires"), [(range(1, STEPS), True), (range(1, 20), False)])
def test_gradients_not_reset(steps, fires):
    series = Series().put("optimizer", None, [0], gradient_kept=math.nan)
    series.put("optimizer", None, steps, gradient_kept=1.0)
    assert series.found() == ([("gradient_not_reset", None, 1, LAST, "kept")] if fires else [])


def test_a_layer_that_no_optimizer_holds():
    series = Series().put("parameter", "in", in_optimizer=0.0)
    series.put("update", "in", rms=0.0, ratio=0.0)
    assert series.found() == [("update_missing", "in", 0, LAST, "left_out")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s.put("update", "in", rms=0.0, ratio=0.0),
        lambda s: s.put("parameter", "in", in_optimizer=0.0),
        lambda s: (
            s.put("parameter", "in", in_optimizer=0.0)
            .put("update", "in", rms=0.0, ratio=0.0)
            .put("gradient", "in", norm=math.nan, rms=math.nan)
        ),
    ],
    ids=["held_but_still", "moved_by_hand", "frozen"],
)
def test_layers_that_are_not_left_out(spoil):
    assert spoil(Series()).found() == []


def test_an_optimizer_that_holds_nothing_of_the_model():
    series = Series()
    for layer in LAYERS:
        series.put("parameter", layer, in_optimizer=0.0)
        series.put("update", layer, rms=0.0, ratio=0.0)
    assert [(event, layer) for event, layer, *_ in series.found()] == [
        ("update_missing", layer) for layer in reversed(LAYERS)
    ]


# Non-finite values, order and ids ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layer", "event"),
    [
        ("input", "in", "input_non_finite"),
        ("output", "mid", "activation_non_finite"),
        ("gradient", "mid", "gradient_non_finite"),
        ("parameter", "mid", "weights_non_finite"),
        ("loss", None, "loss_non_finite"),
    ],
)
def test_non_finite_values(kind, layer, event):
    series = Series().put(kind, layer, range(30, STEPS), nonfinite_fraction=0.5)
    assert series.found() == [(event, layer, 30, LAST, "non_finite")]


def test_a_target_that_is_not_finite():
    series = Series().put("input", "in", target=0.0)
    series.put("input", None, [7], target=1.0, nonfinite_fraction=0.1, rms=1.0, max_abs=1.0)
    assert series.found() == [("target_non_finite", None, 7, 7, "non_finite")]


@pytest.mark.parametrize("kind", ["loss", "parameter"])
def test_other_events_end_at_the_first_non_finite_step(kind):
    series = Series().put("output", "mid", range(10, STEPS), saturated_fraction=0.9)
    layer = None if kind == "loss" else "out"
    series.put(kind, layer, range(40, STEPS), nonfinite_fraction=1.0)
    series.put("gradient", "mid", range(40, STEPS), norm=1e9)
    saturated, broken = series.found()
    assert saturated == ("activation_saturated", "mid", 10, 39, "saturated")
    assert broken[2:4] == (40, LAST)


def test_a_run_that_is_broken_from_the_start():
    series = Series().put("loss", None, value=math.nan, nonfinite_fraction=1.0)
    assert series.found() == [("loss_non_finite", None, 0, LAST, "non_finite")]


def test_events_are_numbered_in_causal_order():
    series = Series().put("parameter", "mid", [0], gain=9.0)
    series.put("output", "in", range(20, STEPS), rms=100.0)
    series.put("output", "mid", range(20, STEPS), rms=100.0)
    series.put("gradient", "in", range(20, STEPS), norm=1e4)
    series.put("gradient", "out", range(20, STEPS), norm=1e4)
    series.put("update", "mid", range(20, STEPS), ratio=0.9)
    series.put("loss", None, range(20, STEPS), value=500.0)
    table = series.events()
    assert table["event_id"].tolist() == list(range(len(table)))
    assert [(row.event_type, row.layer) for row in table.itertuples() if row.step_start] == [
        ("activation_blowup", "in"),
        ("activation_blowup", "mid"),
        ("loss_rising", pytest.approx(math.nan, nan_ok=True)),
        ("gradient_exploding", "out"),
        ("gradient_exploding", "in"),
        ("update_too_large", "mid"),
    ]
    assert table["event_type"].iloc[0] == "weights_large_at_start"
    assert table["severity"].between(0, 1).all()
    assert (table["step_start"] <= table["step_end"]).all()


def test_faults_of_the_capture_become_events():
    events = Series().events(faults=[(3, "ValueError: x")])
    assert events[["event_type", "step_start", "to_state"]].to_numpy().tolist() == [
        ["capture_fault", 3, "ValueError: x"]
    ]


def test_thresholds_decide():
    series = Series().put("output", "mid", saturated_fraction=0.4)
    found = series.events(thresholds=Thresholds(saturated_share=0.3))
    assert found["event_type"].tolist() == ["activation_saturated"]


def test_sparse_capture_gives_the_captured_steps():
    series = Series(200, every=20).put("output", "mid", range(100, 200, 20), saturated_fraction=0.9)
    assert series.found() == [("activation_saturated", "mid", 100, 180, "saturated")]
