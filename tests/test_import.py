"""`import fused_remat` is silent and light, with a Triton, without one, or with a broken one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import clean_environment

import fused_remat

INSTALLED = Path(fused_remat.__file__).parent.parent

# How `triton` can be missing, as Python that runs first.
TRITON = {
    "as installed": "",
    "absent": "import sys; sys.modules['triton'] = None",
    "raises ImportError": "import broken_triton; broken_triton.install(ImportError('libtriton.so is missing'))",
    "raises OSError": "import broken_triton; broken_triton.install(OSError('libcuda.so.1: cannot open'))",
}

BROKEN_TRITON = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


def install(error):
    class Broken(MetaPathFinder, Loader):
        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, self) if name.partition(".")[0] == "triton" else None

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            raise error

    sys.meta_path.insert(0, Broken())
"""

IMPORT = """
import sys
import torch
before = set(sys.modules)
import fused_remat
print("IMPORTED")
print("IMPORTED", file=sys.stderr)
added = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {"triton", "setuptools", "typer", "rich", "matplotlib", "timm", "transformers", "torchvision", "sklearn"}
assert not added & heavy, added & heavy
assert "torch.distributed.tensor" in before or "torch.distributed.tensor" not in sys.modules
assert not torch.cuda.is_initialized()
"""

LAYERS = """
import json
import torch.nn.functional as F
linear = F.linear

torch.manual_seed(0)
x, dy = torch.randn(5, 16, requires_grad=True), torch.randn(5, 16)
worst = {}
def plain(m):
    return linear(F.gelu(linear(x, m.fc1.weight, m.fc1.bias)), m.fc2.weight, m.fc2.bias)

def gated(m):
    return linear(F.silu(linear(x, m.gate_proj.weight)) * linear(x, m.up_proj.weight), m.down_proj.weight)

for layer, expected in ((fused_remat.MLP(16, 48), plain), (fused_remat.GatedMLP(16, 40), gated)):
    wanted = [x, *layer.parameters()]
    ours, theirs = layer(x), expected(layer)
    pairs = zip([ours, *torch.autograd.grad(ours, wanted, dy)], [theirs, *torch.autograd.grad(theirs, wanted, dy)])
    worst[type(layer).__name__] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
print(json.dumps(worst))
"""


def run(code: str, folder: Path, *options: str, **environment: str) -> tuple[list[str], list[str]]:
    (folder / "broken_triton.py").write_text(BROKEN_TRITON)
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env=clean_environment() | {"PYTHONPATH": str(INSTALLED)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("triton", TRITON)
def test_import_is_silent_and_layers_work(triton, tmp_path):
    stdout, stderr = run(TRITON[triton] + IMPORT + LAYERS, tmp_path)
    assert stdout[0] == "IMPORTED" and stderr[0] == "IMPORTED"
    worst = json.loads(stdout[1])
    assert worst.keys() == {"MLP", "GatedMLP"}
    assert all(0 <= error < 1e-5 for error in worst.values()), worst


def test_import_raises_no_warning_and_compiles_nothing(tmp_path):
    cache = tmp_path / "cache"
    assert run(IMPORT, tmp_path, "-W", "error", FUSED_REMAT_CACHE=str(cache)) == (["IMPORTED"], ["IMPORTED"])
    assert not cache.exists()


@pytest.mark.parametrize("triton", [name for name in TRITON if name != "as installed"])
def test_naming_triton_without_triton_says_what_is_missing(triton, tmp_path):
    code = """
import torch
import fused_remat
x = torch.randn(3, 4)
try:
    with fused_remat.backend("triton"):
        fused_remat.mlp(x, torch.randn(8, 4), torch.randn(4, 8))
except RuntimeError as error:
    print(error)
"""
    stdout, _ = run(TRITON[triton] + code, tmp_path)
    (message,) = stdout
    assert "backend 'triton' was named but cannot run mlp" in message
    assert "triton is not installed" in message or "importing Triton fails" in message


def test_names_that_a_function_hides_in_its_package_are_at_the_top():
    """`fused_remat.plan` and `fused_remat.profile` are functions, so that their packages' names need a place."""
    packages = {"profile": ["Axis"], "plan": ["Plan", "InfeasibleBudget"], "guards": ["RematWarning", "as_region"]}
    for package, names in packages.items():
        for name in names:
            assert getattr(fused_remat, name) is getattr(sys.modules[f"fused_remat.{package}"], name)
            assert name in fused_remat.__all__
    assert len(set(fused_remat.__all__)) == len(fused_remat.__all__) and all(
        map(fused_remat.__dict__.get, fused_remat.__all__)
    )
