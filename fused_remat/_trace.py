"""What torch's profiler saw of a run, as plain records.

The one place that reads the profiler's event tree (`experimental_event_tree`, which torch does not promise to keep);
everything above works on `Trace` alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._C._profiler import _EventType, _ProfilerEvent, _TensorMetadata
from torch.autograd.profiler import profile, record_function

# Library products: positions of the two factors, and the number of arguments of the variant that returns a new tensor
# (None where telling it apart does not matter). The profiler shows out-variants and overloads under the same name.
_PRODUCTS: dict[str, tuple[int, int, int | None]] = {
    "aten::mm": (0, 1, 2),
    "aten::addmm": (1, 2, 5),
    "aten::addmm_": (1, 2, None),
    "aten::_addmm_activation": (1, 2, 6),
    "aten::_scaled_mm": (0, 1, None),
    "aten::bmm": (0, 1, 2),
    "aten::baddbmm": (1, 2, 5),
    "aten::baddbmm_": (1, 2, None),
    "aten::mv": (0, 1, 2),
    "aten::addmv": (1, 2, 5),
}
# Operators of the attention core: their products are no library products, as those inside torch's own kernels are not.
_CORE = "fused_remat::attention"

_SPAN = "fused_remat.measure/"
_NODE = "autograd::engine::evaluate_function: "

# Severity above every message of Kineto, which otherwise prints profiler_start / profiler_stop lines to stderr.
_KINETO_SILENT = "6"


@dataclass(frozen=True)
class Change:
    """One event of the allocator: `nbytes` > 0 made a block at `address`, `nbytes` < 0 freed it."""

    time_ns: int
    address: int
    nbytes: int


@dataclass(frozen=True)
class Gemm:
    """One matrix product of torch's GEMM library interface; `flop` = 2 x rows x inner x columns (x batch)."""

    time_ns: int
    name: str
    flop: int


@dataclass(frozen=True)
class Node:
    """The evaluation of one autograd node, the accumulation of its results included.

    `sequence`: the number that autograd gave the node when forward made it; -1 for the nodes that end in a leaf.
    `depth`: in how many other evaluations it lies (reentrant checkpointing runs a backward in a backward).
    `replay`: first and last ns of the operators in it that recorded a graph, those of a recomputed forward; or None.
    """

    first_ns: int
    last_ns: int
    sequence: int
    depth: int
    replay: tuple[int, int] | None = None


@dataclass(frozen=True)
class Trace:
    """Everything in time order. `spans`: first and last ns of each `span(name)`; a repeated name keeps the last."""

    changes: list[Change] = field(default_factory=list)
    gemms: list[Gemm] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)


def span(name: str) -> record_function:
    """Context manager that names a stretch of the run, found again in `Trace.spans`."""
    return record_function(f"{_SPAN}{name}")


def record(run: Callable[[], None], device: torch.device) -> Trace:
    """Runs `run` under the profiler and returns what was allocated and freed on `device`, and every GEMM on any device.

    Memory taken inside a parallel region of a C++ kernel (OpenMP workers) is not reported: kernels take their workspace
    outside.

    Raises:
        RuntimeError: when a profiler is already running (torch allows one at a time).
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("measuring needs torch's profiler, and one is already running; measure outside of it")
    with _quiet_kineto(), profile(use_kineto=True, profile_memory=True, record_shapes=True) as profiler:
        run()
    trace = Trace()
    tree = profiler.kineto_results.experimental_event_tree()
    for event in _walk(tree):
        _add(trace, event, device)
    for event in tree:
        trace.nodes.extend(_nodes(event, depth=0))
    trace.changes.sort(key=lambda change: change.time_ns)
    trace.gemms.sort(key=lambda gemm: gemm.time_ns)
    trace.nodes.sort(key=lambda node: node.first_ns)
    return trace


def _nodes(root: _ProfilerEvent, depth: int) -> Iterator[Node]:
    """The evaluations of autograd nodes in the tree below `root`."""
    stack = [(root, depth)]
    while stack:
        event, depth = stack.pop()
        if event.name.startswith(_NODE):
            replay = list(_replayed(event))
            yield Node(
                event.start_time_ns,
                event.end_time_ns,
                event.typed[1].sequence_number,
                depth,
                (replay[0].start_time_ns, replay[-1].end_time_ns) if replay else None,
            )
            depth += 1
        stack.extend((child, depth) for child in event.children)


def _replayed(node: _ProfilerEvent) -> Iterator[_ProfilerEvent]:
    """The outermost operators in the evaluation of a node, but not of a node inside it, that recorded a graph."""
    for child in _operators(node):
        own = child.name == node.name.removeprefix(_NODE)
        if own:
            yield from _replayed(child) if child.children else ()
        elif not child.name.startswith(_NODE) and child.typed[1].sequence_number >= 0:
            yield child


def _operators(event: _ProfilerEvent) -> Iterator[_ProfilerEvent]:
    """The operators right below `event`, through what is no operator (spans, calls of Python functions)."""
    stack = list(reversed(event.children))
    while stack:
        child = stack.pop()
        if child.typed[0] == _EventType.TorchOp and not child.name.startswith(_SPAN):
            yield child
        else:
            stack.extend(reversed(child.children))


def _add(trace: Trace, event: _ProfilerEvent, device: torch.device) -> None:
    kind, fields = event.typed
    if kind == _EventType.Allocation:
        if fields.device == device:
            trace.changes.append(Change(event.start_time_ns, fields.ptr, fields.alloc_size))
    elif kind == _EventType.TorchOp:
        if event.name in _PRODUCTS:
            if _was_computed(event):
                trace.gemms.append(Gemm(event.start_time_ns, event.name, _gemm_flop(event.name, fields.inputs)))
        elif event.name.startswith(_SPAN):
            trace.spans[event.name.removeprefix(_SPAN)] = (event.start_time_ns, event.end_time_ns)


def _walk(roots: list[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    """Depth first, in time order within a thread; of what lies inside a GEMM or attention only the allocations."""
    stack = [(event, False) for event in reversed(roots)]
    while stack:
        event, inside = stack.pop()
        kind = event.typed[0]
        if not inside or kind == _EventType.Allocation:
            yield event
        inside = inside or (kind == _EventType.TorchOp and (event.name in _PRODUCTS or event.name.startswith(_CORE)))
        stack.extend((child, inside) for child in reversed(event.children))


def _was_computed(event: _ProfilerEvent) -> bool:
    """False for a product that returns a new tensor and yet allocated nothing: it was stopped before it ran.

    Non-reentrant checkpointing ends its replay by an exception inside the operator that saves the last tensor.
    """
    returns_new = len(event.extra_fields.inputs) == _PRODUCTS[event.name][2]
    return not returns_new or any(inner.typed[0] == _EventType.Allocation for inner in _walk(event.children))


def _gemm_flop(name: str, inputs: list) -> int:
    left, right = (inputs[position] for position in _PRODUCTS[name][:2])
    assert isinstance(left, _TensorMetadata) and isinstance(right, _TensorMetadata), (name, inputs)
    columns = right.sizes[-1] if len(right.sizes) > 1 else 1
    return 2 * math.prod(left.sizes) * columns


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto reads its log level from the environment when it first starts; a level that the user has set stays."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = _KINETO_SILENT
    try:
        yield
    finally:
        del os.environ[name]
