"""Operations that are undefined, or infinitely steep, at the value they were given.

The values that operations keep for the backward pass are looked at: the logarithm of 0, the
derivative of a square root at 0, 0/0, the standard deviation of one sample, a softmax whose row
is masked entirely. The functions wait for the device where the graph is on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from neuraldbg.capture.graph_walk import Node, first_child, shape_of

Check = Callable[[Node, int], str | None]


@dataclass(frozen=True, slots=True)
class Undefined:
    """Where an operation is undefined.

    Attributes:
        what: In words, such as ``log of 0``.
        forward: Whether its result is already not finite; if not, only its derivative is.
    """

    what: str
    forward: bool


def inspect_operation(node: Node, most_values: int) -> Undefined | None:
    """What is undefined about one operation at its value, None where nothing is.

    Args:
        node: Its `grad_fn`.
        most_values: Larger tensors are not looked at.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 0.0], requires_grad=True)
        >>> inspect_operation(x.sqrt().grad_fn, 1000)
        Undefined(what='derivative of sqrt at 0', forward=False)
        >>> inspect_operation((x + 1).log().grad_fn, 1000)
    """
    check = _CHECKS.get(node.name())
    return None if check is None else check(node, most_values)


def is_steep(node: Node) -> bool:
    """Whether the derivative of an operation can be infinite where the loss is finite.

    So is that of a square root; and of a logarithm of 0, if `where` keeps its result from the
    loss, since the derivative there is 0 times infinity.
    """
    name = node.name()
    if name in ("DivBackward0", "PowBackward0"):
        if name == "PowBackward0":
            exponent = node._saved_exponent
            return isinstance(exponent, int | float) and exponent < 1
        other = node._saved_other
        return isinstance(other, Tensor) and other.numel() > 1
    return name in _STEEP


def find_undefined(nodes: Iterable[Node], most_values: int, forward: bool) -> str | None:
    """The operation that made a pass non-finite, None if none shows.

    Args:
        nodes: Of the graph, those nearest the loss first.
        most_values: Larger tensors are not looked at.
        forward: Whether the loss itself is not finite: then the first such operation in the order
            of the data is taken. Else the gradients are not, and it is the first that they meet.

    Example:
        >>> import torch
        >>> from neuraldbg.capture.graph_walk import walk
        >>> x = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> loss = (2 * x).log().mean()
        >>> find_undefined(walk(loss.grad_fn), 1000, forward=True)
        'log of 0'
    """
    last = None
    for node in nodes:
        found = inspect_operation(node, most_values)
        if found is None or (forward and not found.forward):
            continue
        if not forward:
            return found.what
        last = found.what
    return last


# One check for each kind of operation ------------------------------------------------------------


def _saved(node: Node, name: str, most_values: int) -> Tensor | None:
    value = getattr(node, name, None)
    if not isinstance(value, Tensor) or not 0 < value.numel() <= most_values:
        return None
    return value.detach()


def _log(node: Node, most_values: int) -> Undefined | None:
    value = _saved(node, "_saved_self", most_values)
    if value is None:
        return None
    lowest = float(value.min()) + (node.name() == "Log1PBackward0")
    if lowest == 0:
        return Undefined("log of 0", forward=True)
    if lowest < 0 and math.isfinite(lowest):
        return Undefined("log of a negative number", forward=True)
    return None


def _sqrt(node: Node, most_values: int) -> Undefined | None:
    value = _saved(node, "_saved_result", most_values)
    if value is None:
        return None
    if bool((value == 0).any()):
        return Undefined("derivative of sqrt at 0", forward=False)
    broken = value.isnan()
    if bool(broken.any()) and not bool(broken.all()):
        return Undefined("sqrt of a negative number", forward=True)
    return None


def _inverse(node: Node, most_values: int) -> Undefined | None:
    value = _saved(node, "_saved_result", most_values)
    if value is None or not bool(value.isinf().any()):
        return None
    return Undefined("1/sqrt of 0" if "Rsqrt" in node.name() else "1/0", forward=True)


def _power(node: Node, most_values: int) -> Undefined | None:
    exponent = node._saved_exponent
    if not isinstance(exponent, int | float) or exponent >= 1 or exponent == 0:
        return None
    value = _saved(node, "_saved_self", most_values)
    if value is None or not bool((value == 0).any()):
        return None
    if exponent < 0:
        return Undefined(f"power {exponent:g} of 0", forward=True)
    return Undefined(f"derivative of power {exponent:g} at 0", forward=False)


def _division(node: Node, most_values: int) -> Undefined | None:
    other = node._saved_other
    if not isinstance(other, Tensor):
        return Undefined("division by 0", forward=True) if other == 0 else None
    other = _saved(node, "_saved_other", most_values)
    if other is None or not bool((other == 0).any()):
        return None
    above = _saved(node, "_saved_self", most_values)
    if above is not None and bool(((above == 0) | (other != 0)).all()):
        return Undefined("0/0 in a division", forward=True)
    return Undefined("division by 0", forward=True)


def _deviation(node: Node, most_values: int) -> Undefined | None:
    values: Tensor = node._saved_self
    axes = node._saved_dim
    size = values.numel() if not axes else math.prod(values.shape[_signed(axis)] for axis in axes)
    correction = 1 if node._saved_correction is None else node._saved_correction
    if size <= correction:
        kind = "std" if node.name().startswith("Std") else "variance"
        return Undefined(f"{kind} of {'one sample' if size == 1 else f'{size} samples'}", True)
    return None


def _mean(node: Node, most_values: int) -> Undefined | None:
    operand = getattr(node, "_saved_self_sym_numel", None)
    if operand is None:
        operand = math.prod(getattr(node, "_saved_self_sym_sizes", (1,)))
    return Undefined("mean of no values", forward=True) if operand == 0 else None


def _library_mean(node: Node, most_values: int) -> Undefined | None:
    averages = node._saved_reduction == 1
    if averages and node._saved_self.numel() == 0:
        return Undefined("mean of no values", forward=True)
    total = getattr(node, "_saved_total_weight", None)
    if averages and total is not None and float(total) == 0:
        return Undefined("mean over labels that are all ignored", forward=True)
    return None


def _softmax(node: Node, most_values: int) -> Undefined | None:
    result = _saved(node, "_saved_result", most_values)
    below = first_child(node)
    if result is None or not result.dim() or below is None:
        return None
    axis = _signed(node._saved_dim)
    if below.name() == "MaskedFillBackward0":
        mask = below._saved_mask
        hidden = mask.expand(result.shape).all(axis, keepdim=True).expand(result.shape)
        masked = bool(hidden.any()) and bool(result[hidden].isnan().all())
    elif below.name() in ("AddBackward0", "WhereBackward0"):
        rows = result.isnan()
        masked = bool(rows.all(axis).any()) and not bool(rows.all())
    else:
        return None
    return Undefined("softmax of a row that is masked entirely", forward=True) if masked else None


def _attention(node: Node, most_values: int) -> Undefined | None:
    mask = _saved(node, "_saved_attn_mask", most_values)
    if mask is None:
        return None
    empty = (mask == -math.inf).all(-1) if mask.is_floating_point() else ~mask.any(-1)
    broken = bool(empty.any()) and bool(node._saved_output.isnan().any())
    return Undefined("softmax of a row that is masked entirely", forward=True) if broken else None


def _log_sum_exp(node: Node, most_values: int) -> Undefined | None:
    result = _saved(node, "_saved_result", most_values)
    if result is not None and bool((result == -math.inf).any()):
        return Undefined("logsumexp of values that are all -inf", forward=True)
    return None


def _arc(node: Node, most_values: int) -> Undefined | None:
    value = _saved(node, "_saved_self", most_values)
    if value is None:
        return None
    name = node.name().removesuffix("Backward0").lower()
    largest = float(value.abs().max())
    if name == "acosh":
        return None
    if largest > 1 and math.isfinite(largest):
        return Undefined(f"{name} beyond 1", forward=True)
    return Undefined(f"derivative of {name} at 1", name == "atanh") if largest == 1 else None


def _exponential(node: Node, most_values: int) -> Undefined | None:
    result = _saved(node, "_saved_result", most_values)
    if result is not None and bool((result == math.inf).any()) and not bool(result.isnan().any()):
        return Undefined("overflow of exp", forward=True)
    return None


def _constant(node: Node, most_values: int) -> Undefined | None:
    """An operand that was computed outside the graph and is not finite in any value."""
    for name in ("_saved_other", "_saved_self"):
        value = _saved(node, name, most_values)
        below = [child for child, _ in node.next_functions if child is not None]
        if value is None or value.requires_grad or len(below) != 1:
            continue
        if bool(value.isnan().all()):
            size = " of one sample" if value.numel() == 1 and shape_of(node) else ""
            return Undefined(f"factor{size} that is NaN, computed outside the graph", forward=True)
    return None


def _signed(axis: int) -> int:
    return axis - 2**64 if axis >= 2**63 else axis


_CHECKS: Mapping[str, Callable[[Node, int], Undefined | None]] = {
    "LogBackward0": _log,
    "Log2Backward0": _log,
    "Log10Backward0": _log,
    "Log1PBackward0": _log,
    "SqrtBackward0": _sqrt,
    "RsqrtBackward0": _inverse,
    "ReciprocalBackward0": _inverse,
    "PowBackward0": _power,
    "DivBackward0": _division,
    "DivBackward1": _division,
    "MulBackward0": _constant,
    "StdBackward0": _deviation,
    "VarBackward0": _deviation,
    "MeanBackward0": _mean,
    "MeanBackward1": _mean,
    "NllLossBackward0": _library_mean,
    "NllLoss2DBackward0": _library_mean,
    "MseLossBackward0": _library_mean,
    "BinaryCrossEntropyBackward0": _library_mean,
    "BinaryCrossEntropyWithLogitsBackward0": _library_mean,
    "SmoothL1LossBackward0": _library_mean,
    "HuberLossBackward0": _library_mean,
    "SoftmaxBackward0": _softmax,
    "LogSoftmaxBackward0": _softmax,
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention,
    "ScaledDotProductEfficientAttentionBackward0": _attention,
    "LogsumexpBackward0": _log_sum_exp,
    "AcosBackward0": _arc,
    "AsinBackward0": _arc,
    "AtanhBackward0": _arc,
    "ExpBackward0": _exponential,
}
_STEEP = (
    "SqrtBackward0", "RsqrtBackward0", "ReciprocalBackward0", "LogBackward0", "Log2Backward0",
    "Log10Backward0", "Log1PBackward0", "AcosBackward0", "AsinBackward0", "AtanhBackward0",
    "LogsumexpBackward0",
)  # fmt: skip
