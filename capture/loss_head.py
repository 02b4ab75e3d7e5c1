"""The head of a loss's graph: which loss functions stand there, with their operands.

Library functions keep their operands for the backward pass; losses that a program writes out
(`((prediction - y) ** 2).mean()`, `-log_p.gather(1, y).mean()`) are recognised by the operations
they consist of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from neuraldbg.capture.graph_walk import VIEWS, Node, first_child, shape_of, source

_HEAD_NODES = 64
"""Nodes below the root among which the loss functions must stand."""

_MEANS = ("MeanBackward0", "MeanBackward1")
_SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0")
_SCALINGS = ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1")
_BRANCHES = ("AddBackward0", "SubBackward0")
_LIBRARY: Mapping[str, str] = {
    "NllLossBackward0": "classes",
    "NllLoss2DBackward0": "classes",
    "NllLossNdBackward0": "classes",
    "MseLossBackward0": "squared",
    "L1LossBackward0": "absolute",
    "SmoothL1LossBackward0": "absolute",
    "HuberLossBackward0": "absolute",
    "BinaryCrossEntropyWithLogitsBackward0": "binary",
    "BinaryCrossEntropyBackward0": "binary",
}
_SOFTMAX = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_GUARDS = (*VIEWS, "ClampBackward0", "ClampBackward1", "ClampMinBackward0", "AddBackward0")
"""What stands between a probability and its logarithm."""
_SUM_REDUCTION = 2


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an untrained model should score on a loss.

    Attributes:
        kind: Of the loss.
        classes: Number of classes, 0 where there are none.
        factor: See `LossTerm`.
    """

    kind: str
    classes: int
    factor: float

    def value(self, target: np.ndarray | None) -> float:
        """What an untrained model should score: one that puts out zeros.

        That is the log of the number of classes, log 2, or the mean square (or magnitude) of the
        target; NaN where it cannot be told.

        Args:
            target: Values of the target.
        """
        if self.classes:
            return self.factor * math.log(max(self.classes, 2))
        if target is None or not target.size:
            return math.nan
        values = np.asarray(target, dtype=np.float64)
        size = np.square(values) if self.kind == "squared" else np.abs(values)
        return self.factor * float(size.mean())


@dataclass(slots=True)
class LossTerm:
    """One loss function in the head of a graph. Tensors are valid until the graph is freed.

    Attributes:
        kind: ``classes``, ``squared``, ``absolute`` or ``binary``.
        node: The node of the loss function, or of the operation that shows it written out.
        output: The node whose result enters it as prediction.
        factor: What the mean over single values of the loss is multiplied with on the way to the
            root; NaN where that cannot be told.
        target: What it is compared with.
        prediction: What enters the loss: scores, log-probabilities or values.
        difference: Of prediction and target, where the loss is written out with one. Its target
            is then worked out from the prediction, and unknown where that is not finite.
        scores: The softmax or log-softmax that class losses take the log-probabilities from.
        class_axis: Axis over classes of the prediction, for class losses.
        ignored: A label that does not count.
        weight: Weights of the classes, or of the positive class.
    """

    kind: str
    node: Node
    output: Node | None
    factor: float = 1.0
    target: Tensor | None = None
    prediction: Tensor | None = None
    difference: Tensor | None = None
    scores: Node | None = None
    class_axis: int | None = None
    ignored: int | None = None
    weight: Tensor | None = None

    @property
    def classes(self) -> int:
        """Number of classes: 2 for a binary loss, 0 where there are none."""
        if self.kind == "binary":
            return 2
        if self.kind != "classes" or self.prediction is None or self.class_axis is None:
            return 0
        return self.prediction.shape[self.class_axis]

    @property
    def expectation(self) -> Expectation:
        """What an untrained model should score, told without keeping the graph alive."""
        return Expectation(self.kind, self.classes, self.factor)


def read_loss_terms(loss: Tensor, outputs: Mapping[Node, Tensor] | None = None) -> list[LossTerm]:
    """The loss functions at the head of a graph: one, or the terms of a sum.

    Args:
        loss: The tensor that `backward` is called on.
        outputs: Outputs of layers by their `grad_fn`, from which the target of a difference that
            is written out can be told.

    Example:
        >>> import torch
        >>> logits = torch.zeros(4, 10, requires_grad=True)
        >>> [term] = read_loss_terms(torch.nn.functional.cross_entropy(logits, torch.arange(4)))
        >>> term.kind, term.classes, round(term.expectation.value(None), 3)
        ('classes', 10, 2.303)
        >>> output = 0 * torch.ones(2, 1, requires_grad=True)
        >>> loss = ((output - torch.tensor([[3.0], [-3.0]])) ** 2).sum()
        >>> [term] = read_loss_terms(loss, {output.grad_fn: output})
        >>> term.kind, term.target.tolist(), term.expectation.value(term.target.numpy())
        ('squared', [[3.0], [-3.0]], 18.0)
    """
    terms: list[LossTerm] = []
    queue: list[tuple[Node | None, float, bool]] = [(loss.grad_fn, 1.0, False)]
    for _ in range(_HEAD_NODES):
        if not queue:
            break
        node, factor, weighted = queue.pop(0)
        if node is None:
            continue
        term = _library_term(node) or _written_term(node, weighted, outputs or {})
        if term is not None:
            term.factor *= factor
            terms.append(term)
        else:
            queue += _below(node, factor, weighted)
    if len(terms) > 1:
        for term in terms:
            term.factor = math.nan  # what the sum should be is another matter
    return terms


