"""What is installed, what is built, and which backend a call would run on this machine, in words or as JSON.

`fused-remat doctor`, or without the command line's optional packages `python -m fused_remat.doctor [--json]`. Creates
no GPU context. Loads the compiled extension, which compiles it where that has not happened yet.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from typing import Any

import torch

import fused_remat
from fused_remat import _build, _extension, budget, dispatch, ops

_OPS = {"mlp": "gelu", "attention": None, "multi_head_attention": None}  # with the activation of the call
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MIB = 2**20


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as JSON values. A key ending in `_error` says in words why its value is missing."""
    gpus, gpu_error = _gpus()
    facts = {
        "fused_remat": fused_remat.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch_built_for_cuda": torch.version.cuda,
        **_triton(),
        "gpus": gpus,
        "gpus_error": gpu_error,
        **_compiler(),
        "extension": _loaded_extension(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": torch.get_num_threads(),
        **_workspace(),
    }
    devices = ["cpu", "cuda"] if gpus and torch.version.cuda else ["cpu"]
    arch = _arch(gpus)
    for op in _OPS:
        facts[op] = {
            f"{name} on {device}": _choice(op, device, dtype, arch if device == "cuda" else None)
            for device in devices
            for name, dtype in _DTYPES.items()
        }
    return facts


def describe(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """`examine`'s facts as (label, one line of text)."""
    cuda = facts["torch_built_for_cuda"]
    lines = [
        ("fused_remat", facts["fused_remat"]),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("torch", f"{facts['torch']}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"),
        ("triton", facts["triton"] or f"none: {facts['triton_error']}"),
        ("GPU", "; ".join(facts["gpus"]) or f"none: {facts['gpus_error']}"),
        ("compiler", facts["compiler"] or f"none: {facts['compiler_error']}"),
        ("extension", _describe_extension(facts["extension"])),
        ("CPU", f"{facts['cpu_capability']}, {facts['cpu_threads']} threads"),
        ("workspace", _describe_workspace(facts)),
    ]
    lines += [(f"{op} {call}", _describe_choice(choice)) for op in _OPS for call, choice in facts[op].items()]
    return lines


def report(*, as_json: bool) -> None:
    """Prints the facts to stdout: one line each, or one JSON object."""
    facts = examine()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    lines = describe(facts)
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label.ljust(width)}  {' '.join(text.split())}")


def _triton() -> dict[str, str | None]:
    try:
        return {"triton": importlib.import_module("triton").__version__, "triton_error": None}
    except ModuleNotFoundError as error:
        return {"triton": None, "triton_error": f"{error.name} is not installed"}
    except Exception as error:  # whatever a broken installation raises is what the user needs to read
        return {"triton": None, "triton_error": f"importing it fails ({type(error).__name__}: {error})"}


def _gpus() -> tuple[list[str], str | None]:
    """One text per GPU, from the driver's own tool: asking torch for a name would create a context."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "no NVIDIA driver (nvidia-smi is not on PATH)"
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi failed ({error})"
    return _parse_gpus(answer), None


def _parse_gpus(answer: str) -> list[str]:
    """The CSV lines of nvidia-smi in words."""
    rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]
    return [
        f"{name} (compute capability {capability}, {memory}, driver {driver})"
        for name, capability, memory, driver in rows
    ]


def _compiler() -> dict[str, str | None]:
    try:
        compiler = _build.find_compiler()
    except _build.BuildUnavailable as error:
        return {"compiler": None, "compiler_error": str(error)}
    return {"compiler": f"{shlex.join(compiler.command)}: {compiler.version}", "compiler_error": None}


def _loaded_extension() -> dict[str, Any]:
    """`_extension.status()` after an attempt to load; the warning of a failure would only repeat its reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ops.ready()
    status = _extension.status()
    return {
        "loaded": status.loaded,
        "origin": status.origin,
        "path": str(status.path) if status.path else None,
        "built_for_torch": status.torch_version,
        "reason": status.reason,
    }


def _describe_extension(extension: dict[str, Any]) -> str:
    if not extension["loaded"]:
        return f"not available: {extension['reason']}"
    note = f"; {extension['reason']}" if extension["reason"] else ""
    return f"loaded, {extension['origin']}, built for torch {extension['built_for_torch']}: {extension['path']}{note}"


def _workspace() -> dict[str, Any]:
    try:
        return {
            "workspace_bytes": {device: budget.resolve(None, device) for device in budget.DEFAULT_BYTES},
            "workspace_from": "FUSED_REMAT_WORKSPACE" if os.environ.get("FUSED_REMAT_WORKSPACE") else "default",
            "workspace_error": None,
        }
    except (TypeError, ValueError) as error:
        return {"workspace_bytes": None, "workspace_from": None, "workspace_error": str(error)}


def _describe_workspace(facts: dict[str, Any]) -> str:
    if facts["workspace_bytes"] is None:
        return f"none: {facts['workspace_error']}"
    sizes = ", ".join(f"{nbytes / _MIB:g} MiB on {device}" for device, nbytes in facts["workspace_bytes"].items())
    return f"{sizes} ({facts['workspace_from']})"


def _arch(gpus: list[str]) -> int | None:
    """Ten times the compute capability of the first GPU, as the driver's tool told it: torch would make a context."""
    told = re.search(r"compute capability (\d+)\.(\d)", gpus[0]) if gpus else None
    return None if told is None else 10 * int(told[1]) + int(told[2])


def _choice(op: str, device: str, dtype: torch.dtype, arch: int | None) -> dict[str, Any]:
    """The backend that a call of `op` would run, and the reasons against those that cannot."""
    call = dispatch.Call(op=op, device=device, dtype=dtype, activation=_OPS[op], arch=arch)
    chosen = dispatch.resolve(call)
    reasons = {name: dispatch.why_not(name, call) for name in dispatch.BACKENDS}
    return {"backend": chosen, "why_not": {name: why for name, why in reasons.items() if why}}


def _describe_choice(choice: dict[str, Any]) -> str:
    """The backend, and the others by their reasons, each reason once."""
    names_by_reasons: dict[str, list[str]] = {}
    for name, reasons in choice["why_not"].items():
        names_by_reasons.setdefault(" and ".join(reasons), []).append(name)
    others = "; ".join(f"not {', '.join(names)}: {reasons}" for reasons, names in names_by_reasons.items())
    return f"{choice['backend']} ({others})" if others else choice["backend"]


def _main(arguments: list[str]) -> None:
    if arguments not in ([], ["--json"]):
        sys.exit("usage: python -m fused_remat.doctor [--json]")
    report(as_json=bool(arguments))


if __name__ == "__main__":
    _main(sys.argv[1:])
