"""What is installed, what is built, and which backend a call would run on this machine, in words or as JSON.

`fused-remat doctor`, or without the command line's optional packages `python -m fused_remat.doctor`; `--json`,
`--build`. Creates no GPU context. Loads the compiled extension, which compiles it where that has not happened yet; the
one for CUDA is compiled where there is a GPU, or with `--build`.
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
from dataclasses import replace
from typing import Any

import torch

import fused_remat
from fused_remat import (
    _build,
    _build_cuda,
    _cuda_toolkit,
    _extension,
    attention_routes,
    budget,
    dispatch,
    mlp_routes,
    ops,
)
from fused_remat._columns import aligned

_OPS = {"mlp": "gelu", "attention": None, "multi_head_attention": None}  # with the activation of the call
# On a GPU an MLP's backend depends on these too.
_MLPS = {
    "D = 64": {"features": (64, 64, 256)},
    "D = 64 behind a norm": {"features": (64, 64, 256), "against_one_kernel": "a norm is folded in"},
    "D = 768": {"features": (768, 768, 3072)},
    "D = 4096": {"features": (4096, 4096, 16384)},
    "D = 4096, gelu_tanh": {"features": (4096, 4096, 16384), "activation": "gelu_tanh"},
    "D = 4096, gated": {"features": (4096, 4096, 14336), "against_library": "the layer is gated"},
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MIB = 2**20


def examine(*, build: bool = False) -> dict[str, Any]:
    """Everything the doctor knows, as JSON values. A key ending in `_error` says in words why its value is missing.

    `build` compiles the CUDA extension even where no GPU would use it.
    """
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
        **_cuda_compiler(),
        "extension": _loaded_extension(),
        "cuda_extension": _loaded_cuda_extension(build or bool(gpus)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_threads": torch.get_num_threads(),
        **_workspace(),
    }
    devices = ["cpu", "cuda"] if gpus and torch.version.cuda else ["cpu"]
    arch = _arch(gpus)
    for op in _OPS:
        facts[op] = {
            f"{name} on {device}{layer}": _choice(call)
            for device in devices
            for name, dtype in _DTYPES.items()
            for layer, call in _calls(op, device, dtype, arch)
        }
    return facts | _mlp_ways(arch) | _routes(arch)


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
        ("nvcc", facts["nvcc"] or f"none: {facts['nvcc_error']}"),
        ("CUTLASS", facts["cutlass"] or f"none: {facts['cutlass_error']}"),
        ("extension", _describe_extension(facts["extension"])),
        ("CUDA extension", _describe_cuda_extension(facts["cuda_extension"])),
        ("CPU", f"{facts['cpu_capability']}, {facts['cpu_threads']} threads"),
        ("workspace", _describe_workspace(facts)),
    ]
    lines += [(f"{op} {call}", _describe_choice(choice)) for op in _OPS for call, choice in facts[op].items()]
    return lines + _describe_routes(facts)


def report(*, as_json: bool, build: bool = False) -> None:
    """Prints the facts to stdout: one line each, or one JSON object."""
    facts = examine(build=build)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print("\n".join(aligned([(label, " ".join(text.split())) for label, text in describe(facts)])))


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


def _cuda_compiler() -> dict[str, str | None]:
    """nvcc and the headers of CUTLASS, and why some kernels are left out although they are there."""
    facts: dict[str, str | None] = dict.fromkeys(("nvcc", "nvcc_error", "cutlass", "cutlass_error"))
    cutlass = _cuda_toolkit.find_cutlass()
    left_out = [cutlass.reason] if cutlass.reason else []
    try:
        toolkit = _cuda_toolkit.find_toolkit()
        architectures = toolkit.architectures()
        facts["nvcc"] = f"{toolkit.nvcc}: CUDA {toolkit.version}, for {';'.join(map(str, architectures))}"
        if not left_out:
            left_out += filter(None, _build_cuda.cutlass_kinds(_build.source_root(), architectures, cutlass).values())
    except _build.BuildUnavailable as error:
        facts["nvcc_error"] = str(error)
    if cutlass.include is not None:
        facts["cutlass"] = f"{cutlass.version}: {cutlass.include}" + "".join(f"; {reason}" for reason in left_out)
    facts["cutlass_error"] = cutlass.reason
    return facts


def _loaded_extension() -> dict[str, Any]:
    """`_extension.status()` after an attempt to load; the warning of a failure would only repeat its reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ops.ready()
    return _status(_extension.status())