def _below(node: Node, factor: float, weighted: bool) -> list[tuple[Node | None, float, bool]]:
    """Where to go on below a node that only scales, reduces or adds."""
    name = node.name()
    child = first_child(node)
    if child is None:
        return []
    if name in _SUMS:
        return [(child, factor * _shrinkage(node, child), weighted)]
    if name == "NegBackward0":
        return [(child, -factor, weighted)]
    if name in _SCALINGS:
        other = _constant(node)
        if other is None or (isinstance(other, Tensor) and other.numel() != 1):
            return [(child, math.nan, True)]
        return [(child, factor * _scale(other, name.startswith("Div")), weighted)]
    if name in _BRANCHES:
        children = [inner for inner, _ in node.next_functions if inner is not None]
        return [(inner, math.nan, weighted) for inner in children]
    if name in _MEANS or name in VIEWS:
        return [(child, factor, weighted)]
    if name == "SqrtBackward0":  # the root of a mean square
        return [(child, math.nan, weighted)]
    return []


def _shrinkage(node: Node, child: Node) -> float:
    """How many values of its operand a sum adds to one of its result."""
    result, operand = shape_of(node), shape_of(child)
    if result is None or operand is None:
        return math.nan
    return math.prod(operand) / max(math.prod(result), 1)


def _constant(node: Node) -> Tensor | float | None:
    """The operand of a product or quotient that is not part of the graph, None if both are."""
    if all(child is not None for child, _ in node.next_functions) and len(node.next_functions) > 1:
        return None
    other = getattr(node, "_saved_other", None)
    if other is None:
        other = getattr(node, "_saved_self", None)
    return other if isinstance(other, Tensor | int | float) else None


def _scale(other: Tensor | float, divides: bool) -> float:
    if isinstance(other, Tensor) and other.device.type != "cpu":
        return math.nan  # reading it would make the device wait
    number = float(other)
    if divides:
        return 1.0 / number if number else math.nan
    return number


# Library functions ------------------------------------------------------------------------------


def _library_term(node: Node) -> LossTerm | None:
    kind = _LIBRARY.get(node.name())
    if kind is None:
        return None
    target, prediction = node._saved_target, node._saved_self
    weight = getattr(node, "_saved_weight", None)
    term = LossTerm(kind, node, first_child(node), target=target, prediction=prediction)
    if node._saved_reduction == _SUM_REDUCTION:
        term.factor = float(target.numel())
    if kind == "classes":
        term.class_axis = 1 if prediction.dim() > 1 else 0
        term.scores = log_probabilities(term.output)
        term.weight = weight
        ignored = node._saved_ignore_index
        term.ignored = ignored - 2**64 if ignored >= 2**63 else ignored
    elif kind == "binary":
        term.weight = getattr(node, "_saved_pos_weight", None)
        if weight is not None:
            term.weight, term.factor = weight, math.nan
    return term


# Written out ------------------------------------------------------------------------------------


def _written_term(node: Node, weighted: bool, outputs: Mapping[Node, Tensor]) -> LossTerm | None:
    reader = _WRITTEN.get(node.name())
    if reader is None:
        return None
    if reader in (_picked, _indexed, _logged):
        # The log-probability of an action times its advantage is no loss of labels.
        return None if weighted else reader(node, outputs)
    return reader(node, outputs)


def _powered(node: Node, outputs: Mapping[Node, Tensor]) -> LossTerm | None:
    if node._saved_exponent != 2:
        return None
    return _difference("squared", node, node._saved_self, outputs)


def _magnitude(node: Node, outputs: Mapping[Node, Tensor]) -> LossTerm | None:
    return _difference("absolute", node, node._saved_self, outputs)


def _difference(
    kind: str, node: Node, difference: Tensor, outputs: Mapping[Node, Tensor]
) -> LossTerm | None:
    """A function of a difference between a result of the graph and a constant."""
    minus = source(first_child(node))
    if minus is None or minus.name() != "SubBackward0":
        return None
    operands = [child for child, _ in minus.next_functions]
    if len(operands) != 2 or (operands[0] is None) == (operands[1] is None):
        return None
    output = operands[0] or operands[1]
    term = LossTerm(kind, minus, output, difference=difference.detach())
    prediction = outputs.get(source(output))
    if prediction is not None and prediction.numel() == difference.numel():
        term.prediction = prediction.detach().reshape(difference.shape)
        signed = difference.detach() if operands[0] is not None else -difference.detach()
        term.target = term.prediction - signed
    return term


