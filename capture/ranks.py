"""Which of the processes that train together this one is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed


@dataclass(frozen=True, slots=True)
class Rank:
    """A process among those that train together.

    Attributes:
        number: From 0.
        world_size: How many there are; 1 where a process trains alone.
    """

    number: int = 0
    world_size: int = 1


def current_rank() -> Rank:
    """Where this process stands now, without asking the others.

    `torch.distributed` says it once the process group is initialised; before that the environment
    that torchrun sets (``RANK`` and ``WORLD_SIZE``). A process without either trains alone.

    Example:
        >>> current_rank()
        Rank(number=0, world_size=1)
    """
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return Rank(max(group.get_rank(), 0), group.get_world_size())
    try:
        told = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except (KeyError, ValueError):
        return Rank()
    return told if 0 <= told.number < told.world_size else Rank()


def describe_rank(rank: Rank, sharded: bool = False) -> str:
    """What one process could observe, in words; empty where it trains alone.

    Args:
        rank: The process.
        sharded: Whether parameters are split over the ranks.

    Example:
        >>> describe_rank(Rank(1, 4), sharded=True)
        'rank 1 of 4, local shards only'
        >>> describe_rank(Rank(1, 4))
        'rank 1 of 4, its own batches only'
        >>> describe_rank(Rank())
        ''
    """
    if rank.world_size <= 1:
        return ""
    what = "local shards only" if sharded else "its own batches only"
    return f"rank {rank.number} of {rank.world_size}, {what}"
