"""The parts of the GPU check, each in a process of its own: whatever one of them does, the others and the JSON survive.

A part returns a JSON object with "status" ("done", "failed", "skipped", "timed out") and, where it is not "done", a
"reason" in words.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMED = ("mlp", "attention", "mha")
_TAIL = 4000


@dataclass(frozen=True)
class Settings:
    """`device`: "cuda", or "cpu" in a dry run. `backend`: the one to time, or None for the one that is chosen."""

    device: str
    backend: str | None
    tests: Sequence[str] = ("tests/gpu", "tests/test_measure.py")

    @property
    def dry(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Finished:
    """`status` None: it ran out of time."""

    status: int | None
    output: str
    seconds: float


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Finished:
    """Runs a command with its children for at most that long; output and errors together."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Finished(status, output.read(), time.monotonic() - start)


def build(settings: Settings, seconds: float) -> dict[str, Any]:
    """Compile the libraries at first use, that of the CUDA C++ kernels for the one architecture that is there."""
    code = (
        f"import json; from fused_remat import _extension, ops; ops.ready(); {settings.dry} or _extension.load_cuda(); "
        "found = _extension.status(); "
        "print(json.dumps([[s.loaded, s.origin, str(s.path), s.reason] for s in (found, found.cuda)]))"
    )
    environment = {"MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count())), **_architecture(settings)}
    done = run([sys.executable, "-W", "ignore", "-c", code], seconds, environment)
    if done.status != 0:
        return _unfinished(done)
    own, cuda = (
        {"loaded": s[0], "origin": s[1], "library": s[2], "why_not": s[3]}
        for s in json.loads(done.output.splitlines()[-1])
    )
    found = {**own, "cuda": cuda, "seconds": done.seconds, **_architecture(settings)}
    if not own["loaded"]:
        return {"status": "failed", "reason": own["why_not"], **found}
    return {"status": "done", **found}


def tests(settings: Settings, seconds: float) -> dict[str, Any]:
    """The tests that need a device; without one they skip by name."""
    if not _has("pytest"):
        return {"status": "skipped", "reason": "pytest is not installed"}
    # Without the strictness of the project's own runs: a bare machine may lack the plugins that its settings name.
    options = ["-o", "addopts=", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider", "-W", "default", "--tb=short"]
    # Most of the time is the compiling of kernels, one by one in each process.
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    options += ["-n", str(jobs)] if _has("xdist") and not settings.dry else []
    done = run([sys.executable, "-m", "pytest", *options, *settings.tests], seconds, {"COLUMNS": "300"})
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", done.output)}
    found = {"counts": counts, "seconds": done.seconds}
    found["failures"] = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.output, re.MULTILINE)
    if done.status is None or done.status not in (0, 5):  # 5: nothing was selected
        return {**_unfinished(done), **found}
    return {"status": "done", **found}


def sanitizer(settings: Settings, seconds: float) -> dict[str, Any]:
    """compute-sanitizer's memory and race checks on a few calls."""
    if settings.dry:
        return {"status": "skipped", "reason": "needs a CUDA device"}
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        return {"status": "skipped", "reason": "compute-sanitizer is not on PATH nor in /usr/local/cuda/bin"}
    # Kernels are compiled beforehand, and the caching allocator would hide what lies between its blocks.
    calls = [sys.executable, "-m", "benchmarks.sanitized", settings.backend or ""]
    warm = run(calls, seconds / 3)
    if warm.status != 0:
        return _unfinished(warm)
    left, found = seconds - warm.seconds, {}
    for tool in ("memcheck", "racecheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", *calls]
        done = run(command, left / 2, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        found[tool] = {"status": "done", "seconds": done.seconds} if done.status == 0 else _unfinished(done)
    bad = [tool for tool, result in found.items() if result["status"] != "done"]
    if bad:
        return {"status": "failed", "reason": f"{', '.join(bad)}: see there", **found}
    return {"status": "done", **found}


def timed(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The measurements of one operation: what was done when time ran out is kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        command = [sys.executable, "-m", "benchmarks.gpu_timing", name, str(path), "--seconds", f"{seconds:.0f}"]
        command += ["--device", settings.device, *(["--backend", settings.backend] if settings.backend else [])]
        done = run(command, seconds + 5)
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {"cases": rows, "seconds": done.seconds}
    if done.status != 0:
        return {**_unfinished(done), **found}
    return {"status": "done", **found}


def _unfinished(done: Finished) -> dict[str, Any]:
    if done.status is None:
        return {"status": "timed out", "reason": f"stopped after {done.seconds:.0f} s", "output": done.output[-_TAIL:]}
    reason = f"exit status {done.status}"
    return {"status": "failed", "reason": reason, "output": done.output[-_TAIL:], "seconds": done.seconds}


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _architecture(settings: Settings) -> dict[str, str]:
    """What CUDA sources are compiled for: the architecture of the GPU that is there."""
    if settings.dry:
        return {}
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {"TORCH_CUDA_ARCH_LIST": f"{major}.{minor}{'a' if major >= 9 else ''}"}
