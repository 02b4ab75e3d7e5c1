"""Which modules and parameters of a model are watched, and what is fixed about each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import Parameter, UninitializedParameter

from neuraldbg.capture.local_shards import stored_parameters

RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.Threshold)
"""Activations whose exact zeros can be permanent."""
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
BOUNDED_BELOW = {nn.Sigmoid: 0.0, nn.Hardsigmoid: 0.0}
BOUNDED = (nn.Tanh, nn.Hardtanh, nn.Sigmoid, nn.Hardsigmoid)
"""Activations with two flat tails."""
_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.PReLU,
)
_UNITS_LAST = (
    nn.Linear,
    nn.Bilinear,
    nn.LayerNorm,
    nn.Embedding,
    nn.MultiheadAttention,
    *RECURRENT,
)
_WITHOUT_A_SIGN = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.loss._Loss,
)
"""Modules whose output says nothing that their input did not."""


@dataclass(slots=True, eq=False)
class Layer:
    """A module with parameters or an activation of its own, watched under one name.

    Attributes:
        name: Qualified name of the module; of the parameter itself where the outermost module
            owns it directly.
        module: The module whose output is sampled, or None for such a parameter.
        parameters: Parameters owned by the module itself, trainable or not.
        index: Position in the order in which data flows; registration order until called.
        called: Whether its forward has been seen.
        is_rectifier: Whether exact zeros of the output are units switched off.
        bounds: The limits of the output, or None where it has no two flat tails.
    """

    name: str
    module: nn.Module | None
    parameters: list[Parameter] = field(default_factory=list)
    index: int = -1
    called: bool = False
    is_rectifier: bool = field(init=False)
    bounds: tuple[float, float] | None = field(init=False)
    _unit_axes: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.is_rectifier = isinstance(self.module, RECTIFIERS)
        self.bounds = activation_bounds(self.module)

    @property
    def weights(self) -> list[Parameter]:
        """The matrices and kernels among the parameters, or all where there are none."""
        return [p for p in self.parameters if p.dim() >= 2] or self.parameters

    @property
    def fan_in(self) -> float:
        """Inputs per unit of the largest weight; NaN where initial scale has no such meaning."""
        matrices = [p for p in self.parameters if p.dim() >= 2]
        if not matrices or self.module is None or isinstance(self.module, nn.Embedding):
            return math.nan
        if isinstance(self.module, RECURRENT):
            # PyTorch scales every weight of a recurrent layer by its hidden size.
            return float(self.module.hidden_size)
        weight = max(matrices, key=torch.Tensor.numel)
        if isinstance(self.module, nn.modules.conv._ConvTransposeNd):
            return float(weight.numel() // weight.shape[1])
        return float(weight.numel() // weight.shape[0])

    @property
    def sampled_weight(self) -> Parameter:
        """The largest weight, which stands for the layer in samples."""
        return max(self.weights, key=torch.Tensor.numel)

    @property
    def unit_rows(self) -> int | None:
        """Rows of that weight whose units are of one kind, or None for all.

        Gates of recurrent layers and the three projections of attention are stacked in one
        weight; units are alike or not within one gate only.
        """
        if isinstance(self.module, RECURRENT):
            return int(self.module.hidden_size)
        if isinstance(self.module, nn.MultiheadAttention):
            return int(self.module.embed_dim)
        return None

    @property
    def has_units(self) -> bool:
        """Whether rows of its largest weight belong to units that should differ."""
        return any(p.dim() >= 2 for p in self.parameters) and not isinstance(
            self.module, nn.Embedding
        )

    def unit_axis(self, dimensions: int, previous: Layer | None = None) -> int:
        """The axis of the output that runs over units (features or channels).

        A layer that keeps the shape of its input (an activation) follows the layer before it.
        """
        axis = self._unit_axes.get(dimensions)
        if axis is None:
            axis = self._unit_axes[dimensions] = self._find_unit_axis(dimensions, previous)
        return axis

    def _find_unit_axis(self, dimensions: int, previous: Layer | None) -> int:
        if isinstance(self.module, _CHANNELS_FIRST):
            return min(1, dimensions - 1)
        if isinstance(self.module, _UNITS_LAST):
            return dimensions - 1
        if previous is not None and previous.module is not None and previous is not self:
            return previous.unit_axis(dimensions)
        return 1 if dimensions >= 4 else dimensions - 1


def activation_bounds(module: nn.Module | None) -> tuple[float, float] | None:
    """The two limits of a module's output where it has flat tails at both, else None.

    >>> activation_bounds(nn.Sigmoid()), activation_bounds(nn.ReLU())
    ((0.0, 1.0), None)
    """
    if isinstance(module, nn.Hardtanh):
        return None if isinstance(module, nn.ReLU6) else (module.min_val, module.max_val)
    if isinstance(module, nn.RNNBase):
        bounded = module.mode in ("LSTM", "GRU", "RNN_TANH") and not getattr(module, "proj_size", 0)
        return (-1.0, 1.0) if bounded else None
    if isinstance(module, nn.RNNCellBase):
        return (-1.0, 1.0) if getattr(module, "nonlinearity", "tanh") == "tanh" else None
    if isinstance(module, BOUNDED):
        return (BOUNDED_BELOW.get(type(module), -1.0), 1.0)
    return None


def find_layers(models: Sequence[nn.Module]) -> list[Layer]:
    """The layers of one or several models, in the order of registration.

    Watched are modules that own parameters and modules without children, save those whose output
    says nothing new (dropout, pooling, reshaping). A parameter that the outermost module owns is
    a layer under its own name. Shared modules and parameters are listed once. With several
    models each name starts with the model's class (and its number, where classes repeat). Of a
    model in `DistributedDataParallel`, or compiled, the names are those of the model inside.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 1))
        >>> [layer.name for layer in find_layers([model])]
        ['0', '1', '3']
        >>> [layer.name for layer in find_layers([nn.Linear(1, 1), nn.Tanh()])]
        ['Linear', 'Tanh']
    """
    layers: list[Layer] = []
    seen_modules: set[nn.Module] = set()
    seen_parameters: set[Parameter] = set()
    models = [_unwrapped(model) for model in models]
    stored = stored_parameters(models)
    for prefix, model in zip(_prefixes(models), models, strict=True):
        for name, module in named_modules(model):
            if module in seen_modules:
                continue
            seen_modules.add(module)
            for layer in _layers_of(module, ".".join(filter(None, (prefix, name))), name == ""):
                own = [stored.get(p, p) for p in layer.parameters]
                layer.parameters = [p for p in own if p not in seen_parameters]
                seen_parameters.update(layer.parameters)
                layers.append(layer)
    for index, layer in enumerate(layers):
        layer.index = index
    return layers


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model under the names that they have without wrappers and compilation.

    >>> [name for name, _ in named_modules(nn.DataParallel(nn.Sequential(nn.Linear(1, 1))))]
    ['', '0']
    """
    for name, module in _unwrapped(model).named_modules():
        yield name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix("."), module


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model that a data-parallel wrapper or a compiled module holds."""
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif _is_compiled(model):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made a module; told by its name, which costs no import."""
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def _layers_of(module: nn.Module, name: str, is_root: bool) -> Iterator[Layer]:
    own = own_parameters(module)
    has_children = next(module.children(), None) is not None
    if is_root and has_children:
        for key, parameter in module.named_parameters(recurse=False):
            yield Layer(".".join(filter(None, (name, key))), None, [parameter])
    elif own or not (has_children or isinstance(module, _WITHOUT_A_SIGN)):
        yield Layer(name or type(module).__name__, module, own)


def own_parameters(module: nn.Module) -> list[Parameter]:
    """The parameters that a module itself owns and that exist: lazy ones come into being later.

    >>> len(own_parameters(nn.Linear(2, 2))), len(own_parameters(nn.LazyLinear(2)))
    (2, 0)
    """
    owned = module.parameters(recurse=False)
    return [p for p in owned if not isinstance(p, UninitializedParameter)]


def _prefixes(models: Sequence[nn.Module]) -> list[str]:
    if len(models) == 1:
        return [""]
    names = [type(model).__name__ for model in models]
    return [
        name if names.count(name) == 1 else f"{name}[{names[:position].count(name)}]"
        for position, name in enumerate(names)
    ]
