"""Following `torch.compile`: what is compiled, which modules are in it, and when it runs.

Neither graph nor checks of compiled code are touched: it is compiled as often as without a watcher,
and computes the same bits. While somebody watches, two functions of the compiler are replaced, one
to learn which value of a graph is which module's output, one to keep a copy of the graph and to
be called when its compiled code is; see `neuraldbg.capture.compiled_graph`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import Parameter

from neuraldbg.capture.compiled_graph import (
    MARK,
    ModuleCall,
    ObservedGraph,
    Receiver,
    is_marked,
    unmark,
)
from neuraldbg.capture.layers import Layer, own_parameters


@dataclass(frozen=True, slots=True, eq=False)
class CompilationWatcher:
    """What is called around compiled code; none of it may raise.

    Attributes:
        starts: Compilation begins: modules must have no hooks of ours now, or these would be
            compiled too.
        ends: It ended.
        runs: Compiled code is about to run, called with its region and its arguments.
    """

    starts: Callable[[], None]
    ends: Callable[[], None]
    runs: Callable[[CompiledRegion, Sequence[Any]], None]


@dataclass(slots=True)
class LayerIndex:
    """The watched layers by what is known of them in compiled code."""

    of_module: dict[nn.Module, Layer] = field(default_factory=dict)
    of_parameter: dict[Parameter, Layer] = field(default_factory=dict)
    of_name: dict[str, Layer] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> LayerIndex:
        """The index of these layers."""
        index = cls()
        for layer in layers:
            index.of_name[layer.name] = layer
            if layer.module is not None:
                index.of_module[layer.module] = layer
                for parameter in own_parameters(layer.module):
                    index.of_parameter.setdefault(parameter, layer)
        return index


class CompiledRegion:
    """One compiled graph and the module calls in it.

    One graph can serve many modules of the same structure, such as all blocks of a transformer;
    which of them it runs for is told by the parameters that it is called with.

    Args:
        graph_module: The traced graph, its nodes marked.
        roots: The modules that the traced function was called with.
    """

    def __init__(self, graph_module: fx.GraphModule, roots: Sequence[nn.Module]) -> None:
        self._graph = ObservedGraph(graph_module)
        self.obstacle = self._graph.obstacle
        places = _places_of_parameters(graph_module)
        paths = _paths(roots)
        inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        self._entries: list[tuple[int, int]] = []  # places of a parameter and of an input
        self._anchors: list[int | None] = []
        self._paths: list[tuple[int, str] | None] = []
        self._traced: dict[int, ref[Parameter]] = {}
        for call in self._graph.calls:
            module = call.module()
            found = None
            for parameter in own_parameters(module) if module is not None else ():
                place = places.get(id(parameter))
                if place is not None:
                    found = place
                    self._traced[place] = ref(parameter)
                    break
            self._anchors.append(found)
            if found is not None and call.entry in inputs:
                self._entries.append((found, inputs.index(call.entry)))
            self._paths.append(paths.get(id(module)))
            call.entry = None  # it would keep the traced graph

    @property
    def calls(self) -> Sequence[ModuleCall]:
        """The module calls in the graph, in the order in which they run."""
        return self._graph.calls

    def holds(self, args: Sequence[Any], index: LayerIndex) -> bool:
        """Whether a call with these arguments runs any of the watched layers."""
        of_parameter = index.of_parameter
        return any(args[place] in of_parameter for place in self._traced)

    def entries(self, args: Sequence[Any], index: LayerIndex) -> list[tuple[Layer, Tensor]]:
        """The layers that read what the graph is called with, each with what it reads."""
        of_parameter = index.of_parameter
        return [
            (of_parameter[args[place]], args[entry])
            for place, entry in self._entries
            if args[place] in of_parameter
        ]

    def layers(self, args: Sequence[Any], index: LayerIndex) -> list[Layer | None]:
        """The layer of each module call when the graph is called with these arguments."""
        if not self._traced:
            return [None] * len(self.calls)
        if all(args[place] is parameter() for place, parameter in self._traced.items()):
            return [index.of_module.get(call.module()) for call in self.calls]  # type: ignore[arg-type]
        found = [
            None if place is None else index.of_parameter.get(args[place])
            for place in self._anchors
        ]
        prefixes: dict[int, str] = {}
        for layer, path in zip(found, self._paths, strict=True):
            if layer is not None and path is not None:
                prefix = _prefix(layer.name, path[1])
                if prefix is not None:
                    prefixes[path[0]] = prefix
        for number, path in enumerate(self._paths):
            if self._anchors[number] is None and path is not None and path[0] in prefixes:
                name = ".".join(filter(None, (prefixes[path[0]], path[1])))
                found[number] = index.of_name.get(name)
        return found

    def run(self, args: Sequence[Any], receiver: Receiver) -> None:
        """Hand the values of all module calls to a receiver; see `ObservedGraph.run`.

        A graph that cannot be run so is not run again; `obstacle` tells why.
        """
        try:
            self._graph.run(args, receiver)
        except Exception as error:  # noqa: BLE001 - any operation of the user's may be in it
            told = str(error).partition("\n")[0][:120]
            self.obstacle = f"its graph cannot be run twice ({type(error).__name__}: {told})"


def watch_compilation(watcher: CompilationWatcher) -> Callable[[], None] | None:
    """Start calling a watcher around compilation and compiled code.

    Returns:
        The function that ends it, or None where there is nothing to watch: `torch.compile` was
        never called in this process, or this version of PyTorch cannot be watched.
    """
    if "torch._dynamo" not in sys.modules or not _replacement.is_possible():
        return None
    _replacement.add(watcher)
    return lambda: _replacement.remove(watcher)


class _Replacement:
    """Stands in for the two functions of the compiler while there are watchers."""

    def __init__(self) -> None:
        self.watchers: list[CompilationWatcher] = []
        self._originals: list[tuple[type, str, Callable[..., Any], Callable[..., Any]]] = []
        self.names: set[str] = set()

    def is_possible(self) -> bool:
        """Whether this version of PyTorch has what is replaced."""
        try:
            from torch._dynamo.callback import callback_handler
            from torch._dynamo.output_graph import OutputGraph
            from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
        except ImportError:
            return False
        return (
            hasattr(callback_handler, "register_start_callback")
            and hasattr(OutputGraph, "call_user_compiler")
            and hasattr(UnspecializedNNModuleVariable, "call_function")
        )

    def add(self, watcher: CompilationWatcher) -> None:
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.output_graph import OutputGraph
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        self.watchers.append(watcher)
        if not self._originals:
            self._replace(UnspecializedNNModuleVariable, "call_function", _marking)
            self._replace(OutputGraph, "call_user_compiler", self._keeping)
        if self._start not in callback_handler.start_callbacks:  # dropped by a reset
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def remove(self, watcher: CompilationWatcher) -> None:
        from torch._dynamo.callback import callback_handler

        if watcher in self.watchers:
            self.watchers.remove(watcher)
        if self.watchers:
            return
        for callbacks, ours in (
            (callback_handler.start_callbacks, self._start),
            (callback_handler.end_callbacks, self._end),
        ):
            while ours in callbacks:
                callbacks.remove(ours)
        # What somebody else replaced after us stays; ours, which theirs calls, only passes on.
        self._originals = [kept for kept in self._originals if not _put_back(*kept)]

    def _replace(
        self, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = getattr(owner, name)
        ours = make(original)
        self._originals.append((owner, name, original, ours))
        setattr(owner, name, ours)

    def _start(self, *_: Any) -> None:
        for watcher in tuple(self.watchers):
            watcher.starts()

    def _end(self, *_: Any) -> None:
        for watcher in tuple(self.watchers):
            watcher.ends()

    def _keeping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_user_compiler(output_graph: Any, graph_module: Any, *args: Any) -> Any:
            region = None
            if self.watchers and isinstance(graph_module, fx.GraphModule):
                region = _region_of(output_graph, graph_module)
            compiled = original(output_graph, graph_module, *args)
            if region is None:
                return compiled
            if name := graph_module.meta.get("backend_id"):
                self.names.add(str(name))
            return self._watched(region, compiled)

        return call_user_compiler

    def _watched(self, region: CompiledRegion, compiled: Callable[..., Any]) -> Callable[..., Any]:
        watchers = self.watchers

        def run(*args: Any) -> Any:
            if watchers:
                for watcher in tuple(watchers):
                    watcher.runs(region, args)
            return compiled(*args)

        return run


_replacement = _Replacement()


def watched_graphs() -> set[str]:
    """Names of the compiled graphs that were compiled while somebody watched."""
    return _replacement.names


def _put_back(
    owner: type, name: str, original: Callable[..., Any], ours: Callable[..., Any]
) -> bool:
    if getattr(owner, name) is not ours:
        return False
    setattr(owner, name, original)
    return True


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of the method that traces the call of a module: mark the node of the module's output."""

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = original(variable, tx, args, kwargs)
        if _replacement.watchers:
            with contextlib.suppress(Exception):  # a module that cannot be told is not observed
                _mark(variable.value, args, result)
        return result

    return call_function


