"""Compile the C++ sources into a shared library: ahead of time (`setup.py`) or at first use (`_extension.py`).

Both take the same recipe from here; that of the CUDA sources stands in `_build_cuda.py`. Nothing here imports torch
before a function needs it, so that a build environment without torch can load this file by its path.

Environment: `CXX` (compiler), `MAX_JOBS` (parallel compiler processes), `FUSED_REMAT_CACHE` (folder of first-use
builds, else `$XDG_CACHE_HOME/fused_remat` or `~/.cache/fused_remat`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# No -march: what goes beyond the baseline is compiled apart, in sources named after it, and chosen at run time.
# -Wno: g++ 12 finds fault with torch's headers there, without cause.
CXX_FLAGS = (
    "-std=c++20", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-Wno-stringop-overflow", "-Wno-psabi"
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
INSTRUCTION_SETS = {"avx2": _AVX2, "avx512": (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")}
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10")
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# One ATen-heavy source on one core of a server CPU, for the time named in the first-use line.
_SECONDS_PER_SOURCE = 12
# How compilers, nvcc, its assembler and linkers begin what stops them.
_ERROR = re.compile(r"\b(error|fatal)\s*:|undefined reference")


class BuildUnavailable(RuntimeError):
    """The library cannot be built here; the message is one sentence with the reason and the remedy."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command (`CXX` may hold a launcher such as `ccache g++`) and what it says it is."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version


def find_compiler() -> Compiler:
    """The compiler that `CXX` names, else the first of g++, c++, clang++ on PATH. Raises BuildUnavailable."""
    named = os.environ.get("CXX")
    candidates = [tuple(shlex.split(named))] if named else [("g++",), ("c++",), ("clang++",)]
    command = next((c for c in candidates if shutil.which(c[0])), None)
    if command is None:
        looked_for = f"CXX={named!r}" if named else "g++, c++ or clang++"
        raise BuildUnavailable(f"no C++ compiler found on PATH (looked for {looked_for}); install g++ or set CXX")
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise BuildUnavailable(f"`{shlex.join(command)} --version` failed; set CXX to a working C++ compiler")
    return Compiler(command, answer.stdout.splitlines()[0])


