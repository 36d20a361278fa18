"""Bytes that exist only inside a fused operator, at its worst moment, beside its arguments and results.

No formulas that repeat what the C++ code does: its streaming passes allocate through torch's dispatcher alone, so on
fake tensors they run as they are, with the same plans, tiles and accumulators, and compute nothing. Only the kernels of
level 3 do not run; `_LEVEL3` knows what they allocate.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as _without_fakes
from torch.utils._pytree import tree_leaves

from fused_remat._override import Override

LEVEL2 = (
    "mlp_fwd", "mlp_bwd", "attention_fwd", "attention_bwd", "multi_head_attention_fwd", "multi_head_attention_bwd",
)  # fmt: skip
_BLOCK_ROWS = 128  # that one partial sum of a bias gradient covers, at the least half as many in GPU kernels
_RESHAPING = (torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_)
_ANY_DEVICE = torch._C.DispatchKey.CompositeExplicitAutograd

_known: dict[tuple[Any, ...], int] = {}
_elsewhere = Override()


def is_fused(func: Any) -> bool:
    """Whether `transient_bytes` is about this operator."""
    namespace, _, name = func._schema.name.partition("::")
    return namespace == "fused_remat" and name in LEVEL2


def transient_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Of one call of a fused operator on fake tensors, under the FakeTensorMode they belong to.

    Found once for each combination of shapes, strides, dtypes, devices and settings.
    """
    key = (func, torch.get_num_threads(), _elsewhere.value, *map(_signature, args))
    if key not in _known:
        on_meta = _elsewhere.value or not any(map(_asks_the_device, args))
        # Below autograd, whose work has been done when an operator is called with fake tensors.
        with _without_fakes() if on_meta else nullcontext(), torch._C._AutoDispatchBelowAutograd():
            args = [_on_meta(argument) for argument in args] if on_meta else args
            with _Inside() as inside:
                results = func._op_dk(_ANY_DEVICE, *args)
            _known[key] = inside.peak - inside.level
            del results
    return _known[key]


@contextmanager
def not_on_the_cpu() -> Iterator[None]:
    """Inside, operators on fake CPU tensors count as on a device without the CPU's upcasts of bf16: on one that is not
    there to be asked."""
    with _elsewhere.during(True):
        yield


def is_here() -> bool:
    """Whether what is on the CPU is meant to be there; see `not_on_the_cpu`."""
    return not _elsewhere.value


def _asks_the_device(argument: Any) -> bool:
    """Whether streaming depends on where this tensor is. Where it does not, tensors on "meta" are many times faster."""
    if not isinstance(argument, Tensor):
        return False
    return argument.device.type != "cpu" or argument.dtype in (torch.bfloat16, torch.float16)


