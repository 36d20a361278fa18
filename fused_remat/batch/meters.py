"""What limits the memory of a trial, and what it used: one meter per way of knowing.

- `Allocator`, on a CUDA device: the caching allocator is capped, so that it fails, defragments and retries exactly as
  on a device of that size.
- `Traced`, elsewhere with a stated limit: the allocator's events of the trial, and everything that lived before.
- `AddressSpace`, on a CPU whose process has one: the operating system refuses, and what is to stay free is taken away
  beforehand.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from fused_remat._ledger import blocks_of, levels
from fused_remat._trace import record
from fused_remat.recording.static import static_storages
from fused_remat.sizes import format_bytes, parse_bytes
from fused_remat.training_step import TrainingStep


@dataclass(frozen=True)
class Use:
    """Bytes at the peak of a trial; None where nobody counted. `over` says, in words, that it was too much."""

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    over: str = ""


@dataclass(frozen=True)
class Meter:
    """`limit` bytes of `source`, of which `margin` stays free; `allowed` is the rest."""

    device: torch.device
    limit: int
    margin: float
    source: str

    @property
    def allowed(self) -> int:
        return int(self.limit * (1 - self.margin))

    def run(self, step: TrainingStep, steps: Callable[[], None]) -> Use:
        """Runs `steps` within what is allowed, or lets the out-of-memory error of its own pass."""
        raise NotImplementedError

    @contextlib.contextmanager
    def capped(self) -> Iterator[None]:
        """While trials run that are only timed."""
        yield

    def count(self, step: TrainingStep, steps: Callable[[], None]) -> Use:
        """The peak of a trial that is known to fit, where `run` does not tell it."""
        raise NotImplementedError

    at_full_speed: ClassVar[bool] = True  # `run` does not slow the step down


@dataclass(frozen=True)
class Allocator(Meter):
    """A CUDA device."""

    @contextlib.contextmanager
    def capped(self) -> Iterator[None]:
        total = torch.cuda.get_device_properties(self.device).total_memory
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.allowed / total), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def run(self, step: TrainingStep, steps: Callable[[], None]) -> Use:
        torch.cuda.reset_peak_memory_stats(self.device)
        with self.capped():
            steps()
        torch.cuda.synchronize(self.device)
        allocated = torch.cuda.max_memory_allocated(self.device)
        return Use(allocated, torch.cuda.max_memory_reserved(self.device))


@dataclass(frozen=True)
class Traced(Meter):
    """Any device whose allocator tells the profiler what it does."""

    at_full_speed: ClassVar[bool] = False

    def run(self, step: TrainingStep, steps: Callable[[], None]) -> Use:
        before = alive_bytes(step, self.device)
        peak = before + _highest(steps, self.device)
        if peak <= self.allowed:
            return Use(peak)
        free = f", less {self.margin:.0%} to stay free" if self.margin else ""
        return Use(peak, over=f"{format_bytes(peak)} at the peak, allowed {format_bytes(self.limit)}{free}")


@dataclass(frozen=True)
class AddressSpace(Meter):
    """RLIMIT_AS of this process."""

    @contextlib.contextmanager
    def capped(self, copies: int = 0) -> Iterator[None]:
        """Holds the margin as pages that nobody touches, so that the steps find the rest.

        `copies`: bytes that a trial keeps to take itself back, which training would not; the steps get them on top,
        from the margin and then from what the hard limit grants.
        """
        import resource

        margin = self.limit - self.allowed
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        ballast = mmap.mmap(-1, margin - copies) if margin > copies else None
        if copies > margin and soft != resource.RLIM_INFINITY:
            wanted = soft + copies - margin
            resource.setrlimit(
                resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            if ballast is not None:
                ballast.close()

    def run(self, step: TrainingStep, steps: Callable[[], None]) -> Use:
        with self.capped(alive_bytes(step, self.device)):
            steps()
        return Use()

    def count(self, step: TrainingStep, steps: Callable[[], None]) -> Use:
        """Counting takes room of its own, which the hard limit may grant; where it does not, nothing is counted."""
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        try:
            return Use(alive_bytes(step, self.device) + _highest(steps, self.device))
        except (RuntimeError, MemoryError):
            return Use()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def meter_for(device: torch.device, limit: int | str | float | None, margin: float) -> Meter:
    """The meter of `device`.

    Raises:
        TypeError, ValueError: `limit` is no size.
        ValueError: no limit is given and `device` has none of its own.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if limit is not None:
            return Allocator(device, parse_bytes("limit", limit, whole=total), margin, "as given")
        ours = torch.cuda.memory_reserved(device)
        return Allocator(device, free + ours, margin, f"free on {torch.cuda.get_device_name(device)}")
    if limit is not None:
        return Traced(device, parse_bytes("limit", limit), margin, "as given")
    space = _address_space() if device.type == "cpu" else None
    if space is None:
        raise ValueError(
            f"limit is needed on device {device}, which has no limit of its own that a batch could safely run into; "
            'say how much memory the training may take, e.g. limit="6GiB"'
        )
    return AddressSpace(device, space, margin, "address space of this process (RLIMIT_AS)")


def _address_space() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def alive_bytes(step: TrainingStep, device: torch.device) -> int:
    """Bytes of the distinct storages of weights, buffers, optimizer state and inputs on `device`."""
    return sum(nbytes for _, nbytes in static_storages(step, device).values())


def _highest(steps: Callable[[], None], device: torch.device) -> int:
    """The highest sum of bytes allocated on `device` while `steps` run."""
    trace = record(steps, device)
    return max((level for _, level in levels(blocks_of(trace.changes), 0)), default=0)
