"""Blocks: the rows that one captured step adds to the series, kind by kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from neuraldbg.capture.layers import Layer
from neuraldbg.capture.statistics import Columns
from neuraldbg.series import DETAIL, Kind

MAIN_STATISTIC = {
    Kind.INPUT: "rms",
    Kind.OUTPUT: "rms",
    Kind.OUTPUT_GRADIENT: "rms",
    Kind.GRADIENT: "norm",
    Kind.PARAMETER: "rms",
    Kind.UPDATE: "rms",
}
"""The statistic whose least and greatest value a row keeps for the steps it stands for."""


@dataclass(slots=True)
class Block:
    """Rows of one kind from one captured step: a layer for each row, and their columns.

    Attributes:
        step: The step.
        kind: Of all rows.
        layers: One for each row; None for rows without a layer.
        columns: Arrays of shape (rows,).
    """

    step: int
    kind: Kind
    layers: Sequence[Layer | None]
    columns: Columns

    @property
    def size(self) -> int:
        """Bytes of all columns."""
        return sum(values.nbytes for values in self.columns.values())

    def _keys(self) -> list[Hashable]:
        """What tells rows of one step and kind apart: layer, and the flags that make it another."""
        rows = len(self.layers)
        flags = [
            self.columns.get(name, np.zeros(rows)).tolist() for name in ("target", "evaluation")
        ]
        return list(zip(self.layers, *flags, strict=True))


def merge_blocks(blocks: Sequence[Block], step: int) -> list[Block]:
    """One block for each kind: rows of the same layer become one, later numbers win over missing.

    Args:
        blocks: Of one step.
        step: Set on all of them.

    Returns:
        Blocks with float32 columns (text apart), in the order of the kinds' first appearance.

    Example:
        >>> first = Block(0, Kind.LOSS, [None], {"value": np.array([2.0])})
        >>> second = Block(0, Kind.LOSS, [None], {"expected": np.array([2.3])})
        >>> merged = merge_blocks([first, second], step=7)
        >>> len(merged), merged[0].step, sorted(merged[0].columns)
        (1, 7, ['expected', 'value'])
    """
    by_kind: dict[Kind, list[Block]] = {}
    for block in blocks:
        if len(block.layers):
            by_kind.setdefault(block.kind, []).append(block)
    return [Block(step, kind, *_united(parts)) for kind, parts in by_kind.items()]


def _united(parts: list[Block]) -> tuple[Sequence[Layer | None], Columns]:
    if len(parts) == 1:
        columns = {name: _compact(name, values) for name, values in parts[0].columns.items()}
        return parts[0].layers, columns
    row_of: dict[Hashable, int] = {}
    layers: list[Layer | None] = []
    places = []
    for part in parts:
        for key, layer in zip(part._keys(), part.layers, strict=True):
            if key not in row_of:
                row_of[key] = len(layers)
                layers.append(layer)
        places.append(np.array([row_of[key] for key in part._keys()]))
    columns = {}
    for part, place in zip(parts, places, strict=True):
        for name, values in part.columns.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = _empty(name, len(layers))
            given = _compact(name, values)
            known = given != None if name == DETAIL else ~np.isnan(given)  # noqa: E711
            column[place[known]] = given[known]
    return layers, columns


def _compact(name: str, values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=object if name == DETAIL else np.float32)


def _empty(name: str, rows: int) -> np.ndarray:
    if name == DETAIL:
        return np.full(rows, None, dtype=object)
    return np.full(rows, np.nan, dtype=np.float32)


def fold_block(gone: Block, kept: Block) -> None:
    """Hand a block's extremes on to the one that stands for its step from now on.

    Blocks of different layers are left alone: their layers changed in between.
    """
    if gone.kind not in MAIN_STATISTIC or list(gone.layers) != list(kept.layers):
        return
    for name, extreme in (("lowest", np.fmin), ("highest", np.fmax)):
        kept.columns[name] = extreme(_extreme(gone, name), _extreme(kept, name))


def _extreme(block: Block, name: str) -> np.ndarray:
    known = block.columns.get(name)
    if known is not None:
        return known
    main = block.columns.get(MAIN_STATISTIC[block.kind])
    return np.full(len(block.layers), np.nan, dtype=np.float32) if main is None else main
