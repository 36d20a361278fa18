"""`python -m benchmarks.gpu_check`: build, test, sanitise and time everything on the GPU that is there.

Writes one JSON and prints a short table last. Nothing is fetched; what is missing on the machine is skipped, and the
JSON says why. Exit status: 0 every part is done or skipped, 1 a part failed or ran out of time, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_parts
from benchmarks.cases import OURS
from benchmarks.gpu_cases import GPU_BACKENDS
from benchmarks.gpu_parts import Settings
from benchmarks.operation import CHECKPOINT, EAGER
from benchmarks.results import environment
from benchmarks.table import show

# In the order in which they run, with the most seconds of each: together, eight minutes less what starting them takes.
PARTS = {"build": 120, "tests": 130, "mlp": 65, "attention": 65, "mha": 30, "sanitizer": 50}
DEFAULT_SECONDS = 460
_LEAST_SECONDS = 5

_HEADERS = (
    ("", "case"),
    ("eager", "ms"),
    ("ours", "ms"),
    *((backend, "ms") for backend in GPU_BACKENDS),
    ("x", "eager"),
    ("x check-", "point"),
    ("floor", "modelled"),
    ("kept", "eager"),
    ("MiB", "ours"),
    ("peak", "eager"),
    ("MiB", "ours"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no usable CUDA device; --dry-run tries everything on the CPU with tiny shapes")
    settings = Settings("cpu" if options.dry_run else "cuda", options.backend, options.tests or Settings.tests)
    result: dict[str, Any] = {
        "dry_run": options.dry_run,
        "environment": environment(torch.device(settings.device)),
        "seconds_allowed": options.seconds,
        "parts": {},
    }
    start = time.monotonic()
    for name in options.part or PARTS:
        left = options.seconds - (time.monotonic() - start)
        print(f"{name}: begins after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        result["parts"][name] = _part(name, settings, min(left, max(PARTS[name], options.seconds * _share(name))))
        result["seconds"] = time.monotonic() - start
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    _print(result, options.out)
    return int(any(part["status"] in ("failed", "timed out") for part in result["parts"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, help="only these, in this order")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="what does not fit is skipped")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the JSON (default gpu-check.json)")
    parser.add_argument("--backend", help="of the timed calls; by default the one that is chosen")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests (default: those with tests for a GPU)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny shapes")
    return parser


def _share(name: str) -> float:
    """A part's share of the default time, for those who allow more."""
    return PARTS[name] / sum(PARTS.values())


def _part(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
    if seconds < _LEAST_SECONDS:
        return {"status": "skipped", "reason": "out of time"}
    try:
        if name in gpu_parts.TIMED:
            return gpu_parts.timed(name, settings, seconds)
        return getattr(gpu_parts, name)(settings, seconds)
    except Exception as error:  # the JSON must be written whatever happens
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def _print(result: dict[str, Any], path: Path) -> None:
    """Who did what, and the times: short, since the JSON has everything."""
    for name, part in result["parts"].items():
        print(f"{name}: {part['status']}" + (f", {part['reason']}" if "reason" in part else _summary(part)))
        for failure in part.get("failures", []):
            print(f"  {failure}")
        if not part.get("cuda", {}).get("loaded", True):
            print(f"  CUDA C++ kernels: {part['cuda']['why_not']}")
    for name in gpu_parts.TIMED:
        lines = list(_lines(result["parts"].get(name, {}).get("cases", [])))
        if lines:
            show(f"{name}: forward + backward", _HEADERS, lines)
        for case in result["parts"].get(name, {}).get("cases", []):
            for goal in case.get("goals", []):
                print(f"  {case['case']}: {_goal(goal)}")
    print(f"{result['seconds']:.0f} s; everything is in {path}")


def _goal(goal: dict[str, Any]) -> str:
    measured = "not measured" if goal["measured"] is None else f"measured {goal['measured']:.2f}"
    return f"{goal['provider']} in at most {goal['at_most']:.2f} x the time of {goal['baseline']}; {measured}"


def _summary(part: dict[str, Any]) -> str:
    counts = ", ".join(f"{n} {word}" for word, n in part.get("counts", {}).items())
    cases = f"{len(part['cases'])} cases" if "cases" in part else ""
    text = counts or cases
    return f", {text}" if text else ""


def _lines(cases: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for case in cases:
        eager, ours = (case.get("providers", {}).get(name) for name in (EAGER, OURS))
        if ours is None:
            why = case.get("skipped") or case.get("not_run", {}).get(OURS, "not run")
            yield [f"{case['case']}: {why}", *[""] * (len(_HEADERS) - 1)]
            continue
        yield [
            case["case"],
            _number(eager and eager["ms"][0]),
            _number(ours["ms"][0]),
            *(_number(own and own["ms"][0]) for own in _named_backends(case)),
            _number(ours.get(f"time_to_{EAGER}")),
            _number(ours.get(f"time_to_{CHECKPOINT}")),
            _number(case["floor_h200_ms_modelled"]),
            *(_number(who and who[what]) for what in ("kept_mib", "backward_peak_mib") for who in (eager, ours)),
        ]


def _named_backends(case: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
    return (case["providers"].get(f"{OURS}-{backend}") for backend in GPU_BACKENDS)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
