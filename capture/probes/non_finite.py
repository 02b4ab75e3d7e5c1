"""Where the first non-finite value came from: batch, target, activation, operation or gradient."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.graph_walk import Node, walk
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.local_shards import local_shard
from neuraldbg.capture.loss_findings import UNDEFINED, join_findings
from neuraldbg.capture.loss_head import read_loss_terms
from neuraldbg.capture.parameter_sampler import norms
from neuraldbg.capture.probe import Probe, RunView
from neuraldbg.capture.undefined_operation import find_undefined, inspect_operation, is_steep
from neuraldbg.series import DETAIL, Kind

_MOST_FINDINGS = 4
"""Non-finite passes that are looked into: after the first few nothing is learned."""
_MOST_SPOTS = 8
"""Operations looked at in every pass, those nearest the loss."""
_SPOT_VALUES = 1 << 13
"""Values of such an operation's operand up to which it is looked at: a few microseconds."""
_PROBED_VALUES = 1 << 16
"""Values of a gradient up to which it is looked at in every pass."""
_LEAST_LOSS_SCALE = 128.0
"""Constant from which on a loss counts as multiplied for half precision: gradients overflow then
until the scale has come down, and steps are skipped, as they should be."""
_LONGEST_PATH = 48
_REWALK_PERIOD = 16

Path = tuple[int, ...]


