"""Ahead-of-time build of `fused_remat._C` and `._C_cuda`; everything that is not about C++ stands in pyproject.toml.

With torch in the build environment (`pip install --no-build-isolation .`) the libraries are compiled here: `_C_cuda`
only where torch has CUDA and nvcc is at hand, else a line says why not. Without torch (an isolated build), or without a
C++ compiler, the package is pure Python plus its C++ sources, which the first use compiles.
"""

import importlib
import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
CSRC = HERE / "csrc"
EXTENSION, CUDA_EXTENSION = "fused_remat._C", "fused_remat._C_cuda"
SOURCE_FILES = ("*.cpp", "*.h", "*.cu", "*.cuh")


def _load(name):
    """A module of the package by its path, under another package: importing the package itself would import torch."""
    package = types.ModuleType("fused_remat_build")
    package.__path__ = [str(HERE / "fused_remat")]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"{package.__name__}.{name}")


_build = _load("_build")
_build_cuda = _load("_build_cuda")


class BuildPython(build_py):
    def run(self):
        # A source deleted since the last build would still lie here, be installed, and be compiled at first use.
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "fused_remat", ignore_errors=True)
        super().run()


class BuildLibraries(build_ext):
    """Compile through the same ninja file as the first-use build, and name the results after the torch they need."""

    def finalize_options(self):
        modules = self.distribution.ext_modules or []
        others = [module for module in modules if module.name != CUDA_EXTENSION]
        if len(others) < len(modules) and (reason := _build_cuda.why_not()):
            print(f"fused_remat: installing without the CUDA extension: {reason}", file=sys.stderr)
            self.distribution.ext_modules = others
        super().finalize_options()

    def get_ext_filename(self, fullname):
        import torch

        package, _, name = fullname.rpartition(".")
        if name == CUDA_EXTENSION.rpartition(".")[2]:
            architectures = _build_cuda.find_toolkit().architectures()
            file = _build_cuda.library_name(torch.__version__, torch.version.cuda, architectures, CSRC)
        else:
            file = _build.library_name(torch.__version__, CSRC)
        return os.path.join(package.replace(".", os.sep), file)

    def build_extension(self, ext):
        import torch

        compiler = _build.find_compiler()
        # Outside setuptools' temporary folders, so that a second build compiles only what changed.
        work = HERE / "build" / f"torch{torch.__version__}-{sys.implementation.cache_tag}"
        if ext.name == CUDA_EXTENSION:
            work = work.with_name(f"{work.name}-cuda")
            recipe = _build_cuda.recipe(CSRC, compiler, _build_cuda.find_toolkit())
        else:
            recipe = _build.recipe(CSRC, compiler)
        _build.compile_library(Path(self.get_ext_fullpath(ext.name)), work, recipe)

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for ext in self.extensions:
            current = HERE / self.get_ext_filename(ext.name)
            of_that_torch = f"{current.name.partition('-')[0]}-*{_build.EXT_SUFFIX}"
            for older in current.parent.glob(of_that_torch):
                if older != current:
                    older.unlink()


def _extensions():
    if importlib.util.find_spec("torch") is None:
        return []
    try:
        _build.find_compiler()
    except _build.BuildUnavailable as reason:
        print(f"fused_remat: installing without the C++ extension: {reason}", file=sys.stderr)
        return []
    sources = {EXTENSION: _build.sources(CSRC), CUDA_EXTENSION: _build_cuda.sources(CSRC)}
    return [
        Extension(name, [os.path.relpath(path, HERE) for path in found]) for name, found in sources.items() if found
    ]


def _csrc_packages():
    """The folders of C++ sources as packages, so that every build carries them: `fused_remat.csrc.cpu`, ..."""
    folders = {path.parent.relative_to(HERE) for pattern in SOURCE_FILES for path in CSRC.rglob(pattern)}
    return sorted(".".join(("fused_remat", *folder.parts)) for folder in folders)


setup(
    packages=[*find_packages(include=["fused_remat", "fused_remat.*"]), *_csrc_packages()],
    package_dir={"fused_remat.csrc": "csrc"},
    package_data={"": list(SOURCE_FILES), "fused_remat.demo": ["page.html", "words_*.json"]},
    ext_modules=_extensions(),
    cmdclass={"build_py": BuildPython, "build_ext": BuildLibraries},
)
