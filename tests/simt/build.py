"""Compile `csrc/cuda` for the host runner: the kernels that nvcc compiles for a GPU, by g++, as one library.

Kept in the cache of first-use builds (`FUSED_REMAT_CACHE`), named after its content; objects are kept too, so a change
compiles only what it touches. Processes that ask at the same time build once.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from filelock import FileLock

from fused_remat import _build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
RUNNER = (HERE / "scheduler.cpp",)

# As in the library for the CPU; -O1 compiles in half the time. This folder comes first: it may stand in for headers.
FLAGS = (
    "-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-DFUSED_REMAT_SIMT",
    "-Wall", "-Werror", "-Wno-stringop-overflow", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-unused-function",
    "-Wno-unknown-pragmas",
)  # fmt: skip


def why_not() -> str | None:
    """Why the runner cannot be compiled here, if so."""
    if sys.platform != "linux":
        return f"the SIMT runner is for Linux, this is {sys.platform}"
    try:
        compiler = _build.find_compiler()
    except _build.BuildUnavailable as error:
        return str(error)
    return f"the SIMT runner is compiled by g++, the compiler is {compiler.version}" if compiler.is_clang else None


def sources() -> list[Path]:
    """The kernels and their host code; CUTLASS has no host twin, and library.cpp tells what nvcc compiled for."""
    found = [*(CSRC / "cuda").glob("*.cu"), *(CSRC / "cuda").glob("*.cpp")]
    return sorted(path for path in found if path.name != "library.cpp" and not path.name.startswith("cutlass_"))


def library() -> Path:
    """The library of all of `csrc/cuda`, with a stand-in for the kernels of CUTLASS."""
    kinds = ("-DFUSED_REMAT_WITH_CUTLASS_SM80", "-DFUSED_REMAT_WITH_CUTLASS_SM90A")
    return build("cuda", [*sources(), HERE / "cutlass_stage1.cpp"], *kinds)


def build(name: str, found: Iterable[Path], *flags: str) -> Path:
    """The library of the sources `found` and the runner. Raises RuntimeError with the compiler's output."""
    found = [*found, *RUNNER]
    compiler = _build.find_compiler()
    place = hashlib.sha256(f"{CSRC} {torch.__version__} {compiler}".encode()).hexdigest()[:12]
    folder = _build.cache_root() / f"simt-{place}" / name
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{name}-{_content(found, flags)}.so"
    with FileLock(folder / "lock"):
        if not output.is_file():
            (folder / "build.ninja").write_text(_ninja_file(folder, output, found, compiler, flags))
            command = [_build._ninja(), "-f", str(folder / "build.ninja"), "-j", str(_build.job_count(len(found)))]
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if done.returncode != 0:
                output.unlink(missing_ok=True)
                raise RuntimeError(f"compiling {name} for the SIMT runner failed:\n{done.stdout}")
            for older in folder.glob(f"{name}-*.so"):
                if older != output:
                    older.unlink(missing_ok=True)
    return output


def _content(found: Iterable[Path], flags: Iterable[str]) -> str:
    digest = hashlib.sha256(repr((FLAGS, tuple(flags), [path.name for path in found])).encode())
    headers = [path for folder in (CSRC, HERE) for path in folder.rglob("*") if path.suffix in (".h", ".cuh")]
    for path in sorted({*found, *headers}):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _ninja_file(
    folder: Path, output: Path, found: Iterable[Path], compiler: _build.Compiler, flags: Iterable[str]
) -> str:
    """Sources are named from the root of the checkout, so that a compiler cache knows them in every checkout."""

    def path(value: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", str(value.relative_to(ROOT) if value.is_relative_to(ROOT) else value))

    def words(*values: str) -> str:
        return shlex.join(values).replace("$", "$$")

    launcher = ("ccache",) if shutil.which("ccache") and compiler.command[0] != "ccache" else ()
    command = words(*launcher, *compiler.command)
    include = Path(torch.__file__).resolve().parent / "include"
    options = [*FLAGS, *flags, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    options += [f"-I{own.relative_to(ROOT)}" for own in (HERE, CSRC, CSRC / "cuda")]
    for other in (include, include / "torch/csrc/api/include", sysconfig.get_path("include")):
        options += ["-isystem", str(other)]
    objects = {source: path(folder / f"{source.name}.o") for source in found}
    link = words(f"-L{include.parent / 'lib'}", *_build.LIBRARIES)
    return "\n".join(
        (
            f"builddir = {path(folder)}",
            "rule compile",
            f"  command = {command} -MMD -MF $out.d {words(*options)} $language -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = {words(*compiler.command)} -shared $in {link} -o $out.part && mv $out.part $out",
            *(f"build {target}: compile {path(source)}\n  language = -x c++" for source, target in objects.items()),
            f"build {path(output)}: link {' '.join(objects.values())}",
            "",
        )
    )
