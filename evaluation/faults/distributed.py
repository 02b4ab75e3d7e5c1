"""Mistakes that need several processes."""

from __future__ import annotations

from neuraldbg.evaluation.faults.fault import Fault

DISTRIBUTED_FAULTS: tuple[Fault, ...] = ()
