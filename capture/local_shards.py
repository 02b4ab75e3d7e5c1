"""Parameters that are split over ranks: this rank's part of them, without asking the others.

`DTensor` gives the numbers of the whole tensor, and most of them start a collective, in which
every rank must take part: inside a hook that could hang the training. What is read here lies on
this rank already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is split over ranks, and any other tensor itself.

    It shares the tensor's memory and is not part of any graph where the tensor is split.

    Example:
        >>> import torch
        >>> whole = torch.ones(2)
        >>> local_shard(whole) is whole
        True
    """
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return tensor
    # `DTensor.to_local` is an autograd function and would become part of the graph.
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, Tensor) else tensor


def is_whole(tensor: Tensor) -> bool:
    """Whether this rank has all of a tensor, so that its local part is the whole.

    Example:
        >>> import torch
        >>> is_whole(torch.ones(2))
        True
    """
    placements = getattr(tensor, "placements", None)
    return placements is None or all(placement.is_replicate() for placement in placements)


def shard_count(tensor: Tensor) -> int:
    """Into how many different parts a tensor is split over ranks; 1 where each rank has all of it.

    Example:
        >>> import torch
        >>> shard_count(torch.ones(2))
        1
    """
    mesh, placements = (getattr(tensor, name, None) for name in ("device_mesh", "placements"))
    if mesh is None or placements is None:
        return 1
    return math.prod(
        mesh.size(axis) for axis, placement in enumerate(placements) if placement.is_shard()
    )


def stored_parameters(models: Sequence[nn.Module]) -> dict[Tensor, Parameter]:
    """The parameter behind each tensor that stands in for one while modules compute.

    `torch.distributed.fsdp.fully_shard` swaps a module's parameters: between passes they are the
    ones that the optimizer holds, split over ranks; during passes they are whole tensors gathered
    from all ranks, which is what the autograd graph leads to.

    Args:
        models: Any modules.

    Returns:
        For each stand-in that exists now, the parameter; empty where nothing is split this way.

    Example:
        >>> stored_parameters([nn.Linear(2, 2)])
        {}
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None:  # never imported, hence not in use
        return {}
    return {
        form: managed.sharded_param
        for model in models
        for module in model.modules()
        if isinstance(module, kind)
        for managed in _managed_by(module)
        for name in ("_unsharded_param", "_sharded_post_forward_param")
        if (form := getattr(managed, name, None)) is not None
    }


def _managed_by(module: nn.Module) -> Iterator[Any]:
    """What FSDP2 knows of each parameter that it manages for a module.

    It has no public name for it; where a release keeps it elsewhere, none is found.
    """
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # up to torch 2.10 there was one
        groups = [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        yield from getattr(group, "fsdp_params", ())
