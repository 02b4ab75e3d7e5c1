"""A compiled graph run a second time, without gradients, to look at its layers' values.

`torch.compile` hands a graph of PyTorch operations to its backend. Anything added to that graph
changes how the backend fuses kernels, and with that the last bits of the training and its speed.
So the graph is left as it is; a copy of it is kept, in which each layer's value is handed over, and
that copy is run just before the compiled code on those steps that are captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.amp import autocast_mode
from torch.nn.parameter import Buffer, Parameter

MARK = "neuraldbg_calls"
"""Key of a node's `meta` under which the module calls that gave the node are listed."""
_PLAIN = (Tensor, Parameter, Buffer)
_NODES_TO_OWNER = 8
_FUNCTIONAL = nn.functional
_ACTIVATIONS: Mapping[Any, tuple[float, float] | None] = {
    **dict.fromkeys((torch.relu, torch.relu_, _FUNCTIONAL.relu, "relu", "relu_")),
    **dict.fromkeys((torch.tanh, _FUNCTIONAL.tanh, "tanh", "tanh_"), (-1.0, 1.0)),
    **dict.fromkeys((torch.sigmoid, _FUNCTIONAL.sigmoid, "sigmoid", "sigmoid_"), (0.0, 1.0)),
}
"""Rectifiers (None) and bounded activations with their limits; names are of tensor methods."""
_enter_autocast: Callable[..., Any] = autocast_mode._enter_autocast
_exit_autocast: Callable[..., None] = autocast_mode._exit_autocast
_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d", "_dtensor", "symm_mem", "fsdp")
_TRANSFORMS = ("torch._functorch", "torch._C._functorch")


@dataclass(eq=False)
class ModuleCall:
    """One call of a module, as it was traced.

    Attributes:
        module: The module.
        entry: The node of its first argument where that asks for no gradient, else None.
        cuts: Whether its output asks for no gradient.
    """

    module: ref[nn.Module]
    entry: fx.Node | None
    cuts: bool


class Receiver(Protocol):
    """Takes the values of a graph that is run for them."""

    def output(self, call: int, value: Any, entry: Any) -> None:
        """The output of a call, and its input where it asks for no gradient."""

    def activation(self, call: int, value: Any, bounds: tuple[float, float] | None) -> None:
        """The result of an activation that a function applied to the output of a call."""


class ObservedGraph:
    """A copy of a traced graph that hands over the outputs of its module calls.

    Args:
        graph_module: The graph, its nodes marked (`MARK`); it is not changed.

    Attributes:
        calls: The module calls, in the order in which they run.
        obstacle: Why the graph must not be run a second time; empty if it may.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.calls: list[ModuleCall] = []
        self.obstacle = _obstacle(graph_module)
        self._here = threading.local()
        self._written = [
            getattr(node.meta.get("example_value"), "_version", 0) > 0
            for node in graph_module.graph.nodes
            if node.op == "placeholder"
        ]
        self._run = _observed_copy(graph_module, self, outermost=True)

    def run(self, args: Sequence[Any], receiver: Receiver) -> None:
        """Run the graph for its layers' values; nothing outside of it changes.

        Args:
            args: What the compiled code is about to be called with.
            receiver: Given the values, in order.

        Raises:
            Exception: whatever the graph's operations raise.
        """
        self._here.receiver, self._here.autocasts = receiver, []
        try:
            with ExitStack() as stack:
                stack.enter_context(_random_state_kept(args))
                stack.enter_context(torch.no_grad())
                stack.enter_context(_without_autocast_cache())
                stack.callback(self._leave_autocasts)
                self._run(*map(self._private, args, self._written))
        finally:
            del self._here.receiver, self._here.autocasts

    @staticmethod
    def _private(value: Any, written: bool) -> Any:
        """An input that may be written to: buffers are, by batch norm above all."""
        if not isinstance(value, Tensor) or (type(value) is Parameter and not written):
            return value
        return value.detach().clone()

    # Called by the copy

    def hand_over_output(self, call: int, value: Any, entry: Any) -> None:  # noqa: D102
        self._here.receiver.output(call, value, entry)

    def hand_over_activation(self, call: int, value: Any, bounds: Any) -> None:  # noqa: D102
        self._here.receiver.activation(call, value, bounds)

    def enter_autocast(self, *args: Any) -> Any:  # noqa: D102
        mode = _enter_autocast(*args)
        self._here.autocasts.append(mode)
        return mode

    def exit_autocast(self, mode: Any) -> None:  # noqa: D102
        self._here.autocasts.remove(mode)
        _exit_autocast(mode)

    def _leave_autocasts(self) -> None:
        """Leave what a graph that failed half-way had entered."""
        for mode in reversed(self._here.autocasts):
            _exit_autocast(mode)


def unmark(graph_module: fx.GraphModule) -> None:
    """Remove all marks, so that the backend is given what it would be given without them."""
    for graph in _graphs(graph_module):
        for node in graph.nodes:
            node.meta.pop(MARK, None)


def is_marked(graph_module: fx.GraphModule) -> bool:
    """Whether any module was called in a graph."""
    return any(MARK in node.meta for graph in _graphs(graph_module) for node in graph.nodes)


def _graphs(graph_module: fx.GraphModule) -> Iterator[fx.Graph]:
    """A graph and those of its branches and bodies."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


