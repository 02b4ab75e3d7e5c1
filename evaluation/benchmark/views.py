"""What observers with less to go on have seen of the same run: earlier, or more rarely."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from neuraldbg.capture.event_detection import detect_events
from neuraldbg.evaluation.benchmark.record import FULL, View
from neuraldbg.evaluation.benchmark.run_features import run_features
from neuraldbg.models.evidence import Observed

SPACINGS = (10, 100)
"""Of captured steps, for the views in which most of them are missing."""
FRACTIONS = (0.125, 0.25, 0.5)
"""Of the run, at which it is asked before its end."""


def full_view(series: pd.DataFrame, events: pd.DataFrame, steps: int) -> View:
    """The view of all that was captured.

    Args:
        series: the run's series table.
        events: its event table.
        steps: steps it had.
    """
    return _view(FULL, series, events, steps)


def partial_views(series: pd.DataFrame, steps: int) -> Iterator[View]:
    """Views of the same run when asked on the way, and with most captured steps left out.

    Args:
        series: the run's series table, every step captured.
        steps: steps it had.
    """
    for fraction in FRACTIONS:
        asked = max(1, round(fraction * steps))
        yield _detected(f"step {asked}", series[series["step"] < asked], asked)
    for spacing in SPACINGS:
        yield _detected(f"every {spacing}th", _thinned(series, spacing), steps)


def _thinned(series: pd.DataFrame, spacing: int) -> pd.DataFrame:
    """Layers at every n-th step only; loss, gradient norm and learning rate at every step."""
    return series[series["layer"].isna() | (series["step"] % spacing == 0)]


def _detected(name: str, series: pd.DataFrame, steps: int) -> View:
    return _view(name, series, detect_events(series), steps)


def _view(name: str, series: pd.DataFrame, events: pd.DataFrame, steps: int) -> View:
    return View(name, steps, events, Observed.of(series), run_features(series))
