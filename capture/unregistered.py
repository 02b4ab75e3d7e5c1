"""Parameters that a model uses and does not register: in plain lists, or no parameters any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from neuraldbg.capture.blocks import Block
from neuraldbg.capture.layers import Layer, named_modules
from neuraldbg.capture.reached_parameters import reached_leaves
from neuraldbg.series import DETAIL, Kind

_OWN = frozenset(vars(nn.Module()))
"""What every module has, registered children and parameters among it."""
_MOST_ITEMS = 256
_DEPTH = 3
_MOST = 16
"""Unregistered parameters that are named."""
_SIGHTINGS = 3
"""Steps after which it is told whether a tensor lasts or is made anew each time."""
_GRAPH_OF_A_COPY = 32
"""Nodes between a parameter and a copy of it that is kept in its place."""


def hidden_tensors(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Leaves that require a gradient and hang on a model by plain attributes, with their places.

    These are the parameters of modules kept in lists and dictionaries, tensors that were never
    made parameters, and parameters that a cast or a move replaced by a copy.

    Example:
        >>> import torch
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.blocks = [nn.Linear(2, 3, bias=False)]
        ...         self.scale = nn.Parameter(torch.ones(1)).double()
        >>> [(name, tuple(leaf.shape)) for name, leaf in hidden_tensors([Net()])]
        [('blocks.0.weight', (3, 2)), ('scale', (1,))]
    """
    registered = {id(module) for model in models for module in model.modules()}
    for model in models:
        for name, module in named_modules(model):
            for key, value in list(vars(module).items()):
                if key not in _OWN:
                    place = f"{name}.{key}" if name else key
                    yield from _within(place, value, registered, _DEPTH)


def _within(
    place: str, value: Any, registered: set[int], depth: int
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, nn.Module):
        if id(value) not in registered:
            for name, parameter in value.named_parameters():
                yield f"{place}.{name}", parameter
    elif isinstance(value, Tensor):
        yield from ((place, leaf) for leaf in _leaves_of(value))
    elif depth and isinstance(value, (list, tuple)):
        for number, part in enumerate(value[:_MOST_ITEMS]):
            yield from _within(f"{place}.{number}", part, registered, depth - 1)
    elif depth and isinstance(value, dict):
        for key in list(value)[:_MOST_ITEMS]:
            yield from _within(f"{place}.{key}", value[key], registered, depth - 1)


def _leaves_of(tensor: Tensor) -> list[Tensor]:
    if not tensor.requires_grad:
        return []
    if tensor.is_leaf:
        return [tensor]
    found = reached_leaves([tensor], _GRAPH_OF_A_COPY)
    return found.leaves if found.complete and len(found.leaves) == 1 else []


@dataclass(slots=True, eq=False)
class _Stranger:
    """An unregistered parameter: as a layer of its own, and where to find it."""

    layer: Layer
    detail: str
    leaf: ref[Tensor]


@dataclass(slots=True, eq=False)
class Strangers:
    """Leaves outside `model.parameters()` that backward passes of the model reach.

    Those of other modules (a discriminator, a fixed network in the loss) and tensors that only
    ask for a gradient of their own (adversarial inputs) are none of the model's and not kept.
    """

    _known: dict[str, _Stranger] = field(default_factory=dict)
    _met: dict[int, ref[Tensor]] = field(default_factory=dict)
    _made_anew: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    _lasting: dict[str, tuple[ref[Tensor], set[int]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._known)

    def note(self, leaves: Sequence[Tensor], step: int, models: Sequence[nn.Module]) -> None:
        """Sort what a backward pass reached and is not registered."""
        wanted = {id(leaf): leaf for leaf in leaves}
        for place, leaf in hidden_tensors(models):
            if wanted.pop(id(leaf), None) is None:
                continue
            if isinstance(leaf, Parameter) or self._lasts(place, leaf, step):
                self._keep(place, leaf, f"{place}, shape {tuple(leaf.shape)}")
        for leaf in wanted.values():
            if isinstance(leaf, Parameter) and self._is_new(leaf):
                shape = tuple(leaf.shape)
                steps = self._made_anew.setdefault(shape, set())
                steps.add(step)
                if len(steps) >= _SIGHTINGS:
                    name = f"unregistered {shape}"
                    self._keep(name, leaf, f"made anew in each forward pass, shape {shape}")

    def rows(self, step: int, held: set[Parameter]) -> Block:
        """One row of kind parameter for each, with whether an optimizer holds it."""
        strangers = list(self._known.values())
        in_optimizer = [float(s.leaf() in held) for s in strangers]
        return Block(
            step,
            Kind.PARAMETER,
            [s.layer for s in strangers],
            {
                "registered": np.zeros(len(strangers)),
                "reached": np.ones(len(strangers)),
                "in_optimizer": np.array(in_optimizer),
                DETAIL: np.array([s.detail for s in strangers], dtype=object),
            },
        )

    def _keep(self, name: str, leaf: Tensor, detail: str) -> None:
        if name in self._known:
            self._known[name].leaf = ref(leaf)
        elif len(self._known) < _MOST:
            self._known[name] = _Stranger(Layer(name, None), detail, ref(leaf))

    def _lasts(self, place: str, leaf: Tensor, step: int) -> bool:
        """Whether a plain tensor is the same at each step: inputs are not, weights are."""
        before, steps = self._lasting.get(place, (ref(leaf), set()))
        if before() is not leaf:
            steps = set()
        steps.add(step)
        self._lasting[place] = (ref(leaf), steps)
        return len(steps) >= _SIGHTINGS

    def _is_new(self, leaf: Tensor) -> bool:
        met = self._met.get(id(leaf))
        if met is not None and met() is leaf:
            return False
        if len(self._met) > 4096:
            self._met.clear()
        self._met[id(leaf)] = ref(leaf)
        return True
