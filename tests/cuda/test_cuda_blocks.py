"""Whole layers on the backend "cuda" whose norms, norms of q and k and rotations are kernels, against the reference."""

from __future__ import annotations

import mha_cases
import mlp_cases
import pytest
import torch
from mha_cases import Block
from torch import Tensor

from fused_remat import Norm

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread", "own_attention")
# Small enough that rows, features and heads come in pieces; and everything at once.
WORKSPACE = pytest.mark.parametrize("workspace", (1, 2**22), ids=("pieces", "whole"))
DTYPE = pytest.mark.parametrize(
    ("dtype", "floor"), ((torch.float32, 2e-6), (torch.bfloat16, 2e-3)), ids=("fp32", "bf16")
)
HEADS = {"transform_heads_cuda", "transform_heads_bwd_cuda"}
ROWS = {"normalize_rows_cuda", "normalize_rows_bwd_cuda"}
BLOCKS = {
    "layer norm": (Block(model=17, norm="layer_norm"), ROWS),
    "rms norm without weight": (Block(model=17, norm="rms_norm", norm_weight=False), ROWS),
    "rotary": (Block(width=8, rotary=8), HEADS),
    "part of the width, interleaved": (Block(width=10, rotary=6, interleaved=True), HEADS),
    "norms of q and k": (Block(width=5, qk_norm=True, heads=4, kv_heads=2), HEADS),
    "everything": (
        Block(model=24, width=12, heads=4, kv_heads=2, norm="rms_norm", qk_norm=True, rotary=8, bias_kv=True,
              mask="bool"),
        ROWS | HEADS,
    ),
}  # fmt: skip


def _double(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in given.items()
    }


@pytest.mark.parametrize("name", BLOCKS)
@WORKSPACE
def test_gradients_of_attention_in_float64(name, workspace):
    block, kernels = BLOCKS[name]
    given = block.operands()
    dy = torch.randn(2, 5, block.model, dtype=torch.float64)
    truth = mha_cases.results(block, given, dy, backend="reference")
    ours = {}
    ran = mha_cases.kernels_of(
        lambda: ours.update(mha_cases.results(block, given, dy, backend="cuda", workspace=workspace))
    )
    mha_cases.assert_same(ours, truth, 1e-10)
    assert kernels <= set(ran)


@pytest.mark.parametrize("name", BLOCKS)
@DTYPE
def test_attention_is_as_precise_as_torch(name, dtype, floor):
    block, _ = BLOCKS[name]
    given = block.operands(dtype)
    dy = torch.randn(2, 5, block.model).to(dtype)
    truth = mha_cases.results(block, _double(given), dy.double(), backend="reference")
    stock = mha_cases.results(block, given, dy, backend="reference")
    ours = mha_cases.results(block, given, dy, backend="cuda", workspace=5000)
    for result, right in truth.items():
        error, allowed = (mlp_cases.relative_error(t[result], right) for t in (ours, stock))
        assert error <= 2 * allowed + floor, (result, error, allowed)


def _mlp(given, norm, kind, dy, **settings) -> dict[str, Tensor]:
    y = mlp_cases.run(given, norm=Norm(kind, norm["norm_weight"], norm.get("norm_bias")), **settings)
    return {"y": y.detach()} | mlp_cases.gradients(y, given | norm, dy)


def _norm(kind: str, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    made = {"norm_weight": torch.randn(width, dtype=torch.float64).to(dtype).requires_grad_()}
    bias = torch.randn(width, dtype=torch.float64).to(dtype).requires_grad_()
    return made | ({"norm_bias": bias} if kind == "layer_norm" else {})


@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("rows", (7, 150), ids=("feature chunks", "token chunks"))
@WORKSPACE
def test_an_mlp_behind_a_norm(rows, kind, workspace):
    workspace = 20_000 if workspace == 1 else workspace
    given, norm = mlp_cases.operands(rows, 16, 24, gated=True), _norm(kind, 16, torch.float64)
    dy = torch.randn(rows, 16, dtype=torch.float64)
    truth = _mlp(given, norm, kind, dy, backend="reference", activation="silu")
    ours = {}
    ran = mlp_cases.kernels_of(
        lambda: ours.update(_mlp(given, norm, kind, dy, backend="cuda", activation="silu", workspace=workspace))
    )
    mha_cases.assert_same(ours, truth, 1e-10)
    assert set(ran) >= ROWS


@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@DTYPE
def test_an_mlp_behind_a_norm_is_as_precise_as_torch(kind, dtype, floor):
    given, norm = mlp_cases.operands(40, 16, 24, dtype=dtype), _norm(kind, 16, dtype)
    dy = torch.randn(40, 16).to(dtype)
    truth = _mlp(_double(given), _double(norm), kind, dy.double(), backend="reference")
    stock = _mlp(given, norm, kind, dy, backend="reference")
    ours = _mlp(given, norm, kind, dy, backend="cuda", workspace=20_000)
    for result, right in truth.items():
        error, allowed = (mlp_cases.relative_error(t[result], right) for t in (ours, stock))
        assert error <= 2 * allowed + floor, (result, error, allowed)