def _mark(module: nn.Module, args: Sequence[Any], result: Any) -> None:
    if next(module.children(), None) is not None and not own_parameters(module):
        return
    node = _first_node(result.as_proxy())
    if node is None:
        return
    entry = _first_node(args[0].as_proxy()) if len(args) else None
    if entry is not None and entry.meta["example_value"].requires_grad:
        entry = None
    cuts = not node.meta["example_value"].requires_grad
    node.meta.setdefault(MARK, []).append(ModuleCall(ref(module), entry, cuts))


def _first_node(value: Any, depth: int = 3) -> fx.Node | None:
    """The node of the first floating tensor in what a module took or returned, while traced."""
    if isinstance(value, fx.Proxy):
        example = value.node.meta.get("example_value")
        return value.node if isinstance(example, Tensor) and example.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if depth and isinstance(value, (tuple, list)):
        return next((n for n in (_first_node(v, depth - 1) for v in value) if n is not None), None)
    return None


def _region_of(output_graph: Any, graph_module: fx.GraphModule) -> CompiledRegion | None:
    """The region of a graph that is about to be compiled, its marks removed."""
    try:
        if not is_marked(graph_module):
            return None
        unwatched = (
            getattr(output_graph, "export", False)
            or getattr(output_graph, "package", None) is not None
            or not torch.is_grad_enabled()
        )
        return None if unwatched else CompiledRegion(graph_module, _roots(output_graph))
    except Exception:  # noqa: BLE001 - compilation goes on; the layers count as not observed
        return None
    finally:
        unmark(graph_module)


