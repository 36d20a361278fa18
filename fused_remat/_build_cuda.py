"""How `_C_cuda` is made of `csrc/cuda`: `*.cu` by nvcc, `*.cpp` by the C++ compiler, through the machinery of `_build`.

Whatever is missing for it is a reason in one sentence, never a failure: `_C` does without. What it needs is found by
`_cuda_toolkit`. Sources named `cutlass_sm80_*.cu` or `cutlass_sm90a_*.cu` are compiled for that generation alone, and
left out where there is no CUTLASS.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import _build  # relative: an isolated build loads these files under another package's name
from ._build import BuildUnavailable, Compiler, Recipe, Step
from ._cuda_toolkit import Architecture, Cutlass, Toolkit, find_cutlass, find_toolkit

NVCC_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden")
# Without -fopenmp: the host code of kernels has no loops of its own.
CXX_FLAGS = tuple(flag for flag in _build.CXX_FLAGS if flag != "-fopenmp")
# -z defs: what nobody defines (a function of _C, say, which hides its own) is found here and not at a user's import.
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,--as-needed")
TORCH_LIBRARIES = ("-ltorch", "-ltorch_cuda", "-lc10_cuda", *_build.LIBRARIES[1:])
CUDA_LIBRARIES = ("cudart", "cublas", "cublasLt")
_CUTLASS_SOURCE = re.compile(r"cutlass_(sm\d+[af]?)_\w+\.cu")
_HASHED = (".cu", ".cuh", ".cpp", ".h")
_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_LAUNCHERS = ("ccache", "sccache")
# On one core of a server CPU, for the time named in the first-use line.
_SECONDS = {".cpp": 25, ".cu": 10}  # a .cu source per architecture
_SECONDS_CUTLASS = 60


# Sources and names


def sources(root: Path) -> list[Path]:
    """Every source of `_C_cuda` below `root`, sorted."""
    return sorted(path for path in (root / "cuda").glob("*") if path.suffix in (".cu", ".cpp"))


def fingerprint(root: Path) -> str:
    """12 hex digits that change with `root/cuda`, the headers it includes, the schemas it implements and the flags."""
    flags = [NVCC_FLAGS, CXX_FLAGS, LINK_FLAGS, TORCH_LIBRARIES, CUDA_LIBRARIES]
    digest = hashlib.sha256(json.dumps(flags).encode())
    contents = _read_with_included(root)
    contents |= {path.name: path.read_bytes() for path in root.glob("library*.cpp") if path.name not in contents}
    for name in sorted(contents, key=lambda name: name.split("/")):
        digest.update(f"\0{name}\0".encode() + contents[name])
    return digest.hexdigest()[:12]


def _read_with_included(root: Path) -> dict[str, bytes]:
    """The bytes of `root/cuda` and of every file below `root` that is included there, directly or not, by path below
    `root`. Each file is read once: this happens when the package is imported."""
    below = len(str(root)) + 1
    there = {os.path.join(folder, name)[below:] for folder, _, files in os.walk(root) for name in files}
    found: dict[str, bytes] = {}
    pending = [name for name in there if os.path.dirname(name) == "cuda" and name.endswith(_HASHED)]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found[path] = Path(root, path).read_bytes()
        for included in _INCLUDE.findall(found[path]):
            name = included.decode()
            candidates = os.path.normpath(os.path.join(os.path.dirname(path), name)), os.path.normpath(name)
            pending += [candidate for candidate in candidates if candidate in there][:1]
    return found


def library_name(torch_version: str, cuda_version: str, architectures: Iterable[Architecture], root: Path) -> str:
    """File name of an ahead-of-time library. It carries what must be known *before* the file may be loaded."""
    named = ".".join(str(arch.number) + arch.suffix for arch in architectures)
    ptx = "".join(f"+ptx{arch.number}" for arch in architectures if arch.ptx)
    torch = f"torch{_build.abi_version(torch_version)}-cu{cuda_version}"
    return f"_C_cuda.{torch}-{named}{ptx}-{fingerprint(root)}{_build.EXT_SUFFIX}"


def library_record(path: Path) -> tuple[str, str, str]:
    """`(torch ABI version, CUDA version, fingerprint)` out of the name of an ahead-of-time library."""
    pattern = r"_C_cuda\.torch(?P<torch>[^-]+)-cu(?P<cuda>[^-]+)-[^-]+-(?P<fingerprint>[0-9a-f]{12})\."
    found = re.match(pattern, path.name)
    return (found["torch"], found["cuda"], found["fingerprint"]) if found else ("unknown", "unknown", "")


# CUTLASS


def cutlass_kind(source: Path) -> str | None:
    """The architecture in the name of a source that needs CUTLASS: "sm80", "sm90a"."""
    match = _CUTLASS_SOURCE.fullmatch(source.name)
    return match[1] if match else None


def architectures_of(kind: str, architectures: Iterable[Architecture]) -> list[Architecture]:
    """Those for which sources of that kind are compiled: the same generation, or with a suffix that very one.

    Lists name a GPU with or without the suffix; code for both runs on it, and these sources need what the suffix adds.
    """
    if kind[-1] in "af":
        own = Architecture(int(kind[2:-1]), kind[-1])
        return [own] if any(arch.number == own.number for arch in architectures) else []
    return [arch for arch in architectures if arch.number // 10 == int(kind[2:]) // 10]


def cutlass_kinds(root: Path, architectures: Sequence[Architecture], cutlass: Cutlass) -> dict[str, str | None]:
    """Every kind of CUTLASS source below `root`: the reason why its sources are left out, or None."""

    def reason(kind: str) -> str | None:
        if cutlass.include is None:
            return cutlass.reason
        if architectures_of(kind, architectures):
            return None
        return f"none of the architectures {';'.join(map(str, architectures))} is for {kind} kernels"

    return {kind: reason(kind) for kind in sorted(set(filter(None, map(cutlass_kind, sources(root)))))}


# The recipe


def recipe(root: Path, compiler: Compiler, toolkit: Toolkit) -> Recipe:
    """How `_C_cuda` is made of the sources below `root`. Raises BuildUnavailable."""
    found = sources(root)
    if not found:
        raise BuildUnavailable("this version has no CUDA sources")
    architectures, cutlass = toolkit.architectures(), find_cutlass()
    kinds = cutlass_kinds(root, architectures, cutlass)
    steps = [_step(path, architectures, cutlass) for path in found if kinds.get(cutlass_kind(path) or "") is None]
    steps.sort(key=lambda step: cutlass_kind(step.source) is None)  # the slowest first
    include = _include_flags(root, toolkit)
    launchers, host = _launchers_and_host(compiler)
    return Recipe(
        name="_C_cuda",
        what="the CUDA extension",
        made_with=f"nvcc {toolkit.version} for {';'.join(map(str, architectures))}",
        rules={
            "compile": [*compiler.command, *CXX_FLAGS, *include, *_defines(architectures, toolkit, kinds)],
            "nvcc": [*launchers, toolkit.nvcc, *NVCC_FLAGS, *_compression(toolkit), "-ccbin", host, *include],
        },
        steps=steps,
        linker=[*compiler.command, *LINK_FLAGS],
        libraries=[f"-L{_build.torch_folder() / 'lib'}", *TORCH_LIBRARIES, *_cuda_libraries(toolkit)],
        seconds=sum(_seconds(step, architectures) for step in steps),
    )


def _compression(toolkit: Toolkit) -> list[str]:
    """A quarter of the library's size, for loaders that know it: those of CUDA 12.4 on, so of every CUDA 13."""
    return ["--compress-mode=size"] if int(toolkit.major) >= 13 else []


