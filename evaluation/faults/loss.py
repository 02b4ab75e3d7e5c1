"""Mistakes in the loss, and in what is handed to it."""

from __future__ import annotations

from neuraldbg.evaluation.faults.fault import Fault

LOSS_FAULTS: tuple[Fault, ...] = ()