def _roots(output_graph: Any) -> list[nn.Module]:
    """The modules that a function being compiled was called with."""
    given = list(getattr(output_graph, "local_scope", {}).values())
    given += [getattr(value, "__self__", None) for value in given]
    return [value for value in given if isinstance(value, nn.Module)]


def _paths(roots: Sequence[nn.Module]) -> dict[int, tuple[int, str]]:
    """Of each module in a root, by its id: the root's number and its name in the root."""
    return {
        id(module): (number, name.replace("_orig_mod.", ""))
        for number, root in reversed(list(enumerate(roots)))
        for name, module in root.named_modules()
    }


def _prefix(name: str, path: str) -> str | None:
    """What comes before a path at the end of a layer's name; None if it does not end so.

    >>> _prefix("blocks.3.up", "up"), _prefix("blocks.3", ""), _prefix("setup", "up")
    ('blocks.3', 'blocks.3', None)
    """
    if not path or name == path:
        return "" if path else name
    return name.removesuffix(f".{path}") if name.endswith(f".{path}") else None


def _places_of_parameters(graph_module: fx.GraphModule) -> dict[int, int]:
    """At which place of the arguments each parameter stands, by its id."""
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    examples = [getattr(node.meta.get("grapharg"), "example", None) for node in nodes]
    return {id(value): k for k, value in enumerate(examples) if isinstance(value, Parameter)}