def _step(source: Path, architectures: Sequence[Architecture], cutlass: Cutlass) -> Step:
    target = Path("cuda") / f"{source.name}.o"  # a kernel and its host code may share a name
    if source.suffix == ".cpp":
        return Step(source, target, "compile")
    kind = cutlass_kind(source)
    if kind is None:
        return Step(source, target, "nvcc", tuple(flag for arch in architectures for flag in arch.flags()))
    fitting = architectures_of(kind, architectures)
    flags = [flag for arch in fitting for flag in arch.flags(ptx=False)]
    return Step(source, target, "nvcc", (*flags, "-isystem", str(cutlass.include)))


def _seconds(step: Step, architectures: Sequence[Architecture]) -> int:
    if cutlass_kind(step.source):
        return _SECONDS_CUTLASS
    return _SECONDS[step.source.suffix] * (len(architectures) if step.rule == "nvcc" else 1)


def _launchers_and_host(compiler: Compiler) -> tuple[list[str], str]:
    """Of a `CXX` such as `ccache g++`: what stands before a compiler, which suits nvcc too, and the compiler."""
    words = list(compiler.command)
    count = next((i for i, word in enumerate(words) if Path(word).name not in _LAUNCHERS), 0)
    return words[:count], words[count]


def _include_flags(root: Path, toolkit: Toolkit) -> list[str]:
    """The toolkit's headers first; it may lack those of the libraries (cuBLAS, ...), which torch's packages bring."""
    folders = [toolkit.folder / "include", *(folder / "include" for folder in _nvidia_folders(toolkit))]
    flags = _build.abi_and_include_flags(root)
    for folder in folders:
        if folder.is_dir() and folder != Path("/usr/include"):  # which compilers must find last
            flags += ["-isystem", str(folder)]
    return flags


