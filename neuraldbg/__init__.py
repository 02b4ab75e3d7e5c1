"""NeuralDBG: tells why a neural network failed to train.

>>> import neuraldbg
>>> neuraldbg.FailureMode.LR_BLOWUP.value
'lr_blowup'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuraldbg.causal_chain import trace_causal_chain
    from neuraldbg.debugger import NeuralDbg
    from neuraldbg.events import ActivationHealth, EventType, GradientHealth, SemanticEvent
    from neuraldbg.explanations import Explanations
    from neuraldbg.failure_modes import FailureMode
    from neuraldbg.hypotheses import CausalHypothesis, Finding, RootCause
    from neuraldbg.stored_run import StoredRun, load
    from neuraldbg.thresholds import Thresholds

__version__ = "0.1.0"

# Where each public name lives. They are imported on first use: `import neuraldbg` must not cost
# what pandas, networkx and pgmpy cost.
_HOMES = {
    "ActivationHealth": "neuraldbg.events",
    "CausalHypothesis": "neuraldbg.hypotheses",
    "EventType": "neuraldbg.events",
    "Explanations": "neuraldbg.explanations",
    "FailureMode": "neuraldbg.failure_modes",
    "Finding": "neuraldbg.hypotheses",
    "GradientHealth": "neuraldbg.events",
    "NeuralDbg": "neuraldbg.debugger",
    "RootCause": "neuraldbg.hypotheses",
    "SemanticEvent": "neuraldbg.events",
    "StoredRun": "neuraldbg.stored_run",
    "Thresholds": "neuraldbg.thresholds",
    "load": "neuraldbg.stored_run",
    "trace_causal_chain": "neuraldbg.causal_chain",
}

__all__ = [
    "ActivationHealth",
    "CausalHypothesis",
    "EventType",
    "Explanations",
    "FailureMode",
    "Finding",
    "GradientHealth",
    "NeuralDbg",
    "RootCause",
    "SemanticEvent",
    "StoredRun",
    "Thresholds",
    "load",
    "trace_causal_chain",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'neuraldbg' has no attribute {name!r}; it has {__all__}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
