"""What each optimizer was set to, at every step, and for each group and layer where they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch.optim import Optimizer

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.optimizer_settings import (
    combined_settings,
    decays_weights_directly,
    eps_as_stored,
    group_settings,
)
from neuraldbg.capture.probe import Deferred, Facts, Probe, RunView
from neuraldbg.series import DETAIL, Kind

_SETTINGS = ("momentum", "betas", "alpha", "rho", "eps", "weight_decay")
"""Under which names groups hold what is told at every step, the learning rate apart."""
_GROUPS_AT_REST = 8
"""Groups up to which settings are read at every step; of more, at captured steps."""
_GROUP_ROWS = 64
"""Groups of one optimizer that have rows of their own."""
_FIRST_LOOKS = 2
"""Captured steps at which formats are looked up: the state exists from the second on."""


class OptimizerSettings(Probe):
    """Leaves the settings on the optimizer's row, and on those of layers and groups.

    A group has a row of its own (kind optimizer, layer ``group 1``) at captured steps where groups
    are set differently. The optimizer's row holds the largest of them, of eps the least.
    """

    facts_at_rest = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._stored: WeakKeyDictionary[Optimizer, tuple[int, float, str]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Optimizer, tuple[list[tuple[Any, ...]], Facts]]
        self._known = WeakKeyDictionary()
        self._stepping: list[Optimizer] = []
        self._group_rows: dict[str, Layer] = {}

    def detach(self) -> None:  # noqa: D102
        self._stepping.clear()

    def before_step(self, optimizer: Optimizer) -> None:  # noqa: D102
        self._optimizers.setdefault(optimizer, len(self._optimizers))
        self._stepping.append(optimizer)

    def optimizer_facts(self, optimizer: Optimizer | None) -> Facts:  # noqa: D102
        if optimizer is None:
            return {}
        groups = optimizer.param_groups
        if not self.run.armed:
            if len(groups) > _GROUPS_AT_REST:
                return {}
            return self._at_rest(optimizer)
        facts: dict[str, float | str] = dict(
            _named(combined_settings([group_settings(group) for group in groups]))
        )
        looks, stored, name = self._stored.get(optimizer, (0, math.nan, ""))
        if looks < _FIRST_LOOKS:
            stored, name = eps_as_stored(optimizer)
            self._stored[optimizer] = looks + 1, stored, name
        facts["eps_stored"] = stored
        if stored == 0.0:
            facts[DETAIL] = name
        return facts

    def _at_rest(self, optimizer: Optimizer) -> Facts:
        """The settings, read anew only where one of them is another object than before."""
        groups = optimizer.param_groups
        known = self._known.get(optimizer)
        if known is not None and _are_the_same(groups, known[0]):
            return known[1]
        given = [tuple(map(group.get, _SETTINGS)) for group in groups]
        facts = _named(combined_settings([group_settings(group) for group in groups]))
        self._known[optimizer] = given, facts
        return facts

    def frame(self) -> Iterable[Deferred]:  # noqa: D102
        stepping, self._stepping = self._stepping, []
        blocks = [block for optimizer in stepping for block in self._rows(optimizer)]
        if blocks:
            yield Deferred.of(blocks)

    def _rows(self, optimizer: Optimizer) -> Iterable[Block]:
        groups = optimizer.param_groups
        settings = [group_settings(group) for group in groups]
        decoupled = [decays_weights_directly(optimizer, group) for group in groups]
        group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        held = [
            (layer, group_of[layer.sampled_weight])
            for layer in self.run.layers_with_parameters
            if layer.sampled_weight in group_of
        ]
        if held:
            numbers = [number for _, number in held]
            columns = {
                "learning_rate": _column(settings, "value", numbers),
                "weight_decay": _column(settings, "weight_decay", numbers),
                "decoupled_decay": np.array([float(decoupled[number]) for number in numbers]),
            }
            yield Block(0, Kind.PARAMETER, [layer for layer, _ in held], columns)
        if len(groups) > 1 and any(setting != settings[0] for setting in settings[1:]):
            yield self._rows_of_groups(optimizer, settings[:_GROUP_ROWS])

    def _rows_of_groups(self, optimizer: Optimizer, settings: list[dict[str, float]]) -> Block:
        number = self._optimizers.get(optimizer, 0)
        prefix = f"optimizer {number} " if number else ""
        layers = [
            self._row_of(f"{prefix}group {position}", position) for position in range(len(settings))
        ]
        names = dict.fromkeys(name for setting in settings for name in setting)
        everyone = range(len(settings))
        columns = {name: _column(settings, name, everyone) for name in names}
        return Block(0, Kind.OPTIMIZER, layers, columns)

    def _row_of(self, name: str, position: int) -> Layer:
        """What stands for a group in the column of layers: one object for all steps."""
        return self._group_rows.setdefault(name, Layer(name, None, index=position))


def _are_the_same(groups: list[dict[str, Any]], given: list[tuple[Any, ...]]) -> bool:
    """Whether groups hold the very objects given; comparing tensors would make a device wait."""
    if len(groups) != len(given):
        return False
    for group, values in zip(groups, given, strict=True):
        for name, value in zip(_SETTINGS, values, strict=True):
            if group.get(name) is not value:
                return False
    return True


def _named(settings: dict[str, float]) -> dict[str, float]:
    """Settings without the learning rate, which the optimizer's row has already."""
    settings.pop("value", None)
    return settings


def _column(settings: list[dict[str, float]], name: str, numbers: Iterable[int]) -> np.ndarray:
    return np.array([settings[number].get(name, math.nan) for number in numbers])
