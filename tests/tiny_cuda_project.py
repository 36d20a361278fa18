"""The stand-in package with CUDA sources, a stand-in toolkit and a torch that says it is built for CUDA."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiny_project import Project

from fused_remat import _build

TORCH_VERSION, CUDA_VERSION = "2.14.1+cu130", "13.0"
SETTINGS = ("CUDA_HOME", "CUDA_PATH", "CUTLASS_PATH", "TORCH_CUDA_ARCH_LIST", "FUSED_REMAT_SKIP_CUDA", "MAX_JOBS")

SOURCES = {
    "shared.h": '#pragma once\n#include "deeper.h"\n',
    "deeper.h": "#pragma once\nconst int unit = 1;\n",
    "unrelated.h": "#pragma once\n",
    "library.cpp": "// the schemas\n",
    "cuda/kernel.h": "#pragma once\nint half_of_the_cuda_answer();\n",
    "cuda/kernel.cu": '#include "kernel.h"\n#include "shared.h"\nint half_of_the_cuda_answer() { return 12 * unit; }\n',
    "cuda/host.cpp": '#include "kernel.h"\n'
    'extern "C" __attribute__((visibility("default"))) int cuda_answer() { return 2 * half_of_the_cuda_answer(); }\n'
    "#ifdef FUSED_REMAT_WITH_CUTLASS_SM80\nint gemm_sm80();\nint use_sm80() { return gemm_sm80(); }\n#endif\n"
    "#ifdef FUSED_REMAT_WITH_CUTLASS_SM90A\nint gemm_sm90a();\nint use_sm90a() { return gemm_sm90a(); }\n#endif\n",
    "cuda/cutlass_sm80_gemm.cu": "#include <cutlass/version.h>\nint gemm_sm80() { return CUTLASS_MAJOR; }\n",
    "cuda/cutlass_sm90a_gemm.cu": "#include <cutlass/version.h>\nint gemm_sm90a() { return CUTLASS_MAJOR; }\n",
}

# Notes every call, waits while `hold` exists, fails while `broken` exists, and leaves to g++ what g++ understands.
NVCC = r"""#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {version}, V{version}.88"; exit;;
--list-gpu-arch) printf 'compute_%s\n' {known}; exit;;
--dryrun) echo '#$ TOP={folder}/bin/..'; exit;;
esac
echo "nvcc $*" >> "{calls}"
while [ -e "{hold}" ]; do sleep 0.05; done
if [ -e "{broken}" ]; then echo "kernel.cu(1): error: broken on purpose"; exit 1; fi
for word; do
  shift
  case "$word" in
  -gencode=*|--expt-relaxed-constexpr|--compress-mode=*|-Xcompiler|-ccbin|-fPIC,*|*/c++) ;;
  -c) set -- "$@" -fPIC -x c++ -c;;
  *) set -- "$@" "$word";;
  esac
done
exec g++ "$@"
"""

LOAD = """
import ctypes, json
from fused_remat import _extension

unneeded = _extension.load()
before = _extension.status().cuda
reason = _extension.load_cuda()
status = _extension.status()
answer = ctypes.CDLL(str(status.cuda.path)).cuda_answer() if status.cuda.loaded else None
print(json.dumps({"loaded_before": before.loaded, "reason": reason, "origin": status.cuda.origin,
                  "status_reason": status.cuda.reason, "answer": answer, "torch": status.cuda.torch_version}))
"""


class CudaProject(Project):
    """A stand-in package for a torch with CUDA. `toolkit` is the folder that CUDA_HOME names."""

    def __init__(self, parent: Path) -> None:
        super().__init__(parent)
        self.write(SOURCES)
        self.toolkit = parent / "toolkit"
        self.cutlass = parent / "cutlass"
        self.nvcc = self.toolkit / "bin" / "nvcc"
        for folder in (self.nvcc.parent, self.toolkit / "include", self.toolkit / "lib64"):
            folder.mkdir(parents=True)
        self.make_nvcc()
        empty = parent / "empty.so"
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", empty], check=True)
        for name in ("cudart", "cublas", "cublasLt"):
            shutil.copy(empty, self.toolkit / "lib64" / f"lib{name}.so.13")
        self._make_torch_libraries(parent / "stand-in" / "torch" / "lib", empty)
        headers = self.cutlass / "include" / "cutlass"
        headers.mkdir(parents=True)
        (headers / "version.h").write_text(
            "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"
        )

    def write(self, sources: dict[str, str]) -> None:
        for name, text in sources.items():
            path = self.csrc / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def make_nvcc(self, version: str = CUDA_VERSION, known: str = "80 90 100 120") -> None:
        text = NVCC
        names = {"calls": self.folder / "calls", "hold": self.hold, "broken": self.folder / "broken-cuda"}
        for name, value in {**names, "version": version, "known": known, "folder": self.toolkit}.items():
            text = text.replace(f"{{{name}}}", str(value))
        self.nvcc.write_text(text)
        self.nvcc.chmod(0o755)

    def environment(self, site: Path | None = None, **changes: str) -> dict[str, str]:
        ours = {
            "CUDA_HOME": str(self.toolkit),
            "CUTLASS_PATH": str(self.cutlass),
            "STAND_IN_TORCH_CUDA": CUDA_VERSION,
            "STAND_IN_TORCH_VERSION": TORCH_VERSION,
        }
        inherited = super().environment(site, **ours)
        inherited.pop("TORCH_CUDA_ARCH_LIST", None)
        return inherited | changes

    def cuda_calls(self) -> list[str]:
        """The command lines that compiled CUDA sources, by either compiler."""
        return [call for call in self.calls() if "/csrc/cuda/" in call]

    def call_of(self, source: str) -> list[str]:
        """The words of the command that compiled that source."""
        (call,) = (call for call in self.cuda_calls() if f"/csrc/cuda/{source} " in call)
        return call.split()

    @staticmethod
    def _make_torch_libraries(folder: Path, empty: Path) -> None:
        """Those of the real torch, and stand-ins for the ones that it lacks without CUDA."""
        real = Path(torch.__file__).parent / "lib"
        folder.unlink()
        folder.mkdir()
        for path in real.glob("*.so*"):
            (folder / path.name).symlink_to(path)
        for name in ("torch_cuda", "c10_cuda"):
            if not (folder / f"lib{name}.so").exists():
                shutil.copy(empty, folder / f"lib{name}.so")


def show_to_this_process(project: CudaProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build modules of this process see the stand-in's sources and tools, and no settings of the machine."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_build, "source_root", lambda: project.csrc)
    monkeypatch.setattr(torch.version, "cuda", CUDA_VERSION)
    for name in ("CXX", "FUSED_REMAT_CACHE", "CUDA_HOME", "CUTLASS_PATH"):
        monkeypatch.setenv(name, project.environment()[name])
