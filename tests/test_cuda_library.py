"""The CUDA library that was built beside this package, on a machine that may have no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_remat import _build, _extension
from fused_remat._cuda_toolkit import parse_architectures


@pytest.mark.slow
def test_the_real_library_loads_without_a_gpu_and_lacks_no_symbol():
    reason = _extension.load_cuda(build=False)
    if reason is not None:
        pytest.skip(f"no library of CUDA C++ kernels: {reason}")
    path = _extension.status().cuda.path
    undefined = subprocess.run(["ldd", "-r", path], capture_output=True, text=True, check=True, env=loader_paths())
    assert "undefined symbol" not in undefined.stdout + undefined.stderr
    code = """
from pathlib import Path
import torch
import fused_remat
from fused_remat import _extension
assert _extension.load_cuda(build=False) is None
assert torch._C._dispatch_has_kernel_for_dispatch_key("fused_remat::column_sums_cuda", "CUDA")
assert not torch.cuda.is_initialized()
loaded = Path("/proc/self/maps").read_text()
assert "libcuda.so" not in loaded or torch.cuda.is_available()
runtimes = {line.split()[-1] for line in loaded.splitlines() if "libcudart" in line}
assert len(runtimes) == 1, runtimes
print(torch.ops.fused_remat.cuda_architectures(), torch.ops.fused_remat.cuda_targets())
"""
    root = Path(_extension.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=root, check=False,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    architectures = parse_architectures(torch.ops.fused_remat.cuda_targets())
    assert torch.ops.fused_remat.cuda_architectures() == sorted({arch.number for arch in architectures})
    assert torch.ops.fused_remat.nvcc_version()


def loader_paths() -> dict[str, str]:
    """Where the libraries are that torch has loaded before ours."""
    folder = _build.torch_folder()
    nvidia = [str(path) for path in (folder.parent / "nvidia").glob("*/lib")]
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join([str(folder / "lib"), *nvidia])}
