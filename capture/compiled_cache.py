"""Code that `torch.compile` made of a model before anybody watched.

It would go on running unseen, so it is forgotten once and compiled anew by the next call, with a
copy of its graph kept. Compiled code is found by the checks ("guards") that PyTorch runs before
using it, which name the classes of the modules and the shapes of their parameters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

_TYPE = re.compile(r"___check_type_id\(.*?, (\d+)\)")
_SHAPE = re.compile(r"check_tensor\(.*?, Parameter, .*?size=\[([^\]]*)\]")


def forget_compiled(models: Sequence[nn.Module], watched: set[str]) -> int:
    """Have what was compiled of these models compiled anew; other models' code stays.

    Args:
        models: The models.
        watched: Names of compiled graphs that need not be forgotten.

    Returns:
        How many pieces of code were forgotten.
    """
    if "torch._dynamo" not in sys.modules:
        return 0
    types = {str(id(kind)) for kind in _telling_types(models)}
    shapes = {
        tuple(map(str, parameter.shape))
        for model in models
        for parameter in model.parameters()
        if not isinstance(parameter, UninitializedParameter)
    }
    count = 0
    for code, entry in list(_entries()):
        if not watched.isdisjoint(entry.code.co_names):
            continue
        guards = "\n".join(_checks(entry.guard_manager.root))
        if types.isdisjoint(_TYPE.findall(guards)):
            continue
        if all(_fits(shape.split(", "), shapes) for shape in set(_SHAPE.findall(guards))):
            _forget(code, entry)
            count += 1
    return count


def _fits(checked: Sequence[str], shapes: Collection[tuple[str, ...]]) -> bool:
    """Whether any of some shapes would pass a check, in which None stands for any size."""
    return any(
        len(shape) == len(checked)
        and all(wanted in ("None", size) for wanted, size in zip(checked, shape, strict=True))
        for shape in shapes
    )


def _telling_types(models: Sequence[nn.Module]) -> set[type]:
    """Classes that tell that code is of these models: their own, and those compiled as such."""
    found = {type(model) for model in models}
    for model in models:
        for module in model.modules():
            inner = getattr(module, "_orig_mod", None)
            compiled = getattr(module, "_compiled_call_impl", None) is not None
            if isinstance(inner, nn.Module):
                found.add(type(inner))
            if compiled or not type(module).__module__.startswith("torch.nn."):
                found.add(type(module))
    return found


def _entries() -> Iterator[tuple[CodeType, Any]]:
    """All code in this process that was compiled, with what it became."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import convert_frame

    for held in convert_frame.input_codes.seen:
        code = held()
        if code is not None:
            for entry in _debug_get_cache_entry_list(code):
                yield code, entry


def _checks(manager: Any) -> Iterator[str]:
    """What is checked before code is used, in words."""
    for check in manager.get_leaf_guards():
        yield from check.verbose_code_parts()
    children = manager.get_child_managers()
    if hasattr(manager, "get_key_value_managers"):  # of a dictionary
        pairs = manager.get_key_value_managers().values()
        children = [child for pair in pairs for child in pair if child is not None]
    for child in children:
        yield from _checks(child)


def _forget(code: CodeType, entry: Any) -> None:
    """Forget one piece of code; all of its function's where PyTorch cannot do less."""
    from torch._dynamo import eval_frame

    manager = entry.guard_manager
    try:
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        state, held = manager.extra_state, manager.cache_entry
        state.invalidate(held, DeletedGuardManagerWrapper("NeuralDBG watches the model now"))
    except (ImportError, AttributeError, TypeError):
        eval_frame.remove_from_cache(code)
