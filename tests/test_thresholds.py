"""Thresholds: their defaults, and values that make no sense."""

import math
from dataclasses import FrozenInstanceError, fields

import pytest

from neuraldbg import Thresholds


def test_the_defaults_of_the_contract() -> None:
    thresholds = Thresholds()
    assert thresholds.vanishing_gradient == 1e-6
    assert thresholds.exploding_gradient == 1e3
    assert thresholds.coupling_window == 5


@pytest.mark.parametrize("value", [-0.1, math.nan])
@pytest.mark.parametrize("name", ["coupling_window", "dead_share", "loss_flat"])
def test_a_limit_below_zero_or_not_a_number_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Thresholds(**{name: value})


def test_the_cosine_of_opposed_gradients_may_be_negative() -> None:
    assert Thresholds(opposing_cosine=-0.9).opposing_cosine == -0.9
    with pytest.raises(ValueError, match="opposing_cosine=nan"):
        Thresholds(opposing_cosine=math.nan)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("vanishing_gradient", "exploding_gradient"),
        ("update_tiny", "update_small"),
        ("update_large", "update_huge"),
        ("gain_small", "gain_large"),
        ("loss_rise", "loss_divergence"),
        ("opposing_cosine", "aligned_cosine"),
    ],
)
def test_a_pair_in_the_wrong_order_is_refused_by_both_names(low: str, high: str) -> None:
    with pytest.raises(ValueError, match=rf"{low}.*{high}"):
        Thresholds(**{low: getattr(Thresholds(), high) * 2})
    equal = getattr(Thresholds(), high)
    assert getattr(Thresholds(**{low: equal}), low) == equal


def test_limits_cannot_change_under_a_running_capture() -> None:
    with pytest.raises(FrozenInstanceError):
        Thresholds().dead_share = 0.1  # type: ignore[misc]


def test_only_the_cosine_starts_below_zero() -> None:
    below = [f.name for f in fields(Thresholds) if getattr(Thresholds(), f.name) < 0]
    assert below == ["opposing_cosine"]
