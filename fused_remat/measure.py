"""Bytes, matrix products and seconds of one forward and backward.

Bytes come from the allocator's own events, so they hold for compiled code and for C++ operators alike (tools built on
dispatch modes see nothing inside an operator). Nothing here is modelled: every number was counted or timed in a run.
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat._ledger import Block, blocks_of, levels, peak, total
from fused_remat._step import (
    BACKWARD,
    FORWARD,
    Step,
    check_count,
    left_as_found,
    python_tensors,
    time_once,
    warm_up,
    with_index,
)
from fused_remat._trace import Trace, record


@dataclass(frozen=True)
class Measurement:
    """One forward and backward of a function. Bytes are exact and relative to what was allocated before the call.

    Every block (one allocation, so views count once) made by the run is exactly one of:

    - *output*: the storage of the returned tensor;
    - *kept*: made in forward, alive when `fn` returned, gone once backward has run and the output is dropped: alive
      because backward needed it. Tensors that existed before (parameters, the caller's inputs) are not in it;
    - *gradient*: made in backward, alive at its end, gone once every `.grad` is dropped;
    - *transient*: made and freed within the same phase;
    - *retained*: alive after all of that (a cache, a state that `fn` updates).

    The incoming gradient is made by `measure` beforehand and counted nowhere. CUDA rounds each block up to 512 bytes.
    Tensors that existed before `measure` was called are not counted, and neither is their release: a function that
    frees one of them per call shows a peak that is too high by it.

    Attributes:
        device: whose memory was counted.
        output_bytes, kept_bytes, retained_bytes: sums of the kinds above.
        kept_hook_bytes: what `torch.autograd.graph.saved_tensors_hooks` see: distinct storages saved for backward,
            alive when `fn` returned, neither existing before nor the output. Below `kept_bytes` where something is
            kept out of the hooks' sight (checkpointing, tensors stashed on `ctx`): offloading cannot reach that part.
        forward_peak_bytes: highest sum during forward, of everything.
        forward_peak_above_output_bytes: highest sum during forward, of everything but the output.
        gradient_bytes, backward_peak_bytes: the sum, and the highest sum during backward of everything (kept blocks,
            output and gradients included).
        backward_peak_above_gradients_bytes: highest sum during backward of everything but the output and the gradients.
        forward_gemms, backward_gemms: library matrix products run, recomputed ones included; counted once where nested.
        forward_gemm_flop, backward_gemm_flop: their FLOP, 2 x rows x inner x columns each. Convolutions and the
            products inside fused attention kernels are not library products and are not counted.
        seconds: median over the repeats of forward plus backward, timed apart from all counting; None if not timed.

    The backward fields are None when backward did not run.
    """

    device: str
    output_bytes: int
    kept_bytes: int
    kept_hook_bytes: int
    retained_bytes: int
    forward_peak_bytes: int
    forward_peak_above_output_bytes: int
    forward_gemms: int
    forward_gemm_flop: int
    gradient_bytes: int | None = None
    backward_peak_bytes: int | None = None
    backward_peak_above_gradients_bytes: int | None = None
    backward_gemms: int | None = None
    backward_gemm_flop: int | None = None
    seconds: float | None = None

    @property
    def peak_bytes(self) -> int:
        """The higher of the two peaks."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes or 0)

    @property
    def gemms(self) -> int:
        """Library matrix products of forward and backward together."""
        return self.forward_gemms + (self.backward_gemms or 0)

    @property
    def gemm_flop(self) -> int:
        """FLOP of `gemms`."""
        return self.forward_gemm_flop + (self.backward_gemm_flop or 0)


@dataclass(frozen=True)
class Timeline:
    """Bytes alive over one run, relative to its start: `nbytes[i]` from `seconds[i]` until `seconds[i + 1]`.

    `phases`: start and end, in the same seconds, of "forward" and (if it ran) "backward"; what follows the last phase
    is the release of output and gradients. The clock runs under the profiler: shapes compare, speeds do not.
    """

    seconds: tuple[float, ...]
    nbytes: tuple[int, ...]
    phases: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile of some values (linear interpolation between the sorted values)."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)

        def quantile(q: float) -> float:
            position = q * (len(ordered) - 1)
            below = math.floor(position)
            above = min(below + 1, len(ordered) - 1)
            return ordered[below] + (position - below) * (ordered[above] - ordered[below])

        return cls(quantile(0.5), quantile(0.2), quantile(0.8))


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant in each round of a comparison."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> Spread:
        return Spread.of(self.rounds)

    def ratio_to(self, baseline: Timing) -> Spread:
        """Of the ratios taken within each round; `baseline` comes from the same comparison."""
        return Spread.of(own / base for own, base in zip(self.rounds, baseline.rounds, strict=True))


def measure(
    fn: Callable[[], Tensor],
    *,
    backward: bool = True,
    warmup: int = 1,
    repeats: int = 5,
    device: torch.device | str | None = None,
) -> Measurement:
    """Runs `fn` forward and backward and counts what it kept, its two peaks, its matrix products and its seconds.

    Args:
        fn: takes nothing, returns one tensor: a scalar loss, or an output for which a random incoming gradient is made.
        backward: also run backward from that tensor. False measures the forward as it is (use it for a whole step too).
        warmup: runs before anything is counted, at least 1 (compilation, caches, library workspaces).
        repeats: timed runs; 0 leaves `seconds` None.
        device: whose allocator to read; that of the returned tensor by default.

    Returns:
        A `Measurement`, whose docstring defines each number.

    `fn` runs `warmup + 3 + repeats` times. Afterwards every `.grad` and the random generators are as they were; what
    else `fn` changes (running statistics, optimizer state) stays changed.

    Raises:
        TypeError: `fn` is not callable or does not return a tensor; a count is not an integer.
        ValueError: a count is out of range; `backward` is asked for and the returned tensor has no graph.
        RuntimeError: a profiler is already running.
    """
    step = Step(fn, backward)
    check_count("warmup", warmup, least=1)
    check_count("repeats", repeats, least=0)
    with left_as_found() as tidy:
        warm_up(step, warmup, tidy)
        where = with_index(step.device if device is None else torch.device(device))
        trace = _record(step, where, tidy)
        output_address = step.output_address
        hooked = _hooked_bytes(step)
        seconds = [time_once(step, tidy) for _ in range(repeats)]
    return _account(
        trace,
        output_address,
        device=str(where),
        kept_hook_bytes=hooked,
        seconds=statistics.median(seconds) if seconds else None,
    )


def memory_timeline(
    fn: Callable[[], Tensor], *, backward: bool = True, warmup: int = 1, device: torch.device | str | None = None
) -> Timeline:
    """The bytes alive at every moment of one run of `fn`. Arguments and errors as in `measure`."""
    step = Step(fn, backward)
    check_count("warmup", warmup, least=1)
    with left_as_found() as tidy:
        warm_up(step, warmup, tidy)
        trace = _record(step, with_index(step.device if device is None else torch.device(device)), tidy)
    start = trace.spans[FORWARD][0]
    steps = levels(blocks_of(trace.changes), start)
    return Timeline(
        seconds=(0.0, *((time_ns - start) * 1e-9 for time_ns, _ in steps)),
        nbytes=(0, *(level for _, level in steps)),
        phases={name: ((first - start) * 1e-9, (last - start) * 1e-9) for name, (first, last) in trace.spans.items()},
    )


def compare_time(
    variants: Mapping[str, Callable[[], Tensor]], *, backward: bool = True, rounds: int = 7, warmup: int = 1
) -> dict[str, Timing]:
    """Times several functions against each other, interleaved in one process.

    Each round runs every variant once, in an order that rotates. Ratios are taken within a round (`Timing.ratio_to`),
    so that a change of the machine's load moves numerator and denominator together.

    Args:
        variants: name to function, as for `measure`; at least one.
        backward: time forward plus backward, else forward alone.
        rounds: at least 1.
        warmup: untimed runs of each variant, at least 1.

    Returns:
        For each name, in the order given, its `Timing`.

    Raises: as `measure`, and ValueError when `variants` is empty.
    """
    if not variants:
        raise ValueError("variants is empty; expected at least one name with a function")
    check_count("rounds", rounds, least=1)
    check_count("warmup", warmup, least=1)
    steps = {name: Step(fn, backward) for name, fn in variants.items()}
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with left_as_found() as tidy:
        for step in steps.values():
            warm_up(step, warmup, tidy)
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(time_once(steps[name], tidy))
    return {name: Timing(tuple(seconds[name])) for name in names}


def _account(
    trace: Trace, output_address: int, *, device: str, kept_hook_bytes: int, seconds: float | None
) -> Measurement:
    """Sorts the blocks of the trace into the kinds that `Measurement` defines and adds them up."""
    forward, backward = trace.spans[FORWARD], trace.spans.get(BACKWARD)
    blocks, start = blocks_of(trace.changes), forward[0]
    left = [b for b in blocks if start <= b.born <= forward[1] < b.died]
    output = [b for b in left if b.address == output_address]
    kept = [b for b in left if b not in output and b.died < math.inf]

    def peak_without(apart: list[Block], phase: tuple[int, int]) -> int:
        return peak([b for b in blocks if b not in apart], start, phase)

    measured = dict(
        device=device,
        output_bytes=total(output),
        kept_bytes=total(kept),
        kept_hook_bytes=kept_hook_bytes,
        retained_bytes=total(b for b in blocks if b.born >= start and b.died == math.inf and b not in output),
        forward_peak_bytes=peak_without([], forward),
        forward_peak_above_output_bytes=peak_without(output, forward),
        seconds=seconds,
        **_products(trace, FORWARD),
    )
    if backward is None:
        return Measurement(**measured)
    gradients = [b for b in blocks if backward[0] <= b.born <= backward[1] < b.died < math.inf]
    return Measurement(
        **measured,
        gradient_bytes=total(gradients),
        backward_peak_bytes=peak_without([], backward),
        backward_peak_above_gradients_bytes=peak_without([*output, *gradients], backward),
        **_products(trace, BACKWARD),
    )


def _products(trace: Trace, phase: str) -> dict[str, int]:
    first, last = trace.spans[phase]
    flop = [gemm.flop for gemm in trace.gemms if first <= gemm.time_ns <= last]
    return {f"{phase}_gemms": len(flop), f"{phase}_gemm_flop": sum(flop)}


def _record(step: Step, device: torch.device, tidy: Callable[[], None]) -> Trace:
    """The trace of two runs; what is read from it is the second.

    The first shows the making of the blocks that one run hands on to the next (a module's cache).
    """

    def run() -> None:
        for _ in range(2):
            step()
            tidy()

    return record(run, device)


class _Saved:
    """A tensor saved for backward, for as long as the graph holds it; detached, since a graph that holds it would be a
    cycle."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def _hooked_bytes(step: Step) -> int:
    """`Measurement.kept_hook_bytes`, from one forward whose saved tensors all pass through hooks."""
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        entry = _Saved(tensor.detach())
        saved.add(entry)
        return entry

    existing = python_tensors()
    known = {address for address, _ in map(_storage, existing)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor):
        output = step.fn()
    known.add(_storage(output)[0])
    storages = dict(_storage(entry.tensor) for entry in saved)
    return sum(nbytes for address, nbytes in storages.items() if address not in known)


def _storage(tensor: Tensor) -> tuple[int, int]:
    """(address, bytes) of a tensor's storage; (0, 0) for a tensor without one (sparse, fake, a wrapper subclass)."""
    try:
        storage = tensor.untyped_storage()
        return (0, 0) if storage.device.type == "meta" else (storage.data_ptr(), storage.nbytes())
    except (NotImplementedError, RuntimeError, ValueError):
        return 0, 0
