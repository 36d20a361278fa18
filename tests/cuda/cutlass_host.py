"""The epilogues of the CUTLASS kernels as a host library (`cutlass_host.cpp`), and the problem that they take."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from fused_remat import _build, _build_cuda, _cuda_toolkit
from fused_remat._build import BuildUnavailable

HERE = Path(__file__).resolve().parent
FLAGS = (
    "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden",
    # CUTLASS's device code has calls that a host compiler would look up early, and warnings of its own.
    "-fpermissive", "-w",
)  # fmt: skip
DTYPES = {torch.float16: 2, torch.bfloat16: 3}  # places in enum Dtype


class RowMajor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class Stage1Gemm(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("rows", "features", "d_out")),
        *((name, RowMajor) for name in ("dy", "w_down", "up", "gate", "hidden", "dup", "dgate")),
        ("activation", ctypes.c_int),
        ("seed", ctypes.c_void_p),
        ("drop_threshold", ctypes.c_uint64),
        ("keep_scale", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("row0", "feature0", "hidden_features")),
    )

    def place(self, **matrices: Tensor) -> None:
        for name, matrix in matrices.items():
            assert matrix.stride(1) == 1
            setattr(self, name, RowMajor(matrix.data_ptr(), matrix.stride(0)))

    @property
    def reference(self) -> object:
        return ctypes.byref(self)


@cache
def library() -> ctypes.CDLL:
    """Compiled once per content. Raises BuildUnavailable where compiler, CUDA's headers or CUTLASS are missing."""
    cutlass = _cuda_toolkit.find_cutlass()
    if cutlass.include is None:
        raise BuildUnavailable(cutlass.reason or "")
    root, toolkit, compiler = _build.source_root(), _cuda_toolkit.find_toolkit(), _build.find_compiler()
    if compiler.is_clang:
        raise BuildUnavailable(f"CUTLASS's device code is read by g++ alone, the compiler is {compiler.version}")
    include = [*_build_cuda._include_flags(root, toolkit), "-isystem", str(cutlass.include)]
    for folder in (toolkit.folder / "include" / "cccl",):
        include += ["-isystem", str(folder)]
    command = [*compiler.command, *FLAGS, *include, str(HERE / "cutlass_host.cpp")]
    digest = hashlib.sha256(repr((command, cutlass.version, toolkit.version)).encode())
    for path in sorted({*_sources(root)}):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    output = _build.cache_root() / f"cutlass-host-{digest.hexdigest()[:12]}.so"
    output.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{output}.lock"):
        if not output.is_file():
            part = output.with_suffix(".part")
            done = subprocess.run(
                [*command, "-o", str(part)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            assert done.returncode == 0, done.stdout
            part.rename(output)
    loaded = ctypes.CDLL(str(output))
    loaded.why_not.restype = ctypes.c_char_p
    loaded.sm80_loads.restype = loaded.sm80_shared_bytes.restype = ctypes.c_int64
    return loaded


def _sources(root: Path) -> Iterator[Path]:
    for folder in (root, root / "cuda", HERE):
        for pattern in ("*.h", "*.cuh", "cutlass_host.cpp"):
            yield from folder.glob(pattern)
