"""The numbers an optimizer was given: learning rate, momentum, betas, eps, weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SMOOTHING = ("alpha", "rho")
"""What RMSprop and Adadelta call the constant that Adam calls beta2."""
_DECOUPLED = ("adamw", "lion", "sgdw", "muon", "adafactor", "lamb")
"""Optimizers that shrink the weights themselves instead of adding to the gradient."""


def group_settings(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings of one parameter group that it names, under the series' column names.

    Numbers that lie on an accelerator (as those of capturable optimizers may) are left out.

    Example:
        >>> optimizer = torch.optim.Adam([torch.ones(1)], lr=0.1, weight_decay=0.01)
        >>> group_settings(optimizer.param_groups[0])["beta2"]
        0.999
        >>> sorted(group_settings(optimizer.param_groups[0]))
        ['beta1', 'beta2', 'eps', 'value', 'weight_decay']
    """
    found = {
        "value": group.get("lr"),
        "momentum": group.get("momentum"),
        "eps": group.get("eps"),
        "weight_decay": group.get("weight_decay"),
    }
    betas = group.get("betas")
    if isinstance(betas, Sequence) and len(betas) == 2:
        found["beta1"], found["beta2"] = betas
    else:
        found["beta2"] = next((group[name] for name in _SMOOTHING if name in group), None)
    numbers = {name: _number(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def combined_settings(groups: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number for each setting of several groups: the largest; of eps the least.

    >>> combined_settings([{"eps": 1e-8, "weight_decay": 0.0}, {"weight_decay": 0.1}])
    {'eps': 1e-08, 'weight_decay': 0.1}
    """
    if len(groups) == 1:
        return dict(groups[0])
    names = dict.fromkeys(name for group in groups for name in group)
    return {
        name: (min if name == "eps" else max)(group[name] for group in groups if name in group)
        for name in names
    }


def decays_weights_directly(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay acts on the weights (AdamW) rather than through the gradient (L2).

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).

    Example:
        >>> adamw = torch.optim.AdamW([torch.ones(1)])
        >>> decays_weights_directly(adamw, adamw.param_groups[0])
        True
    """
    named = group.get("decoupled_weight_decay")
    if named is not None:
        return bool(named)
    name = type(optimizer).__name__.lower()
    return any(known in name for known in _DECOUPLED)


def eps_as_stored(optimizer: Optimizer) -> tuple[float, str]:
    """The least eps of an optimizer as the number format holds it that it is added in.

    Eps is added to the root of the second moment, in that one's format (fused kernels calculate
    in float32). In float16 everything below about 3e-8 rounds to zero.

    Returns:
        The number, 0 where eps is lost, NaN where there is none; and the format's name.

    Example:
        >>> weight = torch.ones(1, dtype=torch.float16)
        >>> eps_as_stored(torch.optim.Adam([weight], eps=1e-8))
        (0.0, 'float16')
    """
    least, name = math.nan, ""
    for group in optimizer.param_groups:
        eps = _number(group.get("eps"))
        if math.isnan(eps) or eps <= 0 or group.get("fused"):
            continue
        for dtype in {_state_dtype(optimizer, p) for p in group["params"]}:
            if not dtype.is_floating_point:
                continue
            stored = float(torch.tensor(eps, dtype=torch.float64, device="cpu").to(dtype))
            if not least <= stored:
                least, name = stored, str(dtype).removeprefix("torch.")
    return least, name


def _state_dtype(optimizer: Optimizer, parameter: Tensor) -> torch.dtype:
    state = optimizer.state.get(parameter, {}) if parameter in optimizer.state else {}
    for name in ("exp_avg_sq", "square_avg", "sum"):
        moment = state.get(name)
        if isinstance(moment, Tensor):
            return moment.dtype
    return parameter.dtype


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        return float(value) if value.is_cpu and value.numel() == 1 else math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan
