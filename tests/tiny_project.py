"""A stand-in package for the build tests: fused_remat's own build files around C++ sources that compile in a blink."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD_FILES = ("setup.py", "pyproject.toml", "LICENSE", "README.md")
NO_COMPILER = "no-such-compiler"

# Two sources of one name, as in the real tree; `fused_remat_answer` shows through ctypes that the library was loaded.
SOURCES = {
    "answer.h": "#pragma once\nint half_of_the_answer();\n",
    "answer.cpp": '#include "answer.h"\n'
    'extern "C" __attribute__((visibility("default"))) int fused_remat_answer() { return 2 * half_of_the_answer(); }\n',
    "nested/answer.cpp": '#include "answer.h"\nint half_of_the_answer() { return 21; }\n',
}

# Notes every call, waits while `hold` exists and fails while `broken` exists.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then exec g++ --version; fi
echo "$*" >> "{folder}/calls"
while [ -e "{folder}/hold" ]; do sleep 0.05; done
if [ -e "{folder}/broken" ]; then echo "answer.cpp:1: error: broken on purpose"; exit 1; fi
exec g++ "$@"
"""

# What the build files need of torch. Importing the real one takes seconds, and this one can have any version.
TORCH = """
import ctypes
import os
from types import SimpleNamespace

__version__ = os.environ["STAND_IN_TORCH_VERSION"]
version = SimpleNamespace(cuda=os.environ.get("STAND_IN_TORCH_CUDA"))
ops = SimpleNamespace(load_library=ctypes.CDLL)


def compiled_with_cxx11_abi():
    return True
"""

LOAD = """
import ctypes, json
from fused_remat import _extension

reason = _extension.load()
status = _extension.status()
answer = ctypes.CDLL(str(status.path)).fused_remat_answer() if status.loaded else None
print(json.dumps({"reason": reason, "origin": status.origin, "status_reason": status.reason, "answer": answer,
                  "torch": status.torch_version}))
"""


@dataclass(frozen=True)
class Outcome:
    """What a process that ran `LOAD` found, and its lines on stderr."""

    found: dict
    lines: list[str]


class Project:
    """A checkout of the stand-in package in a new folder of `parent`, with its own compiler, cache and torch.

    `real_torch=True` takes the torch of this environment.
    """

    def __init__(self, parent: Path, *, real_torch: bool = False) -> None:
        folder = self.folder = parent / "checkout"
        self.csrc = folder / "csrc"
        self.cache = folder / "cache"
        self.compiler = folder / "c++"
        self.hold, self.broken = folder / "hold", folder / "broken"
        self.python_path = [] if real_torch else [str(make_torch(parent / "stand-in"))]
        for name, text in SOURCES.items():
            path = self.csrc / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        package = folder / "fused_remat"
        package.mkdir()
        (package / "__init__.py").touch()
        for name in ("_build.py", "_build_cuda.py", "_cuda_toolkit.py", "_extension.py"):
            shutil.copy(REPOSITORY / "fused_remat" / name, package)
        copy_build_files(folder)
        self.compiler.write_text(COMPILER.format(folder=folder))
        self.compiler.chmod(0o755)

    def calls(self) -> list[str]:
        """The command lines that the compiler was given, without the ones that link."""
        log = self.folder / "calls"
        return [line for line in log.read_text().splitlines() if " -c " in line] if log.exists() else []

    def environment(self, site: Path | None = None, **changes: str) -> dict[str, str]:
        """Imports come from `site`, or from the checkout."""
        settings = {
            "CXX": str(self.compiler),
            "FUSED_REMAT_CACHE": str(self.cache),
            "PYTHONPATH": os.pathsep.join([str(site or self.folder), *self.python_path]),
            "STAND_IN_TORCH_VERSION": "2.14.1+cpu",
        }
        return clean_environment() | settings | changes

    def start(self, code: str = LOAD, site: Path | None = None, **changes: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", code], env=self.environment(site, **changes), cwd=self.folder.parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def load(self, site: Path | None = None, **changes: str) -> Outcome:
        return finish(self.start(site=site, **changes))

    def install(self, name: str, **changes: str) -> Path:
        """Build a wheel of the checkout and unpack it into a new folder: what site-packages would hold."""
        wheel, _ = build("build_wheel", self.folder, self.environment(**changes))
        return unzip(wheel, self.folder.parent / name)


def make_torch(folder: Path) -> Path:
    real = Path(torch.__file__).parent
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TORCH)
    for name in ("include", "lib"):
        (package / name).symlink_to(real / name)
    return folder


def finish(process: subprocess.Popen) -> Outcome:
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return Outcome(json.loads(stdout), stderr.splitlines())


def clean_environment() -> dict[str, str]:
    """This process's environment without the settings that builds and imports read."""
    dropped = ("CXX", "MAX_JOBS", "PYTHONPATH", "PYTHONWARNINGS", "ATEN_CPU_CAPABILITY")
    return {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("FUSED_REMAT_")}


def copy_build_files(folder: Path) -> None:
    for name in BUILD_FILES:
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, folder)


def build(
    hook: str, folder: Path, environment: dict[str, str], python: Sequence[str] = (sys.executable,)
) -> tuple[Path, str]:
    """Call "build_wheel" or "build_sdist" of the build backend in `folder`: the archive, and what was printed."""
    output = Path(tempfile.mkdtemp(dir=folder.parent))
    code = f"import setuptools.build_meta as backend; backend.{hook}({str(output)!r})"
    done = subprocess.run(
        [*python, "-c", code], cwd=folder, env=environment, timeout=240, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (archive,) = output.iterdir()
    return archive, done.stdout


def unzip(wheel: Path, folder: Path) -> Path:
    """A wheel of this project holds nothing but files for site-packages, so unpacking installs it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
