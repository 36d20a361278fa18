"""What the modules of a region hold, before its forward: taken, compared, and put in place for a replay.

A replay runs with buffers, plain attributes, hooks, submodules and training flags as they were before the forward, in
containers of its own, and afterwards the module holds what it held: everything moves exactly once. Parameters belong to
the optimizer: they are only compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import UninitializedTensorMixin

from fused_remat.guards.arguments import in_words, version
from fused_remat.guards.checksum import can_sum
from fused_remat.guards.containers import CONTAINERS, can_change, copied, emptied, same_items, without_graph
from fused_remat.guards.errors import RematMutation
from fused_remat.guards.seen import Seen

_SMALL = 65536  # elements of a buffer that is copied at every call, and on a device kept unasked
_NOT_ATTRIBUTES = ("_parameters", "_buffers")
# Not _InstanceNorm: it saves copies of its statistics, which a replay from newer ones would make otherwise.
_RUNNING_NORMS = {cls.forward for cls in (_BatchNorm, nn.SyncBatchNorm)}


def _writes_only(module: nn.Module) -> bool:
    """Whether its forward only updates its buffers, so that its result does not depend on what they were."""
    return module.training and getattr(type(module), "forward", None) in _RUNNING_NORMS


def updated_buffers(modules: Iterable[tuple[str, nn.Module]]) -> set[int]:
    """Addresses of the buffers that norms in training update: saved with the rest, and never read."""
    return {
        buffer.data_ptr()
        for _, module in modules
        if _writes_only(module)
        for buffer in module._buffers.values()
        if buffer is not None and type(buffer) is Tensor
    }


class _Parameter:
    """What must not change about a parameter between forward and backward."""

    def __init__(self, value: nn.Parameter) -> None:
        self.value = value
        self.version = version(value)
        self.requires_grad = value.requires_grad
        self.words = in_words(value)
        plain = type(value) is nn.Parameter and value.layout is torch.strided
        self.storage = value.untyped_storage() if plain else None

    def what_happened(self, current: nn.Parameter | None) -> str | None:
        if current is not self.value:
            return "was replaced by another parameter" if current is not None else "was removed"
        if in_words(current) != self.words:
            return f"became {in_words(current)}, it was {self.words}"
        if version(current) != self.version:
            return "was changed in place"
        if current.requires_grad != self.requires_grad:
            return f"had requires_grad set to {current.requires_grad}"
        if self.storage is not None and current.untyped_storage() is not self.storage:
            return "was given other data"
        return None


class _ModuleState:
    """One module, as it is now; after `compare`, with only what a replay needs."""

    def __init__(self, module: nn.Module, path: str, is_sharded: bool, seen: Seen) -> None:
        self.module = module
        self.path = path
        self.seen = seen
        self.attributes = {key: value for key, value in vars(module).items() if key not in _NOT_ATTRIBUTES}
        self.contents: dict[str, Any] = {}
        self.tensors: dict[str, int] = {}  # versions of tensors that are plain attributes
        for key, value in self.attributes.items():
            if can_change(value):
                if value:
                    self.contents[key] = copied(value)
            elif isinstance(value, Tensor):
                self.tensors[key] = version(value)
        self.is_sharded = is_sharded  # its parameters come and go by themselves
        self.is_lazy = any(isinstance(p, UninitializedTensorMixin) for p in module._parameters.values())
        self.is_scripted = isinstance(module, torch.jit.ScriptModule)
        self.scratch = _writes_only(module)
        self.buffers = dict(module._buffers.items())
        self.versions = {
            key: version(b)
            for key, b in self.buffers.items()
            if b is not None and not isinstance(b, UninitializedTensorMixin)
        }
        self.clones = {key: self.buffers[key].detach().clone() for key in self.versions if self._is_copied(key)}
        self.parameters: dict[str, Any] = {key: version(p) for key, p in _parameters(module).items()}

    def _is_copied(self, key: str) -> bool:
        """Whether to copy a buffer before the forward might change it. Large tables (masks, rotations) that are no
        saved state, or are not in training, are not: once a call has shown that they stay.
        """
        if self.scratch or self.is_scripted:
            return False
        if not self.seen.settled or self._name(key) in self.seen.moved or self.buffers[key].numel() <= _SMALL:
            return True
        if isinstance(self.module, _NormBase) or key.startswith("running_"):
            return True
        return self.module.training and key not in self.module._non_persistent_buffers_set

    def compare(self, region: str) -> None:
        """After the forward: keep what it changed as it was before, and how the rest must stay."""
        module = self.module
        if self.is_lazy:  # it has become another module, of which there was no state before
            self.__init__(module, self.path, self.is_sharded, self.seen)
        for key, count in self.parameters.items() if not self.is_sharded else ():
            parameter = _parameters(module).get(key)
            if parameter is not None and version(parameter) != count:
                raise RematMutation(
                    f"{region} changes its parameter {self._name(key)} in its forward, which the replay would start "
                    "from; change it after backward, or make it a buffer: the replay gets buffers as they were"
                )
        self.parameters = {key: _Parameter(p) for key, p in _parameters(module).items()}
        for key, count in self.tensors.items():
            if version(self.attributes[key]) != count:
                raise RematMutation(
                    f"{region} changes {self._name(key)}, a tensor that is no buffer, in place in its forward, which "
                    "the replay would do again; register it as a buffer: the replay gets buffers as they were"
                )
        self.contents = {
            key: (copied(held, without_graph), not same_items(held, self.attributes[key]))
            for key, held in self.contents.items()
        }
        self.attributes = {key: without_graph(value) for key, value in self.attributes.items()}
        self._compare_buffers(region)

    def _compare_buffers(self, region: str) -> None:
        self.moved = {key for key, count in self.versions.items() if self._may_have_moved(key, count)}
        if self.is_scripted and self.moved:
            raise RematMutation(
                f"{region} changes the buffer {self._name(min(self.moved))} of a scripted module, which the replay "
                "would do again; use the module without torch.jit.script, or put it into evaluation mode"
            )
        self.seen.moved.update(self._name(key) for key in self.moved)
        missing = self.moved - self.clones.keys() if not self.scratch else ()
        if missing:
            raise RematMutation(
                f"{region} changes the buffer {self._name(min(missing))} in its forward, which earlier calls left "
                "alone, so there is no copy for the replay; repeat the step: from now on copies are made"
            )
        current = dict(self.module._buffers.items())
        self.replaced = not self.is_scripted and not same_items(self.buffers, current)
        self.clones = {key: clone for key, clone in self.clones.items() if key in self.moved}
        self.buffers = {
            key: None if b is None or key in self.moved else without_graph(b) for key, b in self.buffers.items()
        }

    def _may_have_moved(self, key: str, count: int) -> bool:
        """Whether the copy is kept. Torch's norms update their running statistics without counting it as a change."""
        buffer, clone = self.buffers[key], self.clones.get(key)
        if version(buffer) != count:
            return True
        if clone is None or not buffer.is_floating_point():
            return False
        if isinstance(self.module, _NormBase) or key.startswith("running_"):
            return True
        if not self.module.training:
            return False
        if buffer.device.type == "cpu" and can_sum(buffer):
            return not torch.equal(buffer, clone)
        return buffer.numel() <= _SMALL  # a comparison would wait for the device

    def check(self, region: str) -> None:
        """Before a replay: what it cannot be given as it was must be as it was."""
        current = _parameters(self.module)
        for key, parameter in self.parameters.items() if not self.is_sharded else ():
            happened = parameter.what_happened(current.get(key))
            if happened:
                raise RematMutation(
                    f"{region}: the parameter {self._name(key)} {happened} between forward and backward; "
                    "run backward before changing parameters"
                )
        if self.scratch:
            return
        for kind, held, counts in (
            ("buffer", self.buffers, self.versions),
            ("tensor", self.attributes, self.tensors),
        ):
            for key, count in counts.items():
                if held.get(key) is not None and version(held[key]) != count:
                    raise RematMutation(
                        f"{region}: the {kind} {self._name(key)} was changed in place between forward and backward; "
                        "run backward first, or give each of the two its own copy"
                    )

    def put_before(self) -> None:
        """Give the module what it held before the forward."""
        now = vars(self.module)
        for key in [key for key in now if key not in self.attributes and key not in _NOT_ATTRIBUTES]:
            del now[key]
        for key, value in self.attributes.items():
            if key in self.contents:
                held, moved = self.contents[key]
                if moved or now.get(key) is not value or not same_items(held, value):
                    now[key] = copied(held)
            elif type(value) in CONTAINERS:  # empty, then
                if now.get(key) is not value or value:
                    now[key] = emptied(value)
            elif now.get(key) is not value or key not in now:
                now[key] = value
        if self.is_scripted:
            return
        current = self.module._buffers
        if self.scratch:
            now["_buffers"] = {key: None if b is None else b.detach().clone() for key, b in current.items()}
        elif self.moved or self.replaced or not same_items(self.buffers, current):
            now["_buffers"] = {
                key: self.clones[key].clone() if key in self.clones else b for key, b in self.buffers.items()
            }

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Its own ones that exist, and exist in full."""
    return {
        key: p for key, p in module._parameters.items() if p is not None and not isinstance(p, UninitializedTensorMixin)
    }


def _shards(module: nn.Module) -> bool:
    """Whether it gathers and frees parameters around its forward (FSDP, FSDP2): they are no fixed objects."""
    return any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__)


class State:
    """What some modules hold now; after `compare`, what a replay needs of it."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], seen: Seen) -> None:
        modules = list(modules)
        sharded = {id(inner) for _, module in modules if _shards(module) for inner in module.modules()}
        self.modules = [_ModuleState(module, path, id(module) in sharded, seen) for path, module in modules]

    def compare(self, region: str) -> None:
        """To be called after the forward. Raises RematMutation where the forward changed what cannot be put back."""
        for module in self.modules:
            module.compare(region)

    def check(self, region: str) -> None:
        """To be called before a replay. Raises RematMutation where something else changed what cannot be put back."""
        for module in self.modules:
            module.check(region)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """The modules hold what they held before the forward, and in the end what they hold now."""
        found = [(vars(module.module), dict(vars(module.module))) for module in self.modules]
        try:
            for module in self.modules:
                module.put_before()
            yield
        finally:
            for now, before in found:
                _put(now, before)


def _put(now: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in [key for key in now if key not in wanted]:
        del now[key]
    for key, value in wanted.items():
        if key not in now or now[key] is not value:
            now[key] = value