def source_root() -> Path:
    """The folder of the C++ sources: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def sources(root: Path) -> list[Path]:
    """Every C++ source below `root`, sorted; `root/cuda` belongs to the CUDA compiler."""
    return sorted(path for path in root.rglob("*.cpp") if path.relative_to(root).parts[0] != "cuda")


def fingerprint(root: Path) -> str:
    """12 hex digits that change with any source or header below `root` (but `root/cuda`) and with the flags."""
    digest = hashlib.sha256(json.dumps([CXX_FLAGS, INSTRUCTION_SETS, LIBRARIES]).encode())
    for path in sorted([*sources(root), *root.rglob("*.h")]):
        name = path.relative_to(root).as_posix()
        if not name.startswith("cuda/"):
            digest.update(f"\0{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def abi_version(torch_version: str) -> str:
    """The part of a torch version that a library must share with the torch that loads it.

    Releases of one minor version are binary compatible, with and without CUDA; development builds only with themselves.
    """
    public = torch_version.split("+")[0]
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*", public)
    return release[1] if release else public.replace("-", "_")


def library_name(torch_version: str, root: Path) -> str:
    """File name of an ahead-of-time library. It carries what must be known *before* the file may be loaded."""
    return f"_C.torch{abi_version(torch_version)}-{fingerprint(root)}{EXT_SUFFIX}"


def library_record(path: Path) -> tuple[str, str]:
    """`(torch ABI version, source fingerprint)` out of the name of an ahead-of-time library."""
    found = re.match(r"_C\.torch(?P<torch>[^-]+)-(?P<fingerprint>[0-9a-f]{12})\.", path.name)
    return (found["torch"], found["fingerprint"]) if found else ("unknown", "")


def cache_root() -> Path:
    """The folder that holds first-use builds."""
    if named := os.environ.get("FUSED_REMAT_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fused_remat"


def job_count(source_count: int) -> int:
    """Parallel compiler processes: `MAX_JOBS`, else one per usable core, never more than there are sources."""
    named = os.environ.get("MAX_JOBS")
    if named is None:
        return max(1, min(source_count, len(os.sched_getaffinity(0))))
    if not named.isdigit() or int(named) < 1:
        raise BuildUnavailable(f"MAX_JOBS is {named!r}, expected a positive whole number; correct or unset it")
    return max(1, min(source_count, int(named)))


@dataclass(frozen=True)
class Step:
    """One source, the object that it becomes, the rule that compiles it, and flags beside the rule's."""

    source: Path
    object: Path
    rule: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How one library is made.

    Attributes:
        name: of the library in the first-use cache, without suffix.
        what: "the C++ extension", for messages.
        made_with: the compiler, for messages.
        rules: by name the command that compiles, without source and object; it takes -c, -o, -MMD and -MF.
        steps: in the order of linking. Of an inline function in several objects the linker keeps the first copy.
        linker: command that links, without inputs.
        libraries: what the linker gets after the objects.
        seconds: of one core for all of it, roughly.
    """

    name: str
    what: str
    made_with: str
    rules: Mapping[str, Sequence[str]]
    steps: Sequence[Step]
    linker: Sequence[str]
    libraries: Sequence[str]
    seconds: int


def recipe(root: Path, compiler: Compiler) -> Recipe:
    """How `_C` is made of the sources below `root`. Raises BuildUnavailable when there are none."""
    found = sources(root)
    if not found:
        raise BuildUnavailable(f"no C++ sources below {root}; reinstall fused_remat")
    # g++'s OpenMP calls are left to the runtime that torch has loaded: linking would bring in a second one. clang++
    # emits calls that this runtime may lack.
    libraries = [f"-L{torch_folder() / 'lib'}", *LIBRARIES, *(["-fopenmp"] if compiler.is_clang else [])]
    # A copy of an inline function that is kept must be a baseline one.
    in_link_order = sorted(found, key=lambda source: bool(_instructions(source)))
    return Recipe(
        name="_C",
        what="the C++ extension",
        made_with=compiler.command[-1],
        rules={"compile": [*compiler.command, *CXX_FLAGS, *abi_and_include_flags(root)]},
        steps=[
            Step(source, source.relative_to(root).with_suffix(".o"), "compile", _instructions(source))
            for source in in_link_order
        ],
        linker=[*compiler.command, "-shared"],
        libraries=libraries,
        seconds=len(found) * _SECONDS_PER_SOURCE,
    )


def abi_and_include_flags(root: Path) -> list[str]:
    """The flags that a source needs to see ours and torch's headers."""
    include = torch_folder() / "include"
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={_cxx11_abi()}", f"-I{root.resolve()}"]
    for folder in (include, include / "torch/csrc/api/include", sysconfig.get_path("include")):
        flags += ["-isystem", str(folder)]
    return flags