def _loaded_cuda_extension(build: bool) -> dict[str, Any]:
    """The same of the CUDA C++ kernels, and what they were compiled by and for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        reason = _extension.load_cuda(build=build)
    status = _extension.status().cuda or _extension.Status()
    facts = {**_status(status), "nvcc": None, "architectures": None, "cutlass": []}
    if reason is not None:
        return {**facts, "reason": reason}
    made = torch.ops.fused_remat
    return {
        **facts,
        "nvcc": made.nvcc_version(),
        "architectures": made.cuda_targets(),
        "cutlass": made.cutlass_kinds(),
    }


def _status(status: _extension.Status) -> dict[str, Any]:
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


def _describe_cuda_extension(extension: dict[str, Any]) -> str:
    if not extension["loaded"]:
        return _describe_extension(extension)
    made = f"nvcc {extension['nvcc']} for {extension['architectures']}"
    cutlass = ", ".join(extension["cutlass"]) or "no architecture"
    return f"{_describe_extension(extension)}; made with {made}, with GEMMs of CUTLASS for {cutlass}"


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


def _calls(op: str, device: str, dtype: torch.dtype, arch: int | None) -> list[tuple[str, dispatch.Call]]:
    """The calls of `op` that are asked about, each behind what a label says of its layer."""
    call = dispatch.Call(op=op, device=device, dtype=dtype, activation=_OPS[op])
    if device != "cuda":
        return [("", call)]
    call = replace(call, arch=arch)
    return [(f", {layer}", replace(call, **facts)) for layer, facts in _MLPS.items()] if op == "mlp" else [("", call)]


def _choice(call: dispatch.Call) -> dict[str, Any]:
    """The backend that `call` would run on, and the reasons against those that cannot."""
    chosen = dispatch.resolve(call)
    reasons = {name: dispatch.why_not(name, call) for name in dispatch.BACKENDS}
    return {"backend": chosen, "why_not": {name: why for name, why in reasons.items() if why}}


def _mlp_ways(arch: int | None) -> dict[str, Any]:
    """How the CUDA C++ backend makes the backward of those MLPs: one kernel, or stage 1 of its tiles."""
    error = _why_no_ways(arch)
    if error is not None:
        return {"mlp_kernels": None, "mlp_kernels_error": error}
    made = {
        f"{name}{layer}": _first_way(mlp_routes.table(call))
        for name, dtype in _DTYPES.items()
        for layer, call in _calls("mlp", "cuda", dtype, arch)
    }
    return {"mlp_kernels": made, "mlp_kernels_error": None}


def _why_no_ways(arch: int | None) -> str | None:
    error = attention_routes.why_unknown()
    return "no GPU is here whose compute capability would decide" if error is None and arch is None else error


def _first_way(rows: dict[str, list[str]]) -> dict[str, Any]:
    """The first of `rows` (in order of preference, with reasons) that nothing is against, as `_choice` tells it."""
    return {"backend": attention_routes.chosen(rows), "why_not": {name: why for name, why in rows.items() if why}}


def _routes(arch: int | None) -> dict[str, Any]:
    """Which kernels the CUDA C++ backend runs usual calls of attention with."""
    error = _why_no_ways(arch)
    if error is not None:
        return {"attention_kernels": None, "attention_kernels_error": error}
    made = {call: _first_way(rows) for call, rows in attention_routes.typical(arch).items()}
    return {"attention_kernels": made, "attention_kernels_error": None}


def _describe_routes(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for what, label in (("mlp_kernels", "mlp backward in CUDA C++"), ("attention_kernels", "attention in CUDA C++")):
        if facts[what] is None:
            lines.append((label, f"unknown: {facts[f'{what}_error']}"))
            continue
        lines += [(f"{label}, {call}", _describe_choice(choice)) for call, choice in facts[what].items()]
    return lines


def _describe_choice(choice: dict[str, Any]) -> str:
    """The backend, and the others by their reasons, each reason once."""
    names_by_reasons: dict[str, list[str]] = {}
    for name, reasons in choice["why_not"].items():
        names_by_reasons.setdefault(" and ".join(reasons), []).append(name)
    others = "; ".join(f"not {', '.join(names)}: {reasons}" for reasons, names in names_by_reasons.items())
    return f"{choice['backend']} ({others})" if others else choice["backend"]


def _main(arguments: list[str]) -> None:
    if not set(arguments) <= {"--json", "--build"}:
        sys.exit("usage: python -m fused_remat.doctor [--json] [--build]")
    report(as_json="--json" in arguments, build="--build" in arguments)


if __name__ == "__main__":
    _main(sys.argv[1:])
