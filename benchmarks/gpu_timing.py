"""Time and memory of one operation at the shapes of `gpu_cases`: a process of the GPU check.

`python -m benchmarks.gpu_timing OPERATION FILE`: one JSON object per case is appended to FILE as it is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fused_remat
from benchmarks import roofline
from benchmarks.attention_cases import CoreCase
from benchmarks.cases import OURS, MLPCase
from benchmarks.gpu_cases import FULL, GPU_BACKENDS, TINY
from benchmarks.operation import CHECKPOINT, EAGER, Bar, Case, Forward, Leaves, NotRun, Operation
from benchmarks.parity import Gate, failures
from benchmarks.results import mib
from benchmarks.run import OPERATIONS
from fused_remat.measure import Measurement, Timing, compare_time, measure

ROUNDS = 5
# What is compiled takes most of a minute per case: the widest ones stand for all.
_COMPILED_WIDTH = 4096
_LARGEST_GATE = 2048  # rows, or the length of an attention


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_timing", description=__doc__.splitlines()[0])
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", help="of our calls; by default the one that is chosen")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case is begun after as long")
    options = parser.parse_args(arguments)
    operation, device = OPERATIONS[options.operation], torch.device(options.device)
    if options.backend is None and OURS in operation.providers:
        operation = _with_named_backends(operation)
    start, slowest = time.monotonic(), 0.0
    for case in getattr(TINY if device.type == "cpu" else FULL, operation.name):
        begun = time.monotonic()
        if begun - start + slowest > options.seconds:
            row = {"case": case.name, "skipped": "out of time"}
        else:
            try:
                row = _case(operation, case, device, options.backend)
            except Exception as error:  # one case's trouble, on a smaller GPU say, is not that of the others
                row = {"case": case.name, "skipped": _reason(error)}
            slowest = max(slowest, time.monotonic() - begun)
        with options.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return 0


def _with_named_backends(operation: Operation) -> Operation:
    """Our calls on each backend of a GPU as providers too, beside those on the one that is chosen."""
    ours = operation.providers[OURS]
    named = {f"{OURS}-{backend}": partial(_on_backend, backend, ours) for backend in GPU_BACKENDS}
    limit = operation.error_limits.get(OURS)
    limits = {} if limit is None else dict.fromkeys(named, limit)
    return replace(
        operation, providers={**operation.providers, **named}, error_limits={**operation.error_limits, **limits}
    )


def _on_backend(backend: str, provider: Callable[[Any, Leaves], Forward], case: Case, leaves: Leaves) -> Forward:
    forward = provider(case, leaves)

    def named() -> Tensor:
        with fused_remat.backend(backend):
            return forward()

    return named


def _case(operation: Operation, case: Case, device: torch.device, backend: str | None) -> dict[str, Any]:
    """Parity on a part of the case, then times and bytes of those that passed. A reason for everyone else."""
    start = time.monotonic()
    names = [name for name in operation.providers if _is_for(operation, name, case, device)]
    row: dict[str, Any] = {"case": case.name, **case.config(), "gemm_flop": case.gemm_flop}
    row["floor_h200_ms_modelled"] = 1e3 * roofline.floor_seconds(operation.name, case)
    with fused_remat.backend(backend) if backend else contextlib.nullcontext():
        errors, not_run = _judge(operation, _part(case), device, names)
        leaves = operation.leaves(case, device)
        forwards: dict[str, Forward] = {}
        memory: dict[str, Measurement] = {}
        for name in [name for name in names if name not in not_run]:
            with _noted(name, not_run):
                forward = operation.providers[name](case, leaves)
                memory[name] = measure(forward, repeats=0)
                forwards[name] = forward
        times = compare_time(forwards, rounds=ROUNDS) if forwards else {}
    row["providers"] = {
        name: {**_times(timing, times), **_bytes(memory[name]), "error_to_eager": errors[name]}
        for name, timing in times.items()
    }
    row["not_run"] = not_run
    row["goals"] = [_goal(bar, times) for bar in case.bars]
    row["seconds"] = time.monotonic() - start
    return row


def _is_for(operation: Operation, name: str, case: Case, device: torch.device) -> bool:
    compiled = name in operation.slow_providers
    return not compiled or (device.type == "cuda" and isinstance(case, MLPCase) and case.width == _COMPILED_WIDTH)


def _part(case: Case) -> Case:
    """So much of a case that its float64 truth, whole score matrices included, is cheap."""
    if isinstance(case, MLPCase):
        return replace(case, rows=min(case.rows, _LARGEST_GATE))
    part = replace(case, batch=1, length=min(case.length, _LARGEST_GATE), dropout_p=0.0)
    return replace(part, heads=min(case.heads, 4)) if isinstance(case, CoreCase) else part


def _judge(
    operation: Operation, case: Case, device: torch.device, names: Sequence[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """The largest error of each provider in units of eager's, and why the others do not run: wrong ones among them."""
    leaves, not_run = operation.leaves(case, device), {}
    gate = Gate(lambda leaves: operation.truth(case, leaves), leaves)
    errors = {}
    for name in names:
        with _noted(name, not_run):
            errors[name] = gate.errors(operation.providers[name](case, leaves))
    relative = gate.relative(errors)
    for failure in failures(relative, operation.error_limits):
        not_run.setdefault(failure.provider, f"parity failed: {failure}")
    return {name: max(own.values()) for name, own in relative.items()}, not_run


@contextlib.contextmanager
def _noted(name: str, not_run: dict[str, str]) -> Iterator[None]:
    """Who raises is noted with the reason. One provider's trouble is not that of the others."""
    try:
        yield
    except Exception as error:
        not_run[name] = _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, NotRun):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _times(timing: Timing, times: dict[str, Timing]) -> dict[str, Any]:
    found = {"ms": [1e3 * seconds for seconds in astuple(timing.seconds)]}
    for baseline in (EAGER, CHECKPOINT):
        if baseline in times:
            found[f"time_to_{baseline}"] = timing.ratio_to(times[baseline]).median
    return found


def _goal(bar: Bar, times: dict[str, Timing]) -> dict[str, Any]:
    ran = bar.provider in times and bar.baseline in times
    measured = times[bar.provider].ratio_to(times[bar.baseline]).median if ran else None
    return {"provider": bar.provider, "baseline": bar.baseline, "at_most": bar.most, "measured": measured}


def _bytes(memory: Measurement) -> dict[str, float]:
    return {
        "kept_mib": mib(memory.kept_bytes),
        "forward_peak_mib": mib(memory.forward_peak_above_output_bytes),
        "backward_peak_mib": mib(memory.backward_peak_above_gradients_bytes),
        "gemm_flop": memory.gemm_flop,
    }


if __name__ == "__main__":
    sys.exit(main())
