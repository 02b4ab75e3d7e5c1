"""Axes taken for one another: normalising over the wrong one, reshaping instead of transposing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from neuraldbg.capture.graph_walk import VIEWS, Node, first_child, shape_of, source
from neuraldbg.capture.loss_head import LossTerm

_RESHAPES = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
_SOFTMAX = ("SoftmaxBackward0", "LogSoftmaxBackward0")
_TRANSPOSITIONS = ("TransposeBackward0", "PermuteBackward0", "TBackward0")
_PRODUCTS = ("BmmBackward0", "MmBackward0")
_BETWEEN = (*VIEWS, "ExpandBackward0", "NativeDropoutBackward0", "MulBackward0")
"""What stands between attention weights and the product with the values: dropout multiplies."""
_SCORE_NODES = (
    *_BETWEEN, "MulBackward1", "DivBackward0", "DivBackward1", "AddBackward0",
    "SubBackward0", "MaskedFillBackward0", "WhereBackward0",
)  # fmt: skip
"""What stands between the product of queries and keys and the softmax."""
_CHAIN = 12


def find_wrong_axis(nodes: Iterable[Node], terms: Sequence[LossTerm]) -> str | None:
    """The first sign in a graph that two axes were taken for one another, None if there is none.

    Args:
        nodes: Of the graph, in any order.
        terms: The loss functions at its head.

    Example:
        >>> import torch
        >>> scores = torch.randn(6, 4, 3, requires_grad=True) * 1
        >>> attention = (scores @ scores.mT).softmax(-2) @ scores
        >>> from neuraldbg.capture.graph_walk import walk
        >>> find_wrong_axis(walk(attention.sum().grad_fn), [])
        'attention: softmax over axis 1 of (6, 4, 4), not over the keys'
        >>> heads = (torch.ones(6, 8, 4, requires_grad=True) * 1).view(6, 2, 8, 2)
        >>> find_wrong_axis(walk(heads.sum().grad_fn), [])
        'reshape of (6, 8, 4) to (6, 2, 8, 2) mixes axes'
    """
    found = next(filter(None, map(wrong_class_axis, terms)), None)
    if found is not None:
        return found
    transposed: set[Node] = set()
    reshapes: list[Node] = []
    for node in nodes:
        name = node.name()
        if name in _TRANSPOSITIONS:
            transposed.update(child for child, _ in node.next_functions if child is not None)
        elif name in _RESHAPES:
            reshapes.append(node)
        elif name in _PRODUCTS:
            found = wrong_attention_axis(node)
            if found is not None:
                return found
    for node in reshapes:
        found = None if node in transposed else mixing_reshape(node)
        if found is not None:
            return found
    return None


def wrong_class_axis(term: LossTerm) -> str | None:
    """A class loss whose log-probabilities were normalised over another axis than the classes'."""
    if term.kind != "classes" or term.class_axis is None or term.output is None:
        return None
    scores = term.scores
    shape = shape_of(term.output)
    if scores is None or scores.name() not in _SOFTMAX or shape is None:
        return None
    axis = _axis_below(term.output, term.class_axis, scores)
    below = shape_of(scores)
    if axis is None or below is None or len(below) < 2:
        return None
    found = _signed(scores._saved_dim) % len(below)
    if found == axis:
        return None
    return f"softmax over axis {found} of {below}, not over the classes (axis {axis})"


def wrong_attention_axis(product: Node) -> str | None:
    """Attention weights that do not add up to 1 over the keys which the product sums over."""
    left = product.next_functions[0][0]
    shape = None if left is None else shape_of(left)
    softmax = source(left, _BETWEEN)
    if shape is None or softmax is None or softmax.name() != "SoftmaxBackward0":
        return None
    weights = shape_of(softmax)
    scores = source(first_child(softmax), _SCORE_NODES)
    if weights is None or scores is None or scores.name() not in _PRODUCTS:
        return None  # no product of queries and keys
    axis = _axis_below(left, len(shape) - 1, softmax)
    found = _signed(softmax._saved_dim) % len(weights)
    if axis is None or axis == found:
        return None
    return f"attention: softmax over axis {found} of {weights}, not over the keys"


def _axis_below(node: Node, axis: int, end: Node) -> int | None:
    """Where an axis of a node's result lies in the result of a node further down the chain."""
    current: Node | None = node
    place: int | None = axis
    for _ in range(_CHAIN):
        if current is end or current is None or place is None:
            return place
        child = first_child(current)
        if child is None:
            return None
        above, below = shape_of(current), shape_of(child)
        if above is None or below is None:
            return None
        place = place if above == below else _same_axis(above, place, below)
        current = child
    return None


def _same_axis(above: tuple[int, ...], axis: int, below: tuple[int, ...]) -> int | None:
    """The axis of equal size with as many values before it (or behind it) as the given one has."""
    for place, size in enumerate(below):
        if size == above[axis] and (
            math.prod(below[place:]) == math.prod(above[axis:])
            or math.prod(below[:place]) == math.prod(above[:axis])
        ):
            return place
    return None


def mixing_reshape(node: Node) -> str | None:
    """A reshape that stands where a transposition is due: an axis's size reappears out of order.

    A reshape splits and merges neighbouring axes. Where it cuts a stretch of axes in other places
    than before and yet has one of their sizes in another place, values of unlike meaning come to
    lie on that axis. By accident that also happens where heads are merged into the batch, which a
    transposition comes before or after, so reshapes beside one are left alone; and so is shifting
    rows by one through a reshape of (.., n, n + 1), as relative positions are computed
    (Transformer-XL, appendix B).
    """
    above, below = shape_of(node), tuple(node._saved_self_sym_sizes)
    before = source(first_child(node))
    if above is None or before is None or before.name() in _TRANSPOSITIONS:
        return None
    for before_axes, after_axes in _stretches(below, above):
        if _mixes(before_axes, after_axes):
            return f"reshape of {below} to {above} mixes axes"
    return None


def _mixes(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    if len(before) < 2 or len(after) < 2:
        return False
    if len(before) == len(after) == 2 and abs(before[0] - before[1]) == 1:
        return False
    if not any(_moved(size, before, after) for size in before):
        return False
    if len(after) > len(before) or sorted(after) == sorted(before):
        return True
    # Cuts of which each divides the next can also be a plain regrouping.
    cuts = sorted({math.prod(sizes[:k]) for sizes in (before, after) for k in range(len(sizes))})
    return any(larger % smaller for smaller, larger in pairwise(cuts))


def _stretches(
    below: tuple[int, ...], above: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Both shapes cut into the shortest stretches of as many values each, ones left out."""
    before = [size for size in below if size != 1]
    after = [size for size in above if size != 1]
    if math.prod(before) != math.prod(after) or 0 in before:
        return []
    found = []
    while before and after:
        i = j = 1
        left, right = before[0], after[0]
        while left != right:
            if left < right:
                left *= before[i]
                i += 1
            else:
                right *= after[j]
                j += 1
        found.append((tuple(before[:i]), tuple(after[:j])))
        before, after = before[i:], after[j:]
    return found


def _moved(size: int, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether an axis stands once on either side, with other values before it and behind it."""
    if before.count(size) != 1 or after.count(size) != 1:
        return False
    i, j = before.index(size), after.index(size)
    return math.prod(before[:i]) != math.prod(after[:j])


def _signed(axis: int) -> int:
    return axis - 2**64 if axis >= 2**63 else axis