class NonFinite(Probe):
    """Rows about the first passes whose loss or gradients are not finite.

    The order decides what came first, and a graph lives no longer than its backward pass: so a
    loss that is not finite is looked into before its pass, and after a captured pass the gradient
    of one small parameter of the first layers, which every path back leads to. A gradient that
    breaks where the loss is finite comes from an operation that is infinitely steep at its value;
    those that a graph holds are found from time to time, and while there are any, looked at before
    every pass. On accelerators, where a look would make the device wait, none of this is done.
    """

    rarely = False
    when_broken = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._pass = 0
        self._left = _MOST_FINDINGS
        self._finite = True
        self._spots: list[tuple[Path, str]] = []
        self._walks = 0
        self._suspect: str | None = None
        self._probed: Parameter | None = None
        self._watches_gradient = False

    def attach(self) -> None:
        """Choose anew what to look at: the model may have changed."""
        self._spots, self._walks, self._probed = [], 0, None
        self.every_step = False

    def detach(self) -> None:
        """Let go of the parameter looked at."""
        self._probed = None

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Look at the loss, and at operations that may break the gradient."""
        self._pass = self.run.passes
        self._suspect = None
        self._watches_gradient = False
        if not roots or roots[0].device.type != "cpu" or not self._left:
            return
        value = float(roots[0].detach()) if roots[0].numel() == 1 else 0.0
        if not math.isfinite(value):
            if self._finite:
                self._log(self._origin_of_loss(roots[0]))
            self._finite = False
            return
        self._watches_gradient = True
        if roots[0].grad_fn is not None and not self.run.saved_tensors_are_packed:
            try:
                self._watches_gradient = not _is_scaled_up(roots[0].grad_fn)
                self._look_at_spots(roots[0].grad_fn)
            except RuntimeError:  # a graph already freed, which the backward pass will say itself
                self._spots = []
            self.every_step = bool(self._spots)

    def after_backward(self) -> None:
        """Look at the gradient that all others flow into."""
        if self._pass != self.run.passes:  # a pass that was not looked at before
            self._suspect = None
        if not self._watches_gradient or not self._left:
            return
        probed = self._probed
        if probed is None or probed.grad is None:
            probed = self._probed = self._choose_probed()
        gradient = None if probed is None or probed.grad is None else local_shard(probed.grad)
        if gradient is None or not _is_plain(gradient):
            return
        if math.isfinite(float(gradient.sum())) or not bool((~gradient.isfinite()).any()):
            self._finite = True
            return
        if self._finite:
            self._log(self._broken_gradients())
        self._finite = False

    def _log(self, blocks: Sequence[Block]) -> None:
        self._left -= 1
        for block in blocks:
            block.columns["batch"] = np.full(len(block.layers), self.run.passes - 1.0)
        self.run.log_rows(blocks)

    # The loss is not finite -----------------------------------------------------------------------

    def _origin_of_loss(self, loss: Tensor) -> list[Block]:
        step = self.run.current_step()
        blocks = [
            _row(step, Kind.INPUT, [layer], _broken_share(tensor), target=0.0)
            for layer, tensor in self.run.batch.items()
            if tensor.device.type == "cpu"
        ]
        broken = [
            layer
            for layer in self.run.layers_with_parameters
            if not norms([p.detach() for p in layer.parameters]).isfinite().all()
        ]
        if broken:  # by the step before, or they came so
            blocks.append(_row(max(step - 1, 0), Kind.PARAMETER, broken))
        if not self.run.saved_tensors_are_packed and loss.grad_fn is not None:
            with suppress(RuntimeError):  # a graph already freed
                clean = not broken and not any(
                    (block.columns["nonfinite_fraction"] > 0).any() for block in blocks
                )
                blocks += self._origin_in_graph(loss, step, clean)
        return blocks

    def _origin_in_graph(self, loss: Tensor, step: int, clean: bool) -> list[Block]:
        """What the graph shows; `clean` if the batch and the weights are finite."""
        blocks = []
        terms = read_loss_terms(loss)
        shares = [_broken_share(t.target) for t in terms if _is_of_values(t.target)]
        nodes = tuple(walk(loss.grad_fn))
        operation = find_undefined(nodes, sys.maxsize, forward=True)
        layer = _first_broken_layer(nodes, self.run.layers_with_parameters)
        if operation is not None:
            blocks.append(_undefined_row(step, operation))
        if layer is not None:
            blocks.append(_row(step, Kind.OUTPUT, [layer]))
        if clean and not blocks:  # then the prediction is finite, and a difference shows the target
            differences = [t.difference for t in terms if t.target is None]
            shares += [_broken_share(d) for d in differences if _is_of_values(d)]
        if max(shares, default=0.0) > 0:
            blocks.append(_row(step, Kind.INPUT, [None], max(shares), target=1.0))
        return blocks

    # The gradient is not finite -------------------------------------------------------------------

    def _broken_gradients(self) -> list[Block]:
        step = self.run.current_step()
        broken = [
            layer
            for layer in self.run.layers_with_parameters
            if not norms([p.grad for p in layer.parameters if p.grad is not None]).isfinite().all()
        ]
        blocks = [_row(step, Kind.GRADIENT, broken)] if broken else []
        if self._suspect is not None:
            blocks.append(_undefined_row(step, self._suspect))
        return blocks

    def _look_at_spots(self, root: Node) -> None:
        if self.run.armed:
            if self._walks % _REWALK_PERIOD == 0:
                self._spots = list(_steep_spots(root))
            self._walks += 1
        for path, name in self._spots:
            node = _follow(root, path)
            if node is None or node.name() != name:
                continue
            found = inspect_operation(node, _SPOT_VALUES)
            if found is not None:
                self._suspect = found.what
                return

    def _choose_probed(self) -> Parameter | None:
        """The smallest parameter of the first layer that has a gradient."""
        layers = sorted(self.run.layers_with_parameters, key=lambda layer: layer.index)
        for layer in layers:
            reached = [
                p
                for p in layer.parameters
                if p.grad is not None
                and _is_plain(local_shard(p.grad))
                and p.numel() <= _PROBED_VALUES
            ]
            if reached:
                return min(reached, key=torch.Tensor.numel)
        return None


def _is_scaled_up(root: Node) -> bool:
    """Whether a loss is multiplied with a large constant at last, as a gradient scaler does."""
    if not root.name().startswith("MulBackward"):
        return False
    factor = root._saved_other if root._saved_other is not None else root._saved_self
    if isinstance(factor, Tensor):
        return factor.numel() == 1 and float(factor) >= _LEAST_LOSS_SCALE
    return isinstance(factor, int | float) and factor >= _LEAST_LOSS_SCALE


def _is_plain(gradient: Tensor) -> bool:
    """Whether looking at a gradient costs no communication and no wait."""
    return (
        type(gradient) is Tensor
        and gradient.device.type == "cpu"
        and gradient.layout is torch.strided
    )


def _is_of_values(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.is_floating_point()


def _broken_share(tensor: Tensor) -> float:
    """Share of NaN and infinite values."""
    return float((~tensor.detach().isfinite()).float().mean()) if tensor.numel() else 0.0


def _row(
    step: int,
    kind: Kind,
    layers: Sequence[Layer | None],
    share: float = 1.0,
    target: float = math.nan,
) -> Block:
    columns = {"nonfinite_fraction": np.full(len(layers), share)}
    if kind is Kind.INPUT:
        columns["target"] = np.full(len(layers), target)
    return Block(step, kind, layers, columns)


def _undefined_row(step: int, operation: str) -> Block:
    detail = np.array([join_findings({UNDEFINED: operation})], dtype=object)
    return Block(step, Kind.LOSS, [None], {"undefined": np.ones(1), DETAIL: detail})


def _steep_spots(root: Node) -> Iterator[tuple[Path, str]]:
    """Ways from the root to operations whose derivative can be infinite, the nearest first."""
    seen = {root}
    queue: list[tuple[Node, Path]] = [(root, ())]
    found = 0
    for node, path in queue:
        if is_steep(node):
            yield path, node.name()
            found += 1
        if found == _MOST_SPOTS or len(path) == _LONGEST_PATH or len(queue) > 4_000:
            return
        for place, (child, _) in enumerate(node.next_functions):
            if child is not None and child not in seen:
                seen.add(child)
                queue.append((child, (*path, place)))


def _follow(root: Node, path: Path) -> Node | None:
    node = root
    for place in path:
        children = node.next_functions
        if place >= len(children) or children[place][0] is None:
            return None
        node = children[place][0]
    return node


_OPERANDS = {
    "AddmmBackward0": "_saved_mat1",
    "MmBackward0": "_saved_self",
    "ConvolutionBackward0": "_saved_input",
    "NativeLayerNormBackward0": "_saved_input",
    "NativeBatchNormBackward0": "_saved_input",
    "NativeGroupNormBackward0": "_saved_input",
}
"""Nodes of layers, by what they save of their input."""


def _first_broken_layer(nodes: Sequence[Node], layers: Sequence[Layer]) -> Layer | None:
    """The layer whose output is the first that is not finite, by what the layers after it saved.

    That is the one before the first layer with a non-finite input. None where the inputs are all
    finite, and where the first layer's own input is not.
    """
    owners = {parameter: layer for layer in layers for parameter in layer.parameters}
    inputs: dict[Layer, bool] = {}
    for node in nodes:
        name = _OPERANDS.get(node.name())
        operand = getattr(node, name, None) if name else None
        if not isinstance(operand, Tensor):
            continue
        layer = _owner(node, owners)
        if layer is not None:
            inputs[layer] = inputs.get(layer, True) and bool(operand.isfinite().all())
    ordered = sorted(inputs, key=lambda layer: layer.index)
    for before, layer in pairwise(ordered):
        if inputs[before] and not inputs[layer]:
            return before
    return None


def _owner(node: Node, owners: dict[Parameter, Layer]) -> Layer | None:
    """The layer whose parameter a node takes, itself or transposed."""
    for child, _ in node.next_functions:
        if child is not None and child.name() == "TBackward0":
            child = child.next_functions[0][0]  # noqa: PLW2901
        variable = getattr(child, "variable", None)
        if variable is not None and variable in owners:
            return owners[variable]
    return None
