"""Which columns of the optimizers' panel are optimizers, and their settings step by step."""

from __future__ import annotations

import numpy as np
import pandas as pd

from neuraldbg.capture.panel import Panel, Panels
from neuraldbg.series import Kind


def optimizer_columns(panel: Panel) -> list[int]:
    """The columns of a panel (kind optimizer) that are optimizers and not their groups."""
    return [
        column for column, name in enumerate(panel.layers) if name is None or "group " not in name
    ]


def only_optimizer(panels: Panels) -> int | None:
    """The column of the only optimizer of a run, None if there are several or none."""
    columns = optimizer_columns(panels.of(Kind.OPTIMIZER))
    return columns[0] if len(columns) == 1 else None


def at_steps(panel: Panel, column: str, layer: int, steps: np.ndarray) -> np.ndarray:
    """A column of one layer at some steps, NaN where there is no row."""
    known = pd.Series(panel[column][:, layer], index=panel.steps)
    return known.reindex(steps).to_numpy()


def learning_rates(panels: Panels, steps: np.ndarray) -> np.ndarray | None:
    """The learning rate of a run's only optimizer at some steps, None where there are several."""
    column = only_optimizer(panels)
    if column is None:
        return None
    return at_steps(panels.of(Kind.OPTIMIZER), "value", column, steps)
