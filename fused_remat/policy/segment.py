"""Several consecutive blocks of a chain as one recomputed region, whatever code loops over them.

The first block of the segment, when it is called, runs all of them inside one region. It hands its caller a *ticket*
in the place of its own output: a tensor of the right shape without values. The caller's loop hands the ticket to the
next block, which sees that it was made for it and that its other arguments are those with which it was run, and hands
out the next ticket; the last block returns the result. Whatever else is done to a ticket raises `SegmentError`: what
lies inside a segment is not there to be read, and never silently something else.

Where the blocks must be seen one by one (hooks on one of them, a cache, a compiler), each is a region of its own; also
where another argument is an object that the loop might change unseen. Lists and dicts are compared when passed on.

What cannot be seen: state that the loop changes between two blocks and that these read without being passed it (a
global, an attribute of a module). Random numbers that the loop draws in between come after those of all blocks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from fused_remat import last_calls
from fused_remat.convert.rebind import Record, records_of
from fused_remat.guards._torch import why_not_replayed
from fused_remat.plain import why_watched
from fused_remat.policy.others import Note
from fused_remat.policy.region import has_cache, recompute, run_alone, run_body


class SegmentError(RuntimeError):
    """A segment of blocks was not run one after the other on the same other arguments, or read in between."""


class _Running(threading.local):
    """The segment whose region this thread is in."""

    segment: Segment | None = None


_running = _Running()


@dataclass(frozen=True, eq=False)
class Segment:
    """The blocks of one region, in the order in which they run. Copies and pickles of a model have their own."""

    paths: tuple[str, ...]
    members: list[nn.Module] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.paths[0]} ... {self.paths[-1]}"

    def whole(self) -> nn.ModuleList:
        """Its blocks as one module, the same one for as long as the segment lives."""
        if "_whole" not in vars(self):
            vars(self)["_whole"] = nn.ModuleList(self.members)
        whole = vars(self)["_whole"]
        whole.training = self.members[0].training
        return whole

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_whole"}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For the time that the region calls its blocks."""
        outer, _running.segment = _running.segment, self
        try:
            yield
        finally:
            _running.segment = outer


@dataclass(frozen=True)
class SegmentPart:
    """The record of one block of a segment."""

    segment: Segment
    index: int
    names: tuple[str, ...]  # of the arguments of its forward
    inner: Record | None = None
    verify: str = "off"
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "region"
    takes_norm: ClassVar[bool] = False

    @property
    def path(self) -> str:
        return self.segment.paths[self.index]

    def describe(self) -> str:
        mine = f"recomputed region of {len(self.segment.paths)} blocks, {self.segment.name}"
        return "; ".join(filter(None, [mine, self.inner and self.inner.describe()]))

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        if _running.segment is self.segment:
            return run_body(layer, self.inner, *args, **kwargs)
        call = _Call.of(self.names, args, kwargs)
        if isinstance(call.stream, Ticket) and call.stream.run.segment is self.segment:
            last_calls.note_fused(layer)
            return _redeem(self, call)
        if self.index == 0 and isinstance(call.stream, Tensor) and _can_join(self, layer, args, kwargs):
            notes = call.notes()
            if notes is not None:
                last_calls.note_fused(layer)
                return _start(self, call, notes)
        return run_alone(layer, self, args, kwargs)