def _observed_copy(
    source: fx.GraphModule, taps: ObservedGraph, outermost: bool = False
) -> fx.GraphModule:
    root = nn.Module()
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    replaced: dict[Any, Callable[..., Any]] = {
        _enter_autocast: taps.enter_autocast,
        _exit_autocast: taps.exit_autocast,
    }
    numbers: dict[ModuleCall, int] = {}
    for node in source.graph.nodes:
        if node.op == "output" and outermost:
            graph.output(())
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        copy.meta = {}
        if node.op == "call_function":
            copy.target = replaced.get(node.target, node.target)
        elif node.op in ("get_attr", "call_module"):
            _take_over(root, source, str(node.target), taps)
        for call in node.meta.get(MARK, ()):
            numbers[call] = len(taps.calls)
            taps.calls.append(call)
            entry = copies.get(call.entry) if call.entry is not None else None
            graph.call_function(taps.hand_over_output, (numbers[call], copy, entry))
        if node.op != "placeholder" and MARK not in node.meta and node.target in _ACTIVATIONS:
            owner = _owner(node)
            if owner in numbers:
                bounds = _ACTIVATIONS[node.target]
                graph.call_function(taps.hand_over_activation, (numbers[owner], copy, bounds))
    return fx.GraphModule(root, graph)


def _take_over(root: nn.Module, source: fx.GraphModule, name: str, taps: ObservedGraph) -> None:
    """Give the copy what a node of the graph names: a body of its own, or a constant."""
    if "." in name:
        return
    value = getattr(source, name)
    if isinstance(value, fx.GraphModule):
        value = getattr(root, name, None) or _observed_copy(value, taps)
    setattr(root, name, value)


def _owner(node: fx.Node) -> ModuleCall | None:
    """The module call that an activation follows: the nearest one straight above it."""
    for _ in range(_NODES_TO_OWNER):
        above = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
        if above is None:
            return None
        if MARK in above.meta:
            call: ModuleCall = above.meta[MARK][-1]
            return call
        node = above
    return None


def _obstacle(graph_module: fx.GraphModule) -> str:
    """Why a graph must not be run a second time."""
    for graph in _graphs(graph_module):
        for node in graph.nodes:
            if node.op == "placeholder":
                example = node.meta.get("example_value")
                held = getattr(node.meta.get("grapharg"), "example", None)
                if isinstance(example, Tensor) and held is not None and type(held) not in _PLAIN:
                    return "its tensors are spread over devices or of a class of their own"
            if node.op in ("get_attr", "call_module") and "." in str(node.target):
                return "it holds modules that were not traced"
            place = _place(node)
            if place.startswith(("torch.distributed", *_COLLECTIVES)):
                return "it communicates with other processes"
            if "flex_attention" in place:
                return "outside of compiled code flex attention takes memory without bound"
            if place.startswith(_TRANSFORMS):
                return "torch.func is at work in it"
    return ""


def _place(node: fx.Node) -> str:
    """Where the function that a node calls comes from."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):
        return str(node.target)
    return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"


@contextmanager
def _random_state_kept(args: Sequence[Any]) -> Iterator[None]:
    """Leave random numbers as if none had been drawn, without waiting for a device."""
    devices: dict[str, set[int]] = {}
    for value in args:
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            devices.setdefault(value.device.type, set()).add(value.get_device())
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind, indices in devices.items():
            stack.enter_context(torch.random.fork_rng(sorted(indices), device_type=kind))
        yield


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Keep casts made without gradients from serving code that needs them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
