"""What the graph behind a loss says about it: terms, targets, output domain, shapes and axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from neuraldbg.capture.axes import find_wrong_axis
from neuraldbg.capture.blocks import Block
from neuraldbg.capture.broadcasting import find_broadcast
from neuraldbg.capture.first_tensor import first_tensor
from neuraldbg.capture.graph_walk import Node, walk
from neuraldbg.capture.layers import Layer
from neuraldbg.capture.loss_findings import AXIS, BROADCAST, DOMAIN, join_findings
from neuraldbg.capture.loss_head import LossTerm, read_loss_terms
from neuraldbg.capture.output_domain import BOUNDS, find_mismatch, output_activation
from neuraldbg.capture.probe import Deferred, Probe, RunView
from neuraldbg.capture.sampling import strided_sample
from neuraldbg.series import DETAIL, Kind

_OUTPUTS = 4
"""Outputs of the last layers called that are kept until the backward pass begins."""
_REWALK_PERIOD = 32
"""Captured steps between walks of the whole graph: what it is made of seldom changes."""
_OVERSHOOT = 0.05
"""How far beyond an output's range a target must lie to count, in units of the range."""


class LossAnatomy(Probe):
    """Rows about the loss (what to expect of it, what is wrong in its graph) and its target."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self._outputs: dict[Node, tuple[Tensor, int]] = {}
        self._findings: dict[str, str] = {}
        self._passes: list[Deferred] = []
        self._walks = 0

    def detach(self) -> None:
        """Let go of outputs that no backward pass came for."""
        self._outputs.clear()
        self._passes.clear()

    def on_forward(self, layer: Layer, args: Any, output: Any) -> None:  # noqa: ARG002
        """Keep the output for a moment: a loss that is written out does not save it."""
        tensor = first_tensor(output)
        if tensor is None or tensor.grad_fn is None:
            return
        self._outputs[tensor.grad_fn] = (tensor.detach(), tensor._version)
        if len(self._outputs) > _OUTPUTS:
            del self._outputs[next(iter(self._outputs))]

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """Read the graph while it is intact."""
        outputs = {
            node: tensor
            for node, (tensor, version) in self._outputs.items()
            if tensor._version == version  # not written over since
        }
        self._outputs.clear()
        if not roots or roots[0].grad_fn is None or self.run.saved_tensors_are_packed:
            return
        loss = roots[0]
        try:
            terms = read_loss_terms(loss, outputs)
            self._read_structure(loss, terms)
        except RuntimeError:  # a graph already freed, which the backward pass will say itself
            return
        self._passes.append(_loss_row(terms))
        compared = [term for term in terms if _has_values(term)]
        if compared:
            self._passes.append(_target_row(compared[0]))
            self._passes.append(_range_row(compared[0]))

    def after_backward(self) -> None:
        """Outputs of passes whose loss was not followed are let go of."""
        self._outputs.clear()

    def _read_structure(self, loss: Tensor, terms: Sequence[LossTerm]) -> None:
        broadcast = find_broadcast(loss, terms)
        if broadcast is not None:
            self._findings.setdefault(BROADCAST, broadcast)
        for mismatch in filter(None, map(find_mismatch, terms)):
            self._findings.setdefault(DOMAIN, mismatch)
        nodes = () if self._walks % _REWALK_PERIOD else tuple(walk(loss.grad_fn))
        self._walks += 1
        axis = find_wrong_axis(nodes, terms)
        if axis is not None:
            self._findings.setdefault(AXIS, axis)

    def frame(self) -> Iterable[Deferred]:
        """The rows of the passes of this step."""
        passes, self._passes = self._passes, []
        findings, self._findings = self._findings, {}
        detail = join_findings(findings)
        if detail is not None:
            columns = {DETAIL: np.array([detail], dtype=object)}
            passes.append(Deferred.of([Block(0, Kind.LOSS, [None], columns)]))
        return passes


def _has_values(term: LossTerm) -> bool:
    return term.target is not None and term.target.is_floating_point() and term.kind != "classes"


def _sample(tensor: Tensor) -> Tensor:
    """A bounded copy of a tensor's values."""
    detached = tensor.detach()
    return strided_sample(detached, max(detached.dim() - 1, 0)).float().clone()


def _loss_row(terms: Sequence[LossTerm]) -> Deferred:
    """What to expect of the loss, where it is a single known function."""
    if len(terms) != 1:
        return Deferred.of([])
    [term] = terms
    expectation = term.expectation
    tensors = []
    if not expectation.classes and term.target is not None:
        tensors.append(_sample(term.target))

    def make(values: list[np.ndarray]) -> list[Block]:
        columns = {
            "expected": np.array([expectation.value(values[0] if values else None)]),
            "classes": np.array([expectation.classes or math.nan]),
        }
        return [Block(0, Kind.LOSS, [None], columns)]

    return Deferred(make, tensors)


def _target_row(term: LossTerm) -> Deferred:
    """Mean, size and NaN share of a target of values."""
    assert term.target is not None
    target = term.target.detach()
    broken_values = ~target.isfinite()
    if term.difference is not None and term.prediction is not None:
        broken_values &= term.prediction.isfinite()  # else the target is not known
    broken = broken_values.float().mean()

    def make(values: list[np.ndarray]) -> list[Block]:
        sample, share = values
        finite = sample[np.isfinite(sample)].astype(np.float64)
        columns = {
            "mean": np.array([finite.mean() if finite.size else math.nan]),
            "std": np.array([finite.std() if finite.size else math.nan]),
            "rms": np.array([math.sqrt(np.square(finite).mean()) if finite.size else math.nan]),
            "count": np.array([float(sample.size)]),
            "nonfinite_fraction": np.array([float(share)]),
            "target": np.ones(1),
        }
        return [Block(0, Kind.INPUT, [None], columns)]

    return Deferred(make, (_sample(target), broken))


def _range_row(term: LossTerm) -> Deferred:
    """How large the prediction is, and what share of the target its activation cannot reach."""
    assert term.target is not None
    activation = output_activation(term.output) if term.kind != "binary" else None
    bounds = BOUNDS.get(activation or "")
    tensors = [_sample(term.target)]
    if term.prediction is not None:
        tensors.append(_sample(term.prediction))

    def make(values: list[np.ndarray]) -> list[Block]:
        columns = {}
        if bounds is not None:
            columns["unreachable"] = np.array([share_beyond(values[0], bounds)])
            columns[DETAIL] = np.array([f"{DOMAIN}: {activation} output"], dtype=object)
            if not columns["unreachable"][0] > 0:
                del columns[DETAIL]
        if len(values) > 1:
            prediction = values[1][np.isfinite(values[1])].astype(np.float64)
            size = math.sqrt(np.square(prediction).mean()) if prediction.size else math.nan
            columns["prediction_rms"] = np.array([size])
        return [Block(0, Kind.LOSS, [None], columns)] if columns else []

    return Deferred(make, tensors)


def share_beyond(target: np.ndarray, bounds: tuple[float, float]) -> float:
    """Share of a target's values that an output within bounds cannot come near.

    >>> share_beyond(np.array([0.5, 1.02, 4.0, -2.0]), (0.0, 1.0))
    0.5
    """
    lowest, highest = bounds
    width = highest - lowest
    if not math.isfinite(width):
        width = float(np.ptp(target)) if target.size else 0.0
    beyond = (target < lowest - _OVERSHOOT * width) | (target > highest + _OVERSHOOT * width)
    return float(beyond.mean()) if target.size else math.nan