@dataclass(frozen=True)
class _Call:
    """Arguments of a block: its stream, which is the first of them, and the others."""

    slot: int | str  # the position or name of the stream; -1 if there are no arguments
    stream: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """`names`: of the arguments of the block's forward."""
        if args:
            return cls(0, args[0], args, kwargs)
        slot = names[0] if names and names[0] in kwargs else -1
        return cls(slot, kwargs.get(slot), args, kwargs)

    def arguments(self, stream: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """These arguments with another stream."""
        if isinstance(self.slot, str):
            return self.args, {**self.kwargs, self.slot: stream}
        return (stream, *self.args[1:]), self.kwargs

    def notes(self) -> dict[str, Note] | None:
        """Of the other arguments as they are now; None where one of them might change unseen."""
        try:
            return {what: Note(value) for what, value in self._others()}
        except TypeError:
            return None

    def differs(self, notes: dict[str, Note]) -> str | None:
        """How the other arguments differ from what was noted; None if they do not."""
        others = dict(self._others())
        if others.keys() != notes.keys():
            return "other arguments are given"
        found = ((what, notes[what].changed(value)) for what, value in others.items())
        return next((f"{what}{how}" for what, how in found if how), None)

    def _others(self) -> Iterator[tuple[str, Any]]:
        yield from ((f"argument {i}", value) for i, value in enumerate(self.args) if i != self.slot)
        yield from ((f"argument {name!r}", value) for name, value in self.kwargs.items() if name != self.slot)


@dataclass(frozen=True)
class _Run:
    """One run of a segment: what it was called with, its result, and of each block the form of its output."""

    segment: Segment
    call: _Call
    result: Tensor
    streams: list[tuple[torch.Size, torch.dtype, torch.device, bool]]  # of each block's stream; whether it has a graph
    rests: tuple[tuple[Any, ...] | None, ...]  # of each block: what follows the stream in a tuple; None: no tuple
    notes: dict[str, Note]  # of the other arguments, before the run

    def output(self, index: int) -> Any:
        """What the caller of block `index` gets."""
        last = index == len(self.segment.members) - 1
        stream = self.result if last else _ticket(self, index)
        rest = self.rests[index]
        return stream if rest is None else (stream, *rest)


def _can_join(part: SegmentPart, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the blocks may run as one region now."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if why_not_replayed() is not None:
        return False
    members = part.segment.members
    if members[0] is not layer or why_watched() is not None:
        return False
    for index, member in enumerate(members):
        record = records_of(member).get("forward")
        if not isinstance(record, SegmentPart) or record.segment is not part.segment or record.index != index:
            return False
        if not _is_called_as_it_is(member):
            return False
    return not has_cache(part.names, args, kwargs)


def _is_called_as_it_is(member: nn.Module) -> bool:
    """Whether calling `member` does nothing but run its forward: nobody looks at what goes in or comes out."""
    hooks = [*member._forward_hooks.values(), *member._forward_pre_hooks.values()]
    if any(not _is_idle(hook) for hook in hooks) or member._backward_hooks or member._backward_pre_hooks:
        return False
    return "forward" not in vars(member) and member._compiled_call_impl is None


def _is_idle(hook: Callable[..., Any]) -> bool:
    """Whether `hook` is one that transformers leaves on a block and that collects no outputs now."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing" and (
        collector is not None and not collector.get()
    )


def _start(part: SegmentPart, call: _Call, notes: dict[str, Note]) -> Any:
    """Runs the whole segment; what the caller of its first block gets."""
    segment, streams = part.segment, []

    def blocks(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Any, ...]]:
        inside, rests = _Call.of(part.names, args, kwargs), []
        stream, seen = inside.stream, []
        with segment.running():
            for path, member in zip(segment.paths, segment.members, strict=True):
                args, kwargs = inside.arguments(stream)
                output = member(*args, **kwargs) if rests else run_body(member, part.inner, *args, **kwargs)
                stream, rest = _taken_apart(path, output)
                rests.append(rest)
                seen.append((stream.shape, stream.dtype, stream.device, stream.requires_grad))
        streams[:] = seen
        return stream, tuple(rests)

    result, rests = recompute(
        blocks, call.args, call.kwargs, name=segment.name, verify=part.verify, module=segment.whole()
    )
    return _Run(segment, call, result, streams, rests, notes).output(0)


def _taken_apart(path: str, output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """The stream of a block's output, and what else is in it."""
    if isinstance(output, Tensor):
        return output, None
    if type(output) is tuple and output and isinstance(output[0], Tensor):
        return output[0], output[1:]
    raise SegmentError(
        f"{path} returned a {type(output).__name__}; blocks of one region return a tensor, or a tuple that begins with "
        f"one. Make each block a region of its own"
    )


def _redeem(part: SegmentPart, call: _Call) -> Any:
    """What the caller of a later block gets, which was run already."""
    ticket: Ticket = call.stream
    run = ticket.run
    if ticket.index + 1 != part.index:
        raise SegmentError(
            f"{part.path} was handed the output of {run.segment.paths[ticket.index]}, but {run.segment.name} run as "
            "one region, each block on the output of the one before. Make each block a region of its own where some "
            "are passed over or repeated"
        )
    difference = call.differs(run.notes) if call.slot == run.call.slot else "other arguments are given"
    if difference is not None:
        raise SegmentError(
            f"{run.segment.name} run as one region, on the arguments of {run.segment.paths[0]}; for {part.path} "
            f"{difference}. Make each block a region of its own where their arguments differ"
        )
    return run.output(part.index)


class Ticket(Tensor):
    """[...] the shape of a block's output inside a segment, without its values; see the head of this file."""

    has_no_values: ClassVar[bool] = True  # for `fused_remat._step.python_tensors`
    run: _Run
    index: int  # of the block whose output it stands for

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _was_read(args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _was_read(args, kwargs)

    def __repr__(self) -> str:
        return f"Ticket({tuple(self.shape)}, for the output of {self.run.segment.paths[self.index]})"


def _was_read(args: Any, kwargs: Any) -> SegmentError:
    leaves = _pytree.tree_leaves((args, kwargs))
    ticket = next((leaf for leaf in leaves if isinstance(leaf, Ticket)), None)
    if ticket is None:
        return SegmentError("an output inside a region of several blocks was read, and none is kept")
    segment = ticket.run.segment
    return SegmentError(
        f"the output of {segment.paths[ticket.index]} was read, but {segment.name} run as one region, and nothing "
        "inside it is kept. To read it (hidden states, an exit before the last block), make each block a region of "
        "its own, or register a forward hook on the block: while there is one, each block is a region of its own"
    )


def _ticket(run: _Run, index: int) -> Ticket:
    shape, dtype, device, has_graph = run.streams[index]
    ticket = Tensor._make_wrapper_subclass(Ticket, shape, dtype=dtype, device=device, requires_grad=has_graph)
    ticket.run, ticket.index = run, index
    return ticket


# What a ticket can tell.
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cpu", "is_cuda",
               "is_meta", "is_nested", "is_sparse", "is_quantized", "itemsize", "nbytes")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "element_size",
            "get_device", "__len__")  # fmt: skip
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
