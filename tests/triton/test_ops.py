"""The Triton ops as torch sees them: registered, fakes, no derivative of their own, compiled, inside the block."""

from __future__ import annotations

import attention_cases
import mha_cases
import mlp_cases as cases
import pytest
import spy
import torch
from mha_cases import Block
from torch.library import opcheck

import fused_remat
from fused_remat.ops import triton as ops

pytestmark = [
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]

# One block with everything that has a kernel: folded norm, norms of q and k, rotation, grouped heads, extra keys.
BLOCKS = {
    "layer-norm": Block(length=9, heads=4, norm="layer_norm", bias_kv=True, zero_key=True, mask="float+padding"),
    "rms-norm-rotary": Block(length=9, heads=4, norm="rms_norm", qk_norm=True, rotary=4, mask="bool"),
    "interleaved-cross": Block(length=9, length_k=9, model_k=5, rotary=2, interleaved=True, packed=False),
}
SETTINGS = ({}, {"keep": ()}, {"keep": (), "need_weights": True, "dropout_p": 0.2}, {"keep": ("q", "k", "v", "out")})


def test_every_level_3_op_has_a_triton_implementer():
    named = {name.removesuffix("_triton") for name in spy.registered_for("triton") if name.endswith("_triton")}
    assert named == set(ops.IMPLEMENTERS)
    assert named == {name.removesuffix("_cpp") for name in spy.registered_for("cpp") if name.endswith("_cpp")}


def _calls():
    given = cases.operands(5, 4, 6, gated=True, dtype=torch.float32)
    yield lambda: cases.run(given, workspace=2000, dropout_p=0.3, norm=fused_remat.Norm("rms_norm"))
    heads = attention_cases.operands(2, 2, 5, 7, 3, dtype=torch.float32)
    masks = attention_cases.masks("float+padding", heads)
    yield lambda: attention_cases.run(heads, **masks, is_causal=True)
    for block, settings in zip(BLOCKS.values(), SETTINGS[1:], strict=True):
        operands = block.operands(torch.float32)
        yield lambda b=block, o=operands, s=settings: b.call(o, **s)


def test_opcheck_every_op():
    seen = set()
    for call in _calls():
        for name, arguments in spy.samples(call, "triton"):
            if name in seen:
                continue
            results = opcheck(getattr(torch.ops.fused_remat, name).default, arguments)
            assert set(results.values()) == {"SUCCESS"}, name
            seen.add(name)
    assert {f"{op}_triton" for op in ops.IMPLEMENTERS} <= seen


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_block_equals_the_one_in_cpp(block, settings):
    given = block.operands(torch.float32)
    results = []
    for backend in ("cpp", "triton"):
        torch.manual_seed(3)
        outputs = block.call(given, backend=backend, workspace=30_000, **settings)
        outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out is not None]
        leaves = [value for value in given.values() if value.requires_grad]
        torch.manual_seed(4)
        grads = torch.autograd.grad(outputs, leaves, [torch.randn_like(out) for out in outputs], allow_unused=True)
        results.append([*outputs, *(grad for grad in grads if grad is not None)])
    for ours, expected in zip(*reversed(results), strict=True):
        assert mha_cases.relative_error(ours, expected) < 2e-5


def test_compiled_calls_equal_eager_ones():
    layer, x = fused_remat.GatedMLP(8, 24), torch.randn(5, 8)
    with fused_remat.backend("triton"):
        expected = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(compiled, expected)


def _with_gaps(vector: torch.Tensor) -> torch.Tensor:
    """The same numbers two elements apart."""
    return torch.stack((vector.detach(), torch.full_like(vector, 7.0)), -1)[..., 0].requires_grad_()


@pytest.mark.parametrize("name", ("layer-norm", "rms-norm-rotary"))
def test_vectors_of_parameters_may_have_gaps(name):
    block = BLOCKS[name]
    given = block.operands(torch.float32)
    vectors = [key for key, value in given.items() if value.dim() == 1]
    assert vectors
    results = []
    for operands in (given, given | {key: _with_gaps(given[key]) for key in vectors}):
        outputs = block.call(operands, backend="triton", keep=())
        y = outputs[0] if isinstance(outputs, tuple) else outputs
        leaves = [value for value in operands.values() if value.requires_grad]
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
