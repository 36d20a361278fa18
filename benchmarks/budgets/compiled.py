"""Compile what cases launch and read what came out. Runs in a process of its own, without Triton's interpreter.

`python -m benchmarks.budgets.compiled SHARD/SHARDS [NAME-PART ...]` prints one JSON pair per kernel: its
place among all, and a `table.Budget` or its names with an `error`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from benchmarks.budgets import launches
from benchmarks.budgets.launches import Launch
from benchmarks.budgets.table import Budget

# As PTX spells them, by the name that the table uses.
_TENSOR_CORE = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


class _Driver:
    """What Triton asks the driver of a GPU while it compiles."""

    def __init__(self) -> None:
        self.arch = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Triton without a GPU: a driver that names the target alone, and a cache of its own, so that ptxas always runs."""

    def __init__(self) -> None:
        self._driver = _Driver()
        triton.runtime.driver.set_active(self._driver)
        self._cache = tempfile.TemporaryDirectory()
        triton.knobs.cache.dir = self._cache.name
        os.environ["FUSED_REMAT_CACHE"] = self._cache.name  # not the tiles that were tuned for this machine
        triton.knobs.nvidia.dump_ptxas_log = True
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def measure(self, launch: Launch, arch: int) -> dict[str, Any]:
        """The fields of a `Budget`, or its names and an "error"."""
        self._driver.arch = arch
        log = io.StringIO()
        names = {"kernel": launch.name, "arch": arch, "variant": launch.case.variant}
        try:
            with contextlib.redirect_stdout(log):
                kernel = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.meta)
        except Exception as error:  # whatever the compiler raises is the finding
            return {**names, "error": _innermost(error)}
        return asdict(Budget(**names, tiles=_tiles(launch), **_resources(log.getvalue()), **_contents(kernel)))


def main(arguments: Sequence[str]) -> None:
    shard, shards = map(int, arguments[0].split("/"))
    compiler = Compiler()
    for index, (arch, launch) in enumerate(_distinct(arguments[1:])):
        if index % shards == shard:
            print(json.dumps([index, compiler.measure(launch, arch)]), flush=True)


def _distinct(parts: Sequence[str]) -> Iterator[tuple[int, Launch]]:
    """The launches whose name and architecture hold every part, each kernel and specialisation once."""
    seen = set()
    for case in launches.cases():
        for arch in launches.ARCHITECTURES:
            for launch in launches.record(case, arch):
                identity = (arch, _identity(launch))
                if identity not in seen and all(part in f"{launch.name} sm_{arch}" for part in parts):
                    seen.add(identity)
                    yield arch, launch


def _identity(launch: Launch) -> tuple:
    """What Triton compiles a kernel for: values of constants, and of other arguments the type and divisibility."""

    def described(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(described, value))
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, bool) or not isinstance(value, int):
            base = getattr(value, "base", None)
            return (base.dtype, tuple(value.block_shape)) if isinstance(base, Tensor) else (type(value), repr(value))
        return value if value in (0, 1) else (value % 16 == 0, -(2**31) <= value < 2**31)

    parameters = launch.kernel.params
    positional = [
        value if parameter.is_constexpr else described(value)
        for parameter, value in zip(parameters, launch.args, strict=False)
    ]
    named = {name: described(v) if isinstance(v, Tensor) else v for name, v in launch.meta.items()}
    return launch.kernel.__name__, str(positional), str(sorted(named.items()))


def _contents(kernel: Any) -> dict[str, Any]:
    """What is read from a compiled kernel itself."""
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    return {
        "warps": metadata.num_warps,
        "stages": metadata.num_stages,
        "shared_bytes": metadata.shared,
        "tensor_memory": metadata.tmem_size or 0,
        "dots": "tt.dot " in kernel.asm["ttir"],
        "tensor_core": {name: count for name, text in _TENSOR_CORE.items() if (count := ptx.count(text))},
    }


def _innermost(error: BaseException) -> str:
    """Triton wraps an error once for every function called; the last one says what is the matter."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _tiles(launch: Launch) -> str:
    """The block sizes among the constants, in the kernel's order, such as "M=128 N=64"."""
    constants = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.meta
    if "SPEC" in constants:  # which holds the constants of attention
        constants |= {"BLOCK_M": constants["SPEC"].block_m, "BLOCK_N": constants["SPEC"].block_n}
    blocks = {name: value for name, value in constants.items() if name.startswith("BLOCK_")}
    return " ".join(f"{name.removeprefix('BLOCK_')}={value}" for name, value in blocks.items())


def _resources(log: str) -> dict[str, Any]:
    """What the assembler's log says of registers, bytes of stack (spills included) and serialised products."""
    registers = re.findall(r"Used (\d+) registers", log)
    if not registers:
        raise RuntimeError(f"no registers in the log of ptxas: {log!r}")
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    return {
        "registers": max(map(int, registers)),
        "stack_bytes": max(int(number) for frame in stacks for number in frame),
        "warnings": sorted(set(re.findall(r"\((C\d+)\)[^\n]*wgmma", log))),
    }


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    main(sys.argv[1:])