def _on_meta(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")


def _signature(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, str(argument.device)
    return tuple(argument) if isinstance(argument, list) else argument


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Tensor | None:
    """The tensor that an operator does nothing to but write its numbers: it makes no other. (On "meta" torch would
    decompose it in Python, for each of many thousand tiles.)"""
    returned = func._schema.returns
    if len(returned) != 1 or returned[0].alias_info is None or not returned[0].alias_info.is_write:
        return None
    if torch.Tag.inplace_view in func.tags or func._overloadpacket in _RESHAPING:
        return None
    given = args[0] if func._schema.name.endswith("_") else (kwargs or {}).get("out")
    return given if isinstance(given, Tensor) else None


class _Inside(TorchDispatchMode):
    """Adds up the storages made inside. `level`: bytes of those alive; `peak`: its highest value."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fused_remat":
            return self._level3(func, args)
        if (written := _written(func, args, kwargs)) is not None:
            return written
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf, args, kwargs)
        return out

    def _level3(self, func: Any, args: tuple[Any, ...]) -> None:
        if func.has_kernel_for_dispatch_key(_ANY_DEVICE):  # composed from ATen
            with self:
                return func._op_dk(_ANY_DEVICE, *args)
        op, _, backend = func._schema.name.removeprefix("fused_remat::").rpartition("_")
        if op in _LEVEL3:
            self.peak = max(self.peak, self.level + _LEVEL3[op](backend, args))
        return None

    def _count(self, made: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        storage = made.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._alive:
            return
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, Tensor) and argument.untyped_storage()._cdata == address:
                return  # a view of what was there

        def freed(_: weakref.ref) -> None:
            del self._alive[address]
            self.level -= nbytes

        self._alive[address] = weakref.ref(storage, freed)
        self.level += nbytes
        self.peak = max(self.peak, self.level)


def _partial_sums(backend: str, sums: list[Tensor], rows: int) -> int:
    blocks = math.ceil(rows / (_BLOCK_ROWS if backend == "cpp" else _BLOCK_ROWS // 2))
    return sum(blocks * t.nbytes for t in sums if t.numel() > 0)


class _Tiles:
    """Tiles of scores of the C++ attention for the CPU, by the budget and the shape alone: as in
    csrc/cpu/attention_problem.{h,cpp}."""

    _QUERIES, _KEYS, _LANES, _MOST_SCRATCH = 128, 256, 64, 4

    def __init__(self, q: Tensor, k: Tensor, value_width: int, scratch: int):
        self.number = 8 if q.dtype == torch.float64 else 4
        self.width, self.value_width, self._scratch = q.shape[3], value_width, scratch
        self.queries = min(max(q.shape[2], 1), self._QUERIES)
        self.keys = min(max(k.shape[2], 1), self._KEYS)
        while 4 * self.number * self.numbers() > 3 * scratch and (self.queries > 1 or self.keys > 1):
            if self.keys > self.queries:
                self.keys = (self.keys + 1) // 2
            else:
                self.queries = (self.queries + 1) // 2

    def numbers(self) -> int:
        """Numbers of the scratch of one thread."""

        def aligned(numbers: int) -> int:
            return math.ceil(numbers / self._LANES) * self._LANES

        by_queries = 2 * self.queries * aligned(self.keys) + aligned(self.queries * self.width)
        by_queries += 2 * aligned(self.queries * self.value_width) + 2 * aligned(self.queries)
        return by_queries + aligned(self.keys * self.width) + aligned(self.keys * self.value_width)

    def bytes(self, tasks: int) -> int:
        """Of the scratch of all threads that share so many tasks."""
        if tasks == 0:
            return 0
        own = self.numbers() * self.number
        return own * max(1, min(self._MOST_SCRATCH * self._scratch // own, tasks, torch.get_num_threads()))


def _attention(backend: str, args: tuple[Any, ...]) -> int:
    """Forward, and delta of backward."""
    if backend != "cpp":
        return 0
    q, k, v, *_ = args
    tiles = _Tiles(q, k, v.shape[3], args[14])
    return tiles.bytes(q.shape[0] * q.shape[1] * math.ceil(q.shape[2] / tiles.queries))


def _attention_bwd(backend: str, args: tuple[Any, ...]) -> int:
    if backend != "cpp":
        return 0
    q, k, v, *_ = args
    tiles = _Tiles(q, k, v.shape[3], args[14])
    dq, dk, dv, *masks = args[-5:]
    pairs, blocks = q.shape[0] * k.shape[1], math.ceil(q.shape[2] / tiles.queries)
    passes = []
    if pairs >= torch.get_num_threads():
        passes.append(pairs if any(t is not None for t in (dq, dk, dv)) else 0)
    else:
        passes.append(pairs * math.ceil(k.shape[2] / tiles.keys) if dk is not None or dv is not None else 0)
        passes.append(q.shape[0] * q.shape[1] * blocks if dq is not None else 0)
    for mask in masks:
        if mask is not None:
            passes.append(mask.shape[0] * mask.shape[1] * (blocks if mask.shape[2] > 1 else 1))
    return max(map(tiles.bytes, passes))


def _attention_weights(backend: str, args: tuple[Any, ...]) -> int:
    if backend != "cpp":
        return 0
    q, k, weights = args[0], args[1], args[-1]
    tiles = _Tiles(q, k, 0, args[13])
    owners = 1 if weights.shape[1] == 1 else q.shape[1]
    return tiles.bytes(q.shape[0] * owners * math.ceil(q.shape[2] / tiles.queries))


# By operator of level 3: the bytes that its kernels allocate themselves, from the backend and the arguments.
_LEVEL3: dict[str, Callable[[str, tuple[Any, ...]], int]] = {
    "mlp_bwd_chunk": lambda backend, args: _partial_sums(backend, list(args[-2:]), args[0].shape[0]),
    "attention_fwd": _attention,
    "attention_delta": _attention,
    "attention_bwd": _attention_bwd,
    "attention_weights": _attention_weights,
    "column_sums": lambda backend, args: _partial_sums(backend, [args[1]], args[0].shape[0]),
}
