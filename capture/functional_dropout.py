"""Dropout applied by a function (`F.dropout(x, 0.5, self.training)`), read from the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from neuraldbg.capture.graph_walk import Node, first_child, walk

_SAMPLE = 512
_FEWEST = 64
_UPWARDS = 8
_SIGMAS = 5.0


def functional_dropout(
    roots: Sequence[Tensor], producers: Mapping[Node, object]
) -> Iterator[tuple[object, float]]:
    """The drop probability of each dropout in a graph, with the layer that it follows.

    On the CPU dropout multiplies with noise of zeros and 1 / (1 - p), which the graph has saved;
    fused attention saves its probability. Tensors on other devices are not looked at.

    Args:
        roots: The tensors that `backward` is called on.
        producers: The `grad_fn` of each watched layer's output, with the caller's key for it.

    Example:
        >>> import torch
        >>> hidden = torch.nn.Linear(8, 64)(torch.ones(32, 8))
        >>> loss = torch.nn.functional.dropout(hidden, 0.75).sum()
        >>> list(functional_dropout([loss], {hidden.grad_fn: "fc1"}))
        [('fc1', 0.75)]
    """
    for root in roots:
        for node in walk(root.grad_fn):
            probability = _probability(node)
            if probability is not None and probability > 0:
                owner = _owner(node, producers)
                if owner is not None:
                    yield owner, probability


def _probability(node: Node) -> float | None:
    name = node.name()
    if name.startswith("ScaledDotProduct"):
        return getattr(node, "_saved_dropout_p", None)
    if name != "MulBackward0":
        return None
    try:
        noise = node._saved_other
    except RuntimeError:  # freed by an earlier pass, or written to since
        return None
    if noise is None or noise.requires_grad or noise.device.type != "cpu":
        return None
    if not noise.is_floating_point() or noise.numel() < _FEWEST:
        return None
    return _of_noise(noise.detach().reshape(-1)[:: -(-noise.numel() // _SAMPLE)].float())


def _of_noise(values: Tensor) -> float | None:
    """The probability behind values that are either zero or 1 / (1 - p), None for others."""
    top = float(values.max())
    zeros = values == 0
    share = float(zeros.float().mean())
    if not 1.0 < top < float("inf") or not bool((zeros | (values == top)).all()):
        return None
    probability = 1.0 - 1.0 / top
    deviation = (probability * (1.0 - probability) / len(values)) ** 0.5
    return round(probability, 4) if abs(share - probability) < _SIGMAS * deviation else None


def _owner(node: Node, producers: Mapping[Node, object]) -> object | None:
    for _ in range(_UPWARDS):
        if node is None:
            return None
        if node in producers:
            return producers[node]
        node = first_child(node)
    return None