def _nvidia_folders(toolkit: Toolkit) -> list[Path]:
    """Where packages of PyPI put CUDA's headers and libraries, beside torch."""
    nvidia = _build.torch_folder().parent / "nvidia"
    return sorted(path for path in nvidia.glob("*") if path.name == f"cu{toolkit.major}" or not path.name[2:].isdigit())


def _cuda_libraries(toolkit: Toolkit) -> list[str]:
    """CUDA's libraries as torch uses them: the same shared files, by their full path.

    What is recorded is their soname (libcudart.so.13). torch has loaded that before ours is, from wherever it was
    installed, so there is one CUDA runtime in the process, with one current device and one last error, and no path is
    needed then. A static runtime would be a second one.
    """
    folders = [*_nvidia_folders(toolkit), _build.torch_folder(), toolkit.folder]
    places = [folder / name for folder in folders for name in ("lib", "lib64", f"targets/{_target()}/lib")]
    found = []
    for library in CUDA_LIBRARIES:
        files = (path for place in places for path in sorted(place.glob(f"lib{library}.so.{toolkit.major}*")))
        file = next(files, None)
        if file is None:
            raise BuildUnavailable(
                f"lib{library}.so.{toolkit.major} is neither beside torch nor in {toolkit.folder}; "
                f"install the CUDA toolkit {toolkit.major} with its libraries"
            )
        found.append(str(file))
    return found


def _target() -> str:
    return f"{'sbsa' if platform.machine() == 'aarch64' else platform.machine()}-linux"


def _defines(architectures: Sequence[Architecture], toolkit: Toolkit, kinds: dict[str, str | None]) -> list[str]:
    """What the C++ sources are told of the build; `cuda_architectures()` and its like tell it to Python."""
    with_cutlass = [kind for kind, reason in kinds.items() if reason is None]
    numbers = sorted({arch.number for arch in architectures})
    return [
        f"-DFUSED_REMAT_CUDA_ARCHITECTURES={','.join(map(str, numbers))}",
        f'-DFUSED_REMAT_CUDA_TARGETS="{";".join(map(str, architectures))}"',
        f'-DFUSED_REMAT_NVCC_VERSION="{toolkit.version}"',
        *(f"-DFUSED_REMAT_WITH_CUTLASS_{kind.upper()}" for kind in with_cutlass),
    ]


def build_key(root: Path, compiler: Compiler, toolkit: Toolkit) -> str:
    """Name of a first-use build: changes with whatever the library's bytes or its fitness to load depend on."""
    cutlass = find_cutlass()
    return _build.key_of(
        compiler,
        nvcc=toolkit.version,
        architectures=list(map(str, toolkit.architectures())),
        cutlass=cutlass.version,
        sources_and_flags=fingerprint(root),
    )


def first_use_library(note: str = "", *, build: bool = True) -> Path:
    """`_C_cuda` of the first-use cache, compiled now when it is not there yet and `build`. Raises BuildUnavailable."""
    _build.check_platform()
    toolkit = find_toolkit()
    root, compiler = _build.source_root(), _build.find_compiler()
    folder = _build.cache_root() / build_key(root, compiler, toolkit)
    made = recipe(root, compiler, toolkit)
    if not build and not (folder / f"{made.name}.so").is_file():
        raise BuildUnavailable("it is not compiled yet; the first call on a GPU that needs it does that")
    return _build.from_cache(folder, made, note)


def why_not() -> str | None:
    """Why `_C_cuda` is not compiled here, in one sentence; None if it can be. Compiles nothing."""
    try:
        _build.check_platform()
        find_toolkit()
        _build.find_compiler()
    except BuildUnavailable as error:
        return str(error)
    return None if sources(_build.source_root()) else "this version has no CUDA sources"
