"""Watching layers inside regions compiled by `torch.compile`.

A forward hook is traced into the graph along with its module. There it leaves one operation, which
the compiler takes for opaque and which looks at a flag when it runs: so nothing is compiled anew
when sampling begins or ends, and a step that is not sampled pays for a call and nothing else.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_LIBRARY = torch.library.Library("neuraldbg", "DEF")
# The anchor is declared as written to, so that the operation counts as having an effect.
_LIBRARY.define("observe(Tensor value, Tensor(a!) anchor, int region, bool is_input) -> ()")

_regions: WeakValueDictionary[int, CompiledRegion] = WeakValueDictionary()
_numbers = itertools.count()


class CompiledRegion:
    """One layer's place in compiled graphs.

    Args:
        receive: Called at run time with the value and whether it is the layer's input; must not
            raise.
        device: Where the layer computes.
    """

    def __init__(self, receive: Callable[[Tensor, bool], None], device: torch.device) -> None:
        self.receive = receive
        self.number = next(_numbers)
        self.anchor = torch.zeros(1, device=device)
        _regions[self.number] = self

    def hand_over(self, value: Tensor, is_input: bool) -> None:
        """Called while a graph is traced: the value goes to `receive` whenever the graph runs."""
        if value.is_floating_point():
            torch.ops.neuraldbg.observe(value.detach(), self.anchor, self.number, is_input)


def _observe(value: Tensor, anchor: Tensor, region: int, is_input: bool) -> None:
    found = _regions.get(region)
    if found is not None:
        found.receive(value, is_input)


_LIBRARY.impl("observe", _observe, "CompositeExplicitAutograd")


@torch.library.register_fake("neuraldbg::observe", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _observe_nothing(value: Tensor, anchor: Tensor, region: int, is_input: bool) -> None:
    """What the operation gives while a graph is traced."""


def device_of(models: Sequence[nn.Module]) -> torch.device:
    """The device of the first parameter, the CPU for models without any."""
    first = next((p for model in models for p in model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


class HookGuards:
    """Makes compiled code notice that hooks come and go.

    PyTorch does not check compiled code for hooks added since (`skip_nnmodule_hook_guards`), so
    code compiled before a run would go on without ours. While a run lasts that check is on, and
    code that was compiled before it is forgotten once, so that the next call compiles it anew with
    the hooks in it. After the run the next call finds the hooks gone and goes back to code without.
    """

    def __init__(self) -> None:
        self._restore: Callable[[], None] | None = None

    def begin(self, models: Sequence[nn.Module]) -> None:
        """Turn the check on, and forget what was compiled of these models without hooks."""
        if self._restore is not None or "torch._dynamo" not in sys.modules:
            return  # nothing was compiled in this process
        from torch._dynamo import config

        before = config.skip_nnmodule_hook_guards
        config.skip_nnmodule_hook_guards = False

        def restore() -> None:
            config.skip_nnmodule_hook_guards = before

        self._restore = restore
        for code in _compiled_codes(models):
            torch._dynamo.eval_frame.remove_from_cache(code)

    def end(self) -> None:
        """Put the check back as it was."""
        if self._restore is not None:
            self._restore()
            self._restore = None


def _compiled_codes(models: Sequence[nn.Module]) -> set[Any]:
    """The code of forward methods of which compiled versions exist."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo import external_utils

    kinds = {type(module) for model in models for module in model.modules()}
    codes = {getattr(kind.forward, "__code__", None) for kind in kinds}
    # Containers of torch's own are compiled through a wrapper.
    codes.add(external_utils.wrap_inline(lambda: None).__code__)
    return {code for code in codes if code is not None and _debug_get_cache_entry_list(code)}
