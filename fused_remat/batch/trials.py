"""One trial of a batch size: whole optimizer steps from clean, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fused_remat._about import about_step
from fused_remat._machine import machine_bytes_free
from fused_remat._out_of_memory import RanOut, clean, in_words, is_out_of_memory, unless_out_of_memory
from fused_remat._snapshot import RandomStates
from fused_remat.batch.inputs import MakeBatch, Rows, arguments, shapes_of
from fused_remat.batch.meters import Meter, Traced, Use, alive_bytes
from fused_remat.batch.search import Stage, Trial
from fused_remat.sizes import format_bytes
from fused_remat.training_step import TrainingStep, left_untouched, make_step

_ONE_ROW = "Expected more than 1 value per channel"  # what batch norm says of a single row


class TrialError(RuntimeError):
    """A step failed, and not for want of memory. The cause is `__cause__`; `size` and `policy` say where."""

    def __init__(self, size: int, policy: str, error: BaseException):
        super().__init__(
            f"the step with batch size {size} (policy: {policy}) failed, and not for want of memory: {in_words(error)}"
            + ("; pass smallest=2" if size == 1 and _ONE_ROW in str(error) else "")
        )
        self.size, self.policy = size, policy


@dataclass
class Trials:
    """The trials of one policy on `model`, which follows it already."""

    model: nn.Module
    make_batch: MakeBatch
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: Any
    steps: int
    meter: Meter
    policy: str
    progress: Callable[[str, Stage, int, Trial | None], None] | None = None
    rows: Rows = field(default_factory=Rows)

    def __post_init__(self) -> None:
        self._random = RandomStates()
        self._peaks: dict[int, int] = {}
        self.about: dict[str, Any] | None = None  # the first step that was tried, and its size

    def __call__(self, size: int, stage: Stage) -> Trial:
        """Tries `size`. Everything but the numbers is as before: weights, optimizer, buffers, random states.

        Raises:
            TrialError: the step fails for another reason than memory.
            TypeError, ValueError: as `make_step`; `make_batch` returned no tensors.
        """
        if self.progress is not None:
            self.progress(self.policy, stage, size, None)
        found = unless_out_of_memory(lambda: self._tried(size, stage), self.meter.device)
        trial = Trial(size, stage, "out of memory", detail=found.error) if isinstance(found, RanOut) else found
        clean(self.meter.device)
        if self.progress is not None:
            self.progress(self.policy, stage, size, trial)
        return trial

    def _tried(self, size: int, stage: Stage) -> Trial:
        refused = self._why_unsafe(size)
        if refused:
            return Trial(size, stage, "not run", detail=refused)
        args, kwargs = self._batch(size)
        rows = self.rows.missing(size, shapes_of(args, kwargs))
        if rows is not None:
            return Trial(size, stage, "data ended", rows=rows, detail=f"make_batch({size}) returned {rows} rows")
        step = make_step(self.model, args, kwargs, loss=self.loss, optimizer=self.optimizer)
        if self.about is None:
            self.about = {**about_step(step, self.meter.device), "batch": size}
        use, seconds = self._run(step, size, self.meter.run)
        if use.peak_bytes is not None:
            self._peaks[size] = use.peak_bytes
        if use.over:
            return Trial(size, stage, "over the limit", use.peak_bytes, use.reserved_bytes, detail=use.over)
        if stage in ("grow", "narrow"):
            return Trial(size, stage, "ran", use.peak_bytes, use.reserved_bytes)
        if not self.meter.at_full_speed:
            _, seconds = self._run(step, size, _only_run)
        if use.peak_bytes is None:
            use, _ = self._run(step, size, self.meter.count)
        return Trial(size, stage, "ran", use.peak_bytes, use.reserved_bytes, statistics.median(seconds[1:]))

    def _batch(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch of that size: the same at every trial, as far as torch, Python and NumPy draw it."""
        self._random.restore()
        try:
            batch = self.make_batch(size)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise TrialError(size, self.policy, error) from error
        finally:
            self._random.restore()
        return arguments(batch, size)

    def _run(
        self, step: TrainingStep, size: int, run: Callable[[TrainingStep, Callable[[], None]], Use]
    ) -> tuple[Use, list[float]]:
        """What `run` says of the steps, from clean, and the seconds of each."""
        seconds: list[float] = []

        def steps() -> None:
            for _ in range(self.steps):
                start = time.perf_counter()
                step.run()
                if self.meter.device.type == "cuda":
                    torch.cuda.synchronize(self.meter.device)
                seconds.append(time.perf_counter() - start)

        clean(self.meter.device)
        with left_untouched(step):
            try:
                use = run(step, steps)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise TrialError(size, self.policy, error) from error
            finally:
                step.zero_grad()
        return use, seconds

    def _why_unsafe(self, size: int) -> str:
        """Why a step of that size may take more than the machine has, by the line through the last two peaks.

        A capped allocator and an address space end such a step with an error; without one the machine would swap, or
        its kernel end a process.
        """
        if not isinstance(self.meter, Traced) or not self._peaks or size <= max(self._peaks):
            return ""
        static = alive_bytes(make_step(self.model, ()), self.meter.device)
        (before, low), (last, high) = sorted([(0, static), *self._peaks.items()])[-2:]
        predicted = high + (high - low) * (size - last) // (last - before)
        free = machine_bytes_free()
        if free is None or predicted - static <= free:
            return ""
        return (
            f"it would take about {format_bytes(predicted - static)} more (predicted from smaller batches), and the "
            f"machine has {format_bytes(free)} free"
        )


def _only_run(step: TrainingStep, steps: Callable[[], None]) -> Use:
    steps()
    return Use()


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Lets `gc.collect` look at what is made inside alone: it runs several times per trial, and a process that
    imported torch has a million older objects."""
    gc.collect()
    frozen_before = gc.get_freeze_count()
    if not frozen_before:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()
