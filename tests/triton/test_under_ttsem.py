"""The kernels as their compiler means them: ttsem executes Triton's own intermediate code on the CPU.

It knows bfloat16 and TF32, fills fresh memory with NaN, and stops at accesses out of bounds and at races.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

TTSEM, TRITON = "0.1.0", "3.8.0"
HERE = Path(__file__).parent
# File -> which of its tests: those of the dtypes that the interpreter cannot do, and one of all features at once.
SUITES = {
    "test_dtypes.py": "bfloat16 or tf32 or everything",
    "test_device_functions.py": "dropout or products or gelu or silu",
    # In place, or by partial sums: where a race could be.
    "test_heads.py": "interleaved-norm and 63",
    "test_norm.py": "341-17",
    "test_sums.py": "257-63",
}


def _why_not() -> str | None:
    try:
        found = importlib.metadata.version("ttsem")
    except importlib.metadata.PackageNotFoundError:
        return f"ttsem {TTSEM} is not installed"
    if found != TTSEM or triton.__version__ != TRITON:
        return f"ttsem {found} and Triton {triton.__version__} are not the pair known to work, {TTSEM} and {TRITON}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
@pytest.mark.parametrize("suite", SUITES)
def test_the_suite_holds_under_ttsem(suite, pytestconfig):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ttsem.sanitize", "pytest", str(HERE / suite), "-k", SUITES[suite]]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=pytestconfig.rootpath,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1], done.stdout[-2000:]