def _product(node: Node, outputs: Mapping[Node, Tensor]) -> LossTerm | None:
    """A product: of a difference with itself, or of soft labels with log-probabilities."""
    children = [child for child, _ in node.next_functions]
    if len(children) == 2 and children[0] is children[1] and children[0] is not None:
        saved = node._saved_self
        return None if saved is None else _difference("squared", node, saved, outputs)
    target = _constant(node)
    child = first_child(node)
    if not isinstance(target, Tensor) or child is None or target.dim() < 1:
        return None
    if shape_of(child) != tuple(target.shape) or shape_of(node) != tuple(target.shape):
        return None
    log = source(child)
    if log is not None and log.name() == "LogBackward0":
        below = source(first_child(log), _GUARDS)
        if below is not None and below.name() == "SigmoidBackward0":
            return LossTerm("binary", node, below, math.nan, target=target)
    scores = log_probabilities(child)
    if scores is None or target.dim() < 2 or not target.is_floating_point():
        return None
    axis = _unit_axis(target)
    if axis is None:
        return None
    term = LossTerm("classes", node, child, -1.0 / target.shape[axis])
    term.scores = scores
    term.target, term.class_axis = target, axis
    term.prediction = _saved_scores(scores, tuple(target.shape))
    return term


def _picked(node: Node, outputs: Mapping[Node, Tensor]) -> LossTerm | None:
    """Log-probabilities gathered at the labels."""
    axis = _signed(node._saved_dim)
    return _at_labels(node, node._saved_index, axis)


def _indexed(node: Node, outputs: Mapping[Node, Tensor]) -> LossTerm | None:
    """Log-probabilities indexed by the sample and the label."""
    indices = node._saved_indices
    if len(indices) != 2 or indices[0] is None or indices[1] is None:
        return None
    return _at_labels(node, indices[1], 1)


def _logged(node: Node, outputs: Mapping[Node, Tensor]) -> LossTerm | None:
    """The logarithm of probabilities picked at the labels."""
    pick = source(first_child(node), _GUARDS)
    reader = _WRITTEN.get("" if pick is None else pick.name())
    if reader not in (_picked, _indexed):
        return None
    softmax = source(first_child(pick))
    if softmax is None or softmax.name() != "SoftmaxBackward0":
        return None
    return reader(pick, outputs)


def _at_labels(node: Node, labels: Tensor, axis: int) -> LossTerm | None:
    child = first_child(node)
    shape = None if child is None else shape_of(child)
    scores = log_probabilities(child) or source(child)
    if shape is None or scores is None or scores.name() not in _SOFTMAX:
        return None
    if labels.is_floating_point():
        return None
    term = LossTerm("classes", node, child, -1.0, labels, class_axis=axis % len(shape))
    term.prediction, term.scores = _saved_scores(scores, shape), scores
    return term


_WRITTEN: Mapping[str, Callable[[Node, Mapping[Node, Tensor]], LossTerm | None]] = {
    "PowBackward0": _powered,
    "AbsBackward0": _magnitude,
    "MulBackward0": _product,
    "GatherBackward0": _picked,
    "IndexBackward0": _indexed,
    "LogBackward0": _logged,
}


def log_probabilities(node: Node | None) -> Node | None:
    """The (log-)softmax whose log-probabilities a node hands on, None where there is none."""
    found = source(node)
    if found is None or found.name() == "LogSoftmaxBackward0":
        return found
    if found.name() == "LogBackward0":
        found = source(first_child(found), _GUARDS)
        if found is not None and found.name() == "SoftmaxBackward0":
            return found
    return None


def _saved_scores(scores: Node, shape: tuple[int, ...]) -> Tensor | None:
    saved: Tensor = scores._saved_result
    return saved.detach().reshape(shape) if saved.numel() == math.prod(shape) else None


def _unit_axis(target: Tensor) -> int | None:
    """The axis along which soft labels add up to 1; the last or second where none can be told."""
    if target.device.type != "cpu":
        return 1
    rows = target.detach()[:64].float()
    for axis in dict.fromkeys((1, target.dim() - 1, 0)):
        whole = rows if axis else target.detach().float()
        if whole.min() >= 0 and (whole.sum(axis) - 1).abs().max() < 1e-3:
            return axis
    return None


def _signed(axis: int) -> int:
    """An axis as saved by torch, which keeps negative ones as unsigned numbers."""
    return axis - 2**64 if axis >= 2**63 else axis
