"""Running a function forward and backward, repeatably, and leaving the process as it was."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fused_remat._trace import span

FORWARD, BACKWARD = "forward", "backward"


class Step:
    """One forward of `fn`, then (if `backward`) one backward with a random incoming gradient that is made only once.

    After a run, `device` and `output_address` are those of the returned tensor and of its storage.
    """

    def __init__(self, fn: Callable[[], Tensor], backward: bool):
        if not callable(fn):
            raise TypeError(f"fn must be a function without arguments, got {type(fn).__name__}")
        self.fn = fn
        self.backward = backward
        self.device = torch.device("cpu")
        self.output_address = 0
        self._dout: Tensor | None = None

    def __call__(self) -> None:
        with span(FORWARD):
            output = self.fn()
        self._check(output)
        self.device = output.device
        self.output_address = output.untyped_storage().data_ptr()
        if self.backward:
            dout = self._incoming_gradient(output)
            with span(BACKWARD):
                torch.autograd.backward(output, dout)

    def _check(self, output: Tensor) -> None:
        if not isinstance(output, Tensor):
            raise TypeError(
                f"fn must return one tensor, got {type(output).__name__}; return the loss, or the output alone"
            )
        if self.backward and not output.requires_grad:
            raise ValueError(
                "fn returned a tensor without a graph (requires_grad=False), so there is no backward to measure; "
                "let an input or a parameter require a gradient, or pass backward=False"
            )

    def _incoming_gradient(self, output: Tensor) -> Tensor:
        made = self._dout
        if made is None or (made.shape, made.dtype, made.device) != (output.shape, output.dtype, output.device):
            if output.ndim == 0:
                made = torch.ones((), dtype=output.dtype, device=output.device)
            else:
                generator = torch.Generator(output.device).manual_seed(0)
                made = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
            self._dout = made
        return made


@contextmanager
def left_as_found(*, collect: bool = True) -> Iterator[Callable[[], None]]:
    """Sets every `.grad` aside; restores it, the random generators and the cycle collector at the end.

    Yields `tidy`, which drops the gradients and the reference cycles of the run before. The collector is off in
    between, since it would free tensors at a moment of its own choosing. The leaves are found among Python's objects
    and not through the graph, where reentrant checkpointing hides them. Inside of `found_once` all that is done there.
    `collect`: whether cycles that are garbage already are freed first, which takes tenths of a second; a run that
    allocates nothing can leave them.
    """
    if _outer:
        with torch.random.fork_rng(devices=_cuda_devices()):
            _outer[-1]()
            if collect:
                gc.collect()
            yield _outer[-1]
        return
    with torch._C.DisableTorchFunctionSubclass():
        leaves = [t for t in python_tensors() if t.is_leaf and t.requires_grad]
        found = [leaf.grad for leaf in leaves]

    def tidy() -> None:
        for leaf in leaves:
            leaf.grad = None
        if collect:
            gc.collect(1)

    collecting = gc.isenabled()
    if collect:
        gc.collect()
    gc.disable()
    try:
        with torch.random.fork_rng(devices=_cuda_devices()):
            tidy()
            yield tidy
    finally:
        for leaf, grad in zip(leaves, found, strict=True):
            leaf.grad = grad
        if collecting:
            gc.enable()


_outer: list[Callable[[], None]] = []  # `tidy` of what `found_once` is around


@contextmanager
def found_once() -> Iterator[None]:
    """For many recordings of one model: they share one search for leaves, which looks at every object of the process.

    Gradients stay dropped until the end. So that collecting cycles is cheap in between, the objects of before are left
    out of it, unless somebody else leaves objects out.
    """
    with left_as_found() as tidy:
        freezes = gc.get_freeze_count() == 0
        if freezes:
            gc.freeze()
        _outer.append(tidy)
        try:
            yield
        finally:
            _outer.pop()
            if freezes:
                gc.unfreeze()


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def python_tensors() -> list[Tensor]:
    """Every tensor that a Python object stands for, but for classes with `has_no_values`, whose instances nobody may
    read. `type()`, since `isinstance` would wake lazy module proxies."""
    objects = gc.get_objects()
    kinds = {
        kind
        for kind in set(map(type, objects))
        if issubclass(kind, Tensor) and not getattr(kind, "has_no_values", False)
    }
    return [o for o in objects if type(o) in kinds]


def warm_up(step: Step, runs: int, tidy: Callable[[], None]) -> None:
    """`runs` runs that nobody looks at."""
    for _ in range(runs):
        step()
        tidy()


def time_once(step: Step, tidy: Callable[[], None]) -> float:
    """Seconds of one run, the device's queue empty before and after."""
    _synchronize(step.device)
    start = time.perf_counter()
    step()
    _synchronize(step.device)
    seconds = time.perf_counter() - start
    tidy()
    return seconds


def with_index(device: torch.device) -> torch.device:
    """The allocator names a CUDA device by its index and the CPU without one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_count(name: str, value: int, *, least: int) -> None:
    """Raises TypeError or ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
