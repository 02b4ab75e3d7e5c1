"""The faults that can be put into a healthy recipe, one a failure mode."""

from .fault import Fault
from .registry import FAULTS, find_fault

__all__ = ["FAULTS", "Fault", "find_fault"]
