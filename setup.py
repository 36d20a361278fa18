"""Ahead-of-time build of `fused_remat._C`; everything that is not about C++ stands in pyproject.toml.

With torch in the build environment (`pip install --no-build-isolation .`) the library is compiled here. Without
(an isolated build), or without a C++ compiler, the package is pure Python plus its C++ sources, which the first use
compiles.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
CSRC = HERE / "csrc"


def _load_build_module():
    """`fused_remat/_build.py` by its path: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location("fused_remat_build", HERE / "fused_remat" / "_build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


_build = _load_build_module()


class BuildPython(build_py):
    def run(self):
        # A source deleted since the last build would still lie here, be installed, and be compiled at first use.
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "fused_remat", ignore_errors=True)
        super().run()


class BuildLibrary(build_ext):
    """Compile through the same ninja file as the first-use build, and name the result after the torch it needs."""

    def get_ext_filename(self, fullname):
        import torch

        package = fullname.rpartition(".")[0].replace(".", os.sep)
        return os.path.join(package, _build.library_name(torch.__version__, CSRC))

    def build_extension(self, ext):
        import torch

        # Outside setuptools' temporary folders, so that a second build compiles only what changed.
        work = HERE / "build" / f"torch{torch.__version__}-{sys.implementation.cache_tag}"
        _build.compile_library(Path(self.get_ext_fullpath(ext.name)), work, CSRC, _build.find_compiler())

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        current = HERE / self.get_ext_filename("fused_remat._C")
        for older in current.parent.glob(f"_C.torch{_build.library_record(current)[0]}-*{_build.EXT_SUFFIX}"):
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
    return [Extension("fused_remat._C", [os.path.relpath(path, HERE) for path in _build.sources(CSRC)])]


def _csrc_packages():
    """The folders of C++ sources as packages, so that every build carries them: `fused_remat.csrc.cpu`, ..."""
    folders = {path.parent.relative_to(HERE) for pattern in ("*.cpp", "*.h") for path in CSRC.rglob(pattern)}
    return sorted(".".join(("fused_remat", *folder.parts)) for folder in folders)


setup(
    packages=[*find_packages(include=["fused_remat", "fused_remat.*"]), *_csrc_packages()],
    package_dir={"fused_remat.csrc": "csrc"},
    package_data={"": ["*.cpp", "*.h"]},
    ext_modules=_extensions(),
    cmdclass={"build_py": BuildPython, "build_ext": BuildLibrary},
)