def compile_library(output: Path, work: Path, recipe: Recipe, *, quiet: bool = False) -> None:
    """Compile and link to `output`, with objects in `work` (reused when up to date).

    `quiet` holds the compiler's output back; when the compilation fails it is left in `work/build.log`. Raises
    BuildUnavailable when ninja is missing, MAX_JOBS is not a number or the compilation fails.
    """
    work.mkdir(parents=True, exist_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    (work / "build.ninja").write_text(_ninja_file(output.resolve(), recipe))
    command = [_ninja(), "-C", str(work), "-j", str(job_count(len(recipe.steps)))]
    done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        text = (done.stdout or b"").decode(errors="replace")
        (work / "build.log").write_text(text)
        first = next(filter(_ERROR.search, text.splitlines()), f"ninja exited with {done.returncode}")
        raise BuildUnavailable(f"compiling {recipe.what} failed: {first.strip()}")


def _ninja() -> str:
    """The ninja program: on PATH, else the one of the `ninja` package, whose folder is on PATH only in active venvs."""
    if on_path := shutil.which("ninja"):
        return on_path
    try:
        import ninja
    except ImportError:
        raise BuildUnavailable("ninja is needed to compile; run `pip install ninja`") from None
    return str(Path(ninja.BIN_DIR) / "ninja")


def _ninja_file(output: Path, recipe: Recipe) -> str:
    def path(value: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", str(value))

    def words(values: Sequence[str]) -> str:
        return shlex.join(values).replace("$", "$$")

    lines = []
    for name, (command, *flags) in recipe.rules.items():
        lines += [
            f"rule {name}",
            f"  command = {words([command])} {words(flags)} -MMD -MF $out.d $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
        ]
    lines += ["rule link", f"  command = {words(recipe.linker)} $in {words(recipe.libraries)} -o $out"]
    for step in recipe.steps:
        lines += [
            f"build {path(step.object)}: {step.rule} {path(step.source.resolve())}",
            f"  flags = {words(step.flags)}",
        ]
    lines.append(f"build {path(output)}: link {' '.join(path(step.object) for step in recipe.steps)}")
    return "\n".join(lines) + "\n"


def _instructions(source: Path) -> tuple[str, ...]:
    """The flags of the instruction set that a source is named after (`tile_avx2.cpp`), on machines that know it."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return INSTRUCTION_SETS.get(source.stem.rpartition("_")[2], ()) if is_x86 else ()


def torch_folder() -> Path:
    """The folder of the torch package."""
    # Not torch.utils.cpp_extension.include_paths(): importing that module looks for CUDA and logs a line without one.
    import torch

    return Path(torch.__file__).resolve().parent


def _cxx11_abi() -> int:
    import torch

    return int(torch.compiled_with_cxx11_abi())


def build_key(root: Path, compiler: Compiler) -> str:
    """Name of a first-use build: changes with whatever the library's bytes or its fitness to load depend on."""
    return key_of(compiler, sources_and_flags=fingerprint(root))


def key_of(compiler: Compiler, **inputs: object) -> str:
    """20 hex digits of what every library depends on and of `inputs`."""
    import torch

    common = {
        "torch": torch.__version__,
        "cxx11_abi": _cxx11_abi(),
        "python": sysconfig.get_config_var("SOABI"),
        "machine": platform.machine(),
        "compiler": [*compiler.command, compiler.version],
    }
    return hashlib.sha256(json.dumps(common | inputs, sort_keys=True).encode()).hexdigest()[:20]


def first_use_library(note: str = "") -> Path:
    """`_C` of the first-use cache, compiled now when it is not there yet. Raises BuildUnavailable."""
    check_platform()
    root, compiler = source_root(), find_compiler()
    return from_cache(cache_root() / build_key(root, compiler), recipe(root, compiler), note)


def check_platform() -> None:
    """Raises BuildUnavailable elsewhere than on Linux."""
    if sys.platform != "linux":
        raise BuildUnavailable(f"the C++ extension is built on Linux only (this is {sys.platform})")


def from_cache(folder: Path, recipe: Recipe, note: str) -> Path:
    """The library of that recipe in `folder`, compiled now when it is not there yet.

    Processes that ask at the same time build once: one compiles, the others wait for it. The lock is the operating
    system's, so it goes with the process that holds it; half-done builds live in folders of their own that nothing
    reads, and the finished file is renamed into place. Prints one line to stderr when it compiles or waits, or when
    there is a `note`, which is put first. Raises BuildUnavailable.
    """
    library = folder / f"{recipe.name}.so"
    if library.is_file():
        if note:
            _say(f"{note}using {library} instead; reinstall fused_remat to be rid of this line")
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _sole_builder(folder, recipe, note):
            if not library.is_file():
                _build_into(library, recipe, note)
    except OSError as error:
        remedy = "set FUSED_REMAT_CACHE to a writable folder"
        raise BuildUnavailable(f"cannot write to {folder} ({error}); {remedy}") from error
    return library


@contextlib.contextmanager
def _sole_builder(folder: Path, recipe: Recipe, note: str) -> Iterator[None]:
    """Hold the lock of `folder`; a build that failed while this process waited counts as this process's failure too."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock")
    began = time.time()
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _say(f"{note}waiting for another process to compile {recipe.what} ({folder})")
        lock.acquire()
    try:
        failed = folder / "failed.log"
        if failed.is_file() and failed.stat().st_mtime >= began:
            raise BuildUnavailable(f"compiling {recipe.what} failed in another process; see {failed}")
        yield
    finally:
        lock.release()


def _build_into(library: Path, recipe: Recipe, note: str) -> None:
    import torch

    for abandoned in library.parent.glob("build-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    minutes = math.ceil(recipe.seconds / job_count(len(recipe.steps)) / 60)
    _say(
        f"{note}compiling {recipe.what} for torch {torch.__version__} with {recipe.made_with}, once: "
        f"about {minutes} min, kept in {library.parent}"
    )
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent, ignore_cleanup_errors=True) as work:
        built = Path(work) / library.name
        try:
            compile_library(built, Path(work), recipe, quiet=True)
        except BuildUnavailable as error:
            log = Path(work) / "build.log"
            if not log.is_file():
                raise
            kept = log.replace(library.parent / "failed.log")
            raise BuildUnavailable(f"{error} (all of it in {kept})") from None
        built.replace(library)


def _say(line: str) -> None:
    print(f"fused_remat: {line}", file=sys.stderr, flush=True)
