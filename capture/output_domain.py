"""Whether what a model puts out is what its loss is made for."""

from __future__ import annotations

import math

from neuraldbg.capture.graph_walk import REORDERINGS, VIEWS, Node, first_child, shape_of, source
from neuraldbg.capture.loss_head import LossTerm

_ACTIVATIONS = {
    "SoftmaxBackward0": "softmax",
    "LogSoftmaxBackward0": "log_softmax",
    "SigmoidBackward0": "sigmoid",
    "LogSigmoidBackward0": "logsigmoid",
    "TanhBackward0": "tanh",
    "ReluBackward0": "relu",
}
BOUNDS: dict[str, tuple[float, float]] = {
    "softmax": (0.0, 1.0),
    "sigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu": (0.0, math.inf),
}
"""Least and greatest value that an output activation can put out."""
_CLAMPS = (*VIEWS, "ClampBackward0", "ClampBackward1", "ClampMinBackward0")


def output_activation(node: Node | None) -> str | None:
    """The activation that a prediction comes out of, None where it is none of the known ones.

    Example:
        >>> import torch
        >>> output_activation(torch.ones(2, 3, requires_grad=True).softmax(1).squeeze().grad_fn)
        'softmax'
    """
    found = source(node, VIEWS + REORDERINGS)
    return None if found is None else _ACTIVATIONS.get(found.name())


def find_mismatch(term: LossTerm) -> str | None:
    """What makes a model's output unsuitable for its loss, None where the graph shows nothing.

    Whether targets lie in the range of a bounded output is for their values to say.

    Example:
        >>> import torch
        >>> from neuraldbg.capture.loss_head import read_loss_terms
        >>> output = torch.ones(2, 3, requires_grad=True).softmax(1)
        >>> loss = torch.nn.functional.cross_entropy(output, torch.tensor([0, 1]))
        >>> find_mismatch(read_loss_terms(loss)[0])
        'softmax twice'
    """
    if _of_one_unit(term):
        return "softmax of one unit"
    if term.kind == "classes":
        return _of_classes(term)
    activation = output_activation(term.output)
    if term.kind == "binary":
        with_logits = term.node.name() == "BinaryCrossEntropyWithLogitsBackward0"
        if with_logits and activation in ("sigmoid", "softmax"):
            return f"{activation} before a loss that takes logits"
    elif activation in ("log_softmax", "logsigmoid"):
        return f"{activation} compared with values"
    return None


def _of_classes(term: LossTerm) -> str | None:
    scores = term.scores
    if scores is None:
        activation = output_activation(term.output)
        bounded = activation in ("softmax", "sigmoid", "tanh", "relu")
        return f"{activation} where log-probabilities are due" if bounded else None
    activation = output_activation(first_child(scores))
    if activation == "softmax":
        return "softmax twice"
    if activation in ("sigmoid", "tanh", "relu"):
        return f"{activation} before softmax"
    return None


def _of_one_unit(term: LossTerm) -> bool:
    """Whether the prediction is a softmax over a single value, which is always 1."""
    candidates = [source(term.output, _CLAMPS)]
    if term.kind == "classes":
        below = None if term.scores is None else source(first_child(term.scores))
        candidates += [term.scores, below]
    for node in candidates:
        if node is None or node.name() not in ("SoftmaxBackward0", "LogSoftmaxBackward0"):
            continue
        shape = shape_of(node)
        axis = node._saved_dim
        axis = axis - 2**64 if axis >= 2**63 else axis
        if shape and shape[axis % len(shape)] == 1:
            return True
    return False
