"""Follows storages through a run on fake tensors: when each was made, by what, and when the last use of it ended."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fused_remat.ops import memory
from fused_remat.recording import _torch, inside_aten, inside_autograd
from fused_remat.recording.blind import is_blind
from fused_remat.recording.exchange import Fakes
from fused_remat.recording.flop import Counter
from fused_remat.recording.inside_autograd import ADD_ANEW, IN_PLACE, IN_PLACE_INSIDE, Evaluation
from fused_remat.training_step import BACKWARD

_CUDA_ROUNDING = 512
_AS_THEY_ARE = {FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}


@dataclass(eq=False)
class FollowedBlock:
    """A storage, or what one operator needs inside itself for a moment."""

    nbytes: int
    born: int
    module: str
    phase: str
    replay: int  # number of the recomputed forward that made it; 0: none
    died: float = math.inf
    address: int = 0


class Follower(TorchDispatchMode):
    """The blocks on `device` made by what runs inside, on fake tensors. `clock` counts events.

    Real tensors among the arguments (those that a loss function holds) are exchanged for fake ones first.
    """

    def __init__(self, fakes: Fakes, counter: Counter, device: torch.device):
        super().__init__()
        self.blocks: list[FollowedBlock] = []
        self.clock = 0
        self.replay_ends: list[float] = [-1.0]  # by number of the recomputed forward
        self.blind: set[str] = set()  # operators whose inner memory is not known
        self.evaluations: dict[int, tuple[int, int]] = {}  # first and last moment of autograd nodes, by number
        self._fakes, self._counter, self._device = fakes, counter, device
        self._alive: dict[int, FollowedBlock | None] = {}  # by address; None: there from the beginning
        self._watchers: dict[int, weakref.ref] = {}
        self._replaying = False
        self._sum: tuple[FollowedBlock, FollowedBlock] | None = None
        self._detour: Evaluation | None = None

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These tensors are there from the beginning."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._watch(storage)
            self._alive[storage._cdata] = None

    def see(self, real: Tensor) -> None:
        """A real tensor made beside the dispatcher, for the state of a generator."""
        if real.device == self._device:
            phase, module, _ = self._counter.where()
            self.clock += 1
            storage = real.untyped_storage()
            self._watch(storage)
            self._alive[storage._cdata] = self._block(storage.nbytes(), phase, module, storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("prim", "profiler"):
            return func(*args, **(kwargs or {}))
        args, kwargs = self._faked(args), self._faked(kwargs or {})
        out = self._run(func, args, kwargs)
        if self._device.type == "cpu":
            out = inside_aten.with_workspace(func, args, out)
        self._sum = None
        self.clock += 1
        phase, module, replaying = self._counter.add(func, args, kwargs, out)
        if phase == BACKWARD and (sequence := self._counter.outer_sequence) >= 0:
            first, _ = self.evaluations.get(sequence, (self.clock, 0))
            self.evaluations[sequence] = first, self.clock
        self._mark_replay(replaying, phase)
        node = _torch.running_node() if phase == BACKWARD and not replaying else None
        self._cross(node, phase, module)
        if is_blind(func, self._device.type, args):
            self.blind.add(func._schema.name)
        inside = self._inside(func, args, kwargs, out)
        if inside:
            block = self._block(inside, phase, module)
        made = [self._seen(leaf, phase, module) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if self._device.type == "cpu" and made and made[0] is not None:
            made[0].nbytes += inside_aten.held_by_result(func, args)
        if inside:
            self.clock += 1
            block.died = self.clock
        if self._detour is not None:
            self._detour.results.add(out)
        elif phase == BACKWARD and not replaying and made and made[0] is not None:
            name = node[1] if node is not None else ""
            if (func in IN_PLACE and name not in ADD_ANEW) or func is IN_PLACE_INSIDE.get(name):
                self._may_be_in_place(func, args, made[0])
        return out

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = self._fakes.values
        reals = values.compute(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except _torch.DEPENDS_ON_VALUES as error:
            if reals is None:
                phase, module, _ = self._counter.where()
                raise RuntimeError(
                    f"{func} in {phase} of {module or 'the model'} depends on values of tensors, and fake tensors have "
                    "none; record a real step (fake=False)"
                ) from error
            out = tree_map(lambda real: self._fakes.new(real) if isinstance(real, Tensor) else real, reals)
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor) and leaf.constant is not None:
                # A number that torch knows itself; its operators on lists fail on those.
                values.learn(leaf, leaf.constant)
                leaf.constant = None
        if reals is not None:
            values.note(out, reals)
        return out

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        if memory.is_fused(func):
            return memory.transient_bytes(func, args)
        return inside_aten.transient_bytes(func, args, out, kwargs) if self._device.type == "cpu" else 0

    def _faked(self, arguments: Any) -> Any:
        flat = arguments.values() if isinstance(arguments, dict) else arguments
        if all(type(argument) in _AS_THEY_ARE for argument in flat):
            return arguments
        return tree_map(self._fakes.of, arguments)

    def _mark_replay(self, replaying: bool, phase: str) -> None:
        if replaying:
            if not self._replaying:
                self.replay_ends.append(self.clock)
            self.replay_ends[-1] = self.clock + 1
        if phase == BACKWARD:
            self._replaying = replaying

    def finish(self) -> None:
        """After the last operator."""
        self._cross(None, "", "")

    def _cross(self, node: tuple[int, str] | None, phase: str, module: str) -> None:
        """Leaves the node that autograd evaluates otherwise on fake tensors, or enters one: what was seen of it makes
        way for what the real one takes."""
        left = self._detour
        if left is not None and left.node != node:
            self._detour = None
            for block in left.blocks:
                if block.died < math.inf:
                    self.blocks.remove(block)
            inside = self._block(left.taken(), left.phase, left.module)
            inside.born, inside.died = left.first, self.clock
        if node is not None and self._detour is None and node[1] in inside_autograd.DETOURS:
            self._detour = Evaluation(node, self.clock, phase, module)
            if unless := inside_autograd.DETOURS[node[1]].unless:
                self.blind.add(unless)

    def _block(self, nbytes: int, phase: str, module: str, address: int = 0) -> FollowedBlock:
        if self._device.type == "cuda":
            nbytes = -(-nbytes // _CUDA_ROUNDING) * _CUDA_ROUNDING
        replay = len(self.replay_ends) - 1 if self._replaying else 0
        block = FollowedBlock(nbytes, self.clock, module, phase, replay, address=address)
        self.blocks.append(block)
        if self._detour is not None:
            self._detour.blocks.append(block)
        return block

    def _seen(self, tensor: Tensor, phase: str, module: str) -> FollowedBlock | None:
        """The block that this output made; None for a view, an argument, or a tensor elsewhere."""
        if tensor.device != self._device or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._alive:
            block = self._alive[address]
            if block is None or block.nbytes >= nbytes or block.nbytes == nbytes:
                return None
            block.died = self.clock  # resized: a new block, and the old one freed once it is copied
        elif nbytes == 0:
            return None
        else:
            self._watch(storage)
        self._alive[address] = self._block(nbytes, phase, module, address)
        return self._alive[address]

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata

        def freed(_: weakref.ref) -> None:
            self._watchers.pop(address, None)
            block = self._alive.pop(address, None)
            if block is not None:
                self.clock += 1
                block.died = self.clock
                if self._sum is not None and block is self._sum[0]:
                    self._continue(*self._sum)

        self._watchers[address] = weakref.ref(storage, freed)

    def _may_be_in_place(self, func: Any, args: tuple[Any, ...], total: FollowedBlock) -> None:
        """Where gradients meet, autograd adds in place if nobody else holds the first, and where it puts gradients of a
        selection into zeros it writes into those; under a mode it never does.

        Then the first is freed at once, before any other operator runs. A view shares its memory with its base.
        """
        first, second = args[0], args[1]
        if not isinstance(first, FakeTensor) or first._is_view():
            return
        block = self._alive.get(first.untyped_storage()._cdata)
        whole = func is not torch.ops.aten.add.Tensor or (
            isinstance(second, FakeTensor) and first.shape == second.shape
        )
        if block is not None and block.nbytes == total.nbytes and whole:
            self._sum = block, total

    def _continue(self, first: FollowedBlock, total: FollowedBlock) -> None:
        """`total` is no block of its own but `first`, written to."""
        self.blocks.remove(total)
        first.died = math.inf
        first.address = total.address
        self._alive[total.address] = first
        self._sum = None
