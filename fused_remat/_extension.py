"""Load the compiled operators: `load()` makes `torch.ops.fused_remat.*` exist, or says why it cannot.

Looked for in this order: the library that was compiled when the package was installed, the cache of first-use builds,
a first-use build (`FUSED_REMAT_NO_BUILD=1` forbids it). Without any, callers take the reference path and one
RuntimeWarning per process says so.

The CUDA C++ kernels are a library of their own, which needs the other one. Compiled with the package, it is loaded
with it; otherwise only `load_cuda()` compiles it, for the first call with tensors on a GPU that would run on these
kernels. Whoever never makes such a call never waits for nvcc.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from fused_remat import _build, _build_cuda, _cuda_toolkit


@dataclass(frozen=True)
class Status:
    """What `load()` found.

    `origin` is "ahead-of-time", "first-use cache" or None; `torch_version` is the version the library was built for
    (major.minor for a release built ahead of time); `reason` says why there is no library, or why not the
    ahead-of-time one. `cuda` tells the same of the library with the CUDA C++ kernels.
    """

    loaded: bool = False
    origin: str | None = None
    path: Path | None = None
    reason: str | None = "load() has not been called"
    torch_version: str | None = None
    cuda: Status | None = None


F = TypeVar("F", bound=Callable)
_lock = threading.Lock()
_status: Status | None = None
_cuda_status: Status | None = None
_cuda_reason: str | None = None  # the final one: `load_cuda()` has tried everything


def status() -> Status:
    """The outcome of `load()` and `load_cuda()` so far. Loads nothing."""
    return replace(_status or Status(), cuda=_cuda_status or Status(reason="it has not been needed yet"))


def constant_when_traced(function: F) -> F:
    """`torch.compiler.assume_constant_result`, less its import of torch._dynamo.

    That import takes a second and fails where Triton is installed but broken. A trace calls the function for real and
    takes its result for a constant.
    """
    function._dynamo_marked_constant = True
    return function


@constant_when_traced
def load() -> str | None:
    """Load the compiled operators once per process; None when they are there, else one sentence why they are not.

    Thread-safe. The first call may compile (one line on stderr) and, on failure, emits the process's one
    RuntimeWarning.
    """
    global _status
    if _status is None:
        with _lock:
            if _status is None:
                _status = _find_and_load()
                if _status.loaded:
                    _load_installed_cuda()
                else:
                    _warn(_status.reason)
    return None if _status.loaded else _status.reason


@constant_when_traced
def load_cuda(*, build: bool = True) -> str | None:
    """Load the CUDA C++ kernels once per process; None when they are there, else one sentence why they are not.

    Thread-safe. Never warns. The first call may compile (one line on stderr); with `build=False` it does not, and what
    it says then is not final.
    """
    global _cuda_status, _cuda_reason
    if _cuda_status is not None and _cuda_status.loaded:
        return None
    unavailable = load()
    if unavailable is not None:
        return f"the C++ extension that they need is not available: {unavailable}"
    with _lock:
        # Looking for a toolkit starts programs: once to learn what is there, once more for who would have it compiled.
        if _cuda_status is None or (build and not _cuda_status.loaded and _cuda_reason is None):
            _cuda_status = _find_and_load_cuda(build)
            if build:
                _cuda_reason = _cuda_status.reason
    return None if _cuda_status.loaded else _cuda_status.reason


def load_installed() -> None:
    """Load the ahead-of-time libraries that fit, if there are any: operators then exist as soon as the package does.

    Never compiles, prints or warns; `load()` says what is the matter where this finds nothing.
    """
    global _status
    with _lock:
        path, _ = _ahead_of_time()
        if _status is None and path is not None:
            with contextlib.suppress(OSError):
                _status = _load_ahead_of_time(path)
                _load_installed_cuda()


def _load_installed_cuda() -> None:
    """Load the installed CUDA library, if one that fits is there. Creates no context, and needs no GPU or driver."""
    global _cuda_status
    path, _ = _ahead_of_time_cuda()
    if _cuda_status is None and path is not None:
        with contextlib.suppress(OSError):
            _cuda_status = _load_ahead_of_time_cuda(path)


def _load_ahead_of_time_cuda(path: Path) -> Status:
    torch.ops.load_library(path)
    return Status(True, "ahead-of-time", path, None, _build_cuda.library_record(path)[0])


def _load_ahead_of_time(path: Path) -> Status:
    torch.ops.load_library(path)
    return Status(True, "ahead-of-time", path, None, _build.library_record(path)[0])


def _warn(reason: str | None) -> None:
    warnings.warn(
        f"fused_remat runs on its reference path, which is right but saves no memory: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )


def _find_and_load() -> Status:
    path, rejected = _ahead_of_time()
    if path is not None:
        try:
            return _load_ahead_of_time(path)
        except OSError as error:
            rejected = f"the installed library {path} cannot be loaded ({error})"
    try:
        path = _first_use(rejected)
    except _build.BuildUnavailable as error:
        return Status(reason=f"{rejected}; {error}" if rejected else str(error))
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return Status(reason=f"the library {path} cannot be loaded ({error}); delete that file to compile it again")
    return Status(True, "first-use cache", path, rejected, torch.__version__)


def _ahead_of_time() -> tuple[Path | None, str | None]:
    """The installed library that fits this torch, or why the one that is there does not. Loads nothing."""
    package = Path(__file__).resolve().parent
    root = _build.source_root()
    path = package / _build.library_name(torch.__version__, root)
    if path.is_file():
        return path, None
    others = sorted(package.glob(f"_C.torch*{_build.EXT_SUFFIX}"))
    if not others:
        return None, None
    wanted = _build.abi_version(torch.__version__)
    built_for = [_build.library_record(other)[0] for other in others]
    if wanted in built_for:
        return None, f"the installed library for torch {wanted} was built from other C++ sources or flags"
    return None, f"the installed library was built for torch {', '.join(built_for)}, this is torch {torch.__version__}"


def _check_may_build() -> None:
    if os.environ.get("FUSED_REMAT_NO_BUILD", "") not in ("", "0"):
        raise _build.BuildUnavailable("FUSED_REMAT_NO_BUILD forbids the first-use build; unset it or reinstall")


def _first_use(rejected: str | None) -> Path:
    _check_may_build()
    return _build.first_use_library(note=f"{rejected}: " if rejected else "")


def _find_and_load_cuda(build: bool) -> Status:
    path, rejected = _ahead_of_time_cuda()
    try:
        if path is not None:
            return _load_ahead_of_time_cuda(path)
    except OSError as error:
        rejected = f"the installed library {path} cannot be loaded ({error})"
    try:
        _check_may_build()
        path = _build_cuda.first_use_library(note=f"{rejected}: " if rejected else "", build=build)
    except _build.BuildUnavailable as error:
        return Status(reason=f"{rejected}; {error}" if rejected else str(error))
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return Status(reason=f"the library {path} cannot be loaded ({error}); delete that file to compile it again")
    return Status(True, "first-use cache", path, rejected, torch.__version__)


def _ahead_of_time_cuda() -> tuple[Path | None, str | None]:
    """The installed CUDA library that fits this torch, or why there is none. Loads nothing."""
    try:
        cuda = _cuda_toolkit.torch_cuda()
    except _build.BuildUnavailable:
        return None, None
    package = Path(__file__).resolve().parent
    others = sorted(package.glob(f"_C_cuda.torch*{_build.EXT_SUFFIX}"))
    if not others:
        return None, None
    fitting = (_build.abi_version(torch.__version__), cuda)
    for_this_torch = [path for path in others if _build_cuda.library_record(path)[:2] == fitting]
    this = f"torch {torch.__version__} with CUDA {cuda}"
    if for_this_torch:  # else the sources, which take tens of milliseconds to read, are not asked
        wanted = _build_cuda.fingerprint(_build.source_root())
        for path in for_this_torch:
            if _build_cuda.library_record(path)[2] == wanted:
                return path, None
        return None, f"the installed CUDA library for {this} was built from other sources or flags"
    built_for = ", ".join("torch {} with CUDA {}".format(*_build_cuda.library_record(path)) for path in others)
    return None, f"the installed CUDA library was built for {built_for}, this is {this}"
