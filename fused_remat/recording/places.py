"""Which module runs: in forward, and, by the numbers that autograd gives its nodes, in backward too.

No hooks: a fused layer whose children carry hooks does not run fused, and a hook on an autograd node keeps it alive.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fused_remat.recording import _torch


@dataclass
class ModuleCall:
    """One call of a module: its path, and the numbers of the autograd nodes made in it, `first` up to `last`."""

    index: int
    module: str
    thread: int
    first: int
    last: int = -1


@dataclass
class Places:
    """The calls of the modules of a model, in order of their beginning.

    `stack` has the paths of those that run now, the innermost last.
    """

    paths: dict[int, str]
    calls: list[ModuleCall] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    # By thread: (sequence number, path of the module that makes the nodes from there on).
    _owners: dict[int, list[tuple[int, str]]] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Path of the innermost module that runs."""
        return self.stack[-1] if self.stack else ""

    def enter(self, path: str) -> ModuleCall:
        thread, sequence = threading.get_ident(), _torch.next_sequence()
        call = ModuleCall(len(self.calls), path, thread, sequence)
        self.calls.append(call)
        self.stack.append(path)
        self._own(thread, sequence, path)
        return call

    def leave(self, call: ModuleCall) -> None:
        call.last = _torch.next_sequence()
        self.stack.pop()
        self._own(call.thread, call.last, self.module)

    def _own(self, thread: int, sequence: int, path: str) -> None:
        self._owners.setdefault(thread, [(-1, "")]).append((sequence, path))

    def owner(self, sequence: int, *, nested: bool = False) -> str:
        """The module that made the autograd node of this number.

        Numbers count by thread. A backward inside a backward (`nested`) evaluates nodes that were made on its own
        thread, which is another than that of forward on a GPU.
        """
        threads = list(self._owners)
        if not threads:
            return ""
        owners = self._owners[threads[-1] if nested else threads[0]]
        return owners[bisect.bisect_right(owners, sequence, key=lambda owner: owner[0]) - 1][1]


@contextmanager
def watched(
    model: nn.Module, around: Callable[[ModuleCall], AbstractContextManager[Any]] = lambda call: nullcontext()
) -> Iterator[Places]:
    """The calls of the modules of `model` while it is entered; `around(call)` is entered around each.

    A module that is called under several names has the first. Modules inside of compiled code are not called.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    places = Places(paths)
    original = nn.Module.__call__

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        call = places.enter(path)
        try:
            with around(call):
                return original(module, *args, **kwargs)
        finally:
            places.leave(call)

    nn.Module.__call__ = call_module
    try:
        yield places
    finally:
        nn.Module.__call__ = original
