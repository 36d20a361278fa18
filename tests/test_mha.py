"""Multi-head attention from x against the reference: every part of the block, precision, determinism."""

from __future__ import annotations

from itertools import product

import mha_cases as cases
import pytest
import spy
import torch
from mha_cases import RESIDUALS, Block, results

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)
KEEPS = ((), ("out",), ("q", "k", "v", "out"), ("k", "v"), ("q",))
BLOCKS = {
    "plain": Block(),
    "no bias": Block(bias=False),
    "other widths": Block(model=7, heads=4, kv_heads=2, width=5, value_width=3, out=6),
    "one key head": Block(heads=3, kv_heads=1, width=4),
    "cross": Block(length_k=7),
    "cross, packed, separate value": Block(length_k=7, separate_value=True),
    "cross, three widths": Block(length_k=7, model_k=5, model_v=8, separate_value=True, packed=False),
    "three weights": Block(packed=False),
    "three weights, no bias": Block(packed=False, bias=False),
    "bias_kv": Block(bias_kv=True, heads=4),
    "zero key": Block(zero_key=True),
    "bias_kv and zero key, masked": Block(bias_kv=True, zero_key=True, mask="bool+padding", heads=4),
    "layer norm": Block(norm="layer_norm"),
    "rms norm": Block(norm="rms_norm", bias=False),
    "norm without weight": Block(norm="layer_norm", norm_weight=False),
    "norm and cross": Block(norm="rms_norm", length_k=7),
    "norm and separate value": Block(norm="layer_norm", length_k=5, separate_value=True),
    "q/k norm": Block(qk_norm=True, heads=4, kv_heads=2),
    "rotary": Block(rotary=4),
    "rotary of a part": Block(rotary=2, interleaved=True, heads=4, kv_heads=2, width=6),
    "everything": Block(
        heads=4, kv_heads=2, width=6, value_width=3, norm="rms_norm", qk_norm=True, rotary=4, bias_kv=True,
        zero_key=True, mask="float+padding",
    ),
    "empty rows": Block(mask="bool-empty-row"),
    "empty sample": Block(mask="empty-sample"),
    "mask per head": Block(mask="float-per-head", heads=4, kv_heads=2),
    "mask per head and padding": Block(mask="float+float-padding", heads=4),
    "long": Block(batch=1, length=70, length_k=67, heads=4, kv_heads=2),
}  # fmt: skip
SETTINGS = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (2, 1)},
    "dropout": {"dropout_p": 0.3},
}


def _dy(block, given, **settings):
    shape = block.reference(given, **settings).shape
    return torch.randn(shape, dtype=torch.float64).to(given["query"].dtype)


@BACKEND
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_block_agrees_with_the_reference(block, backend):
    given = block.operands()
    dy = _dy(block, given)
    for name, settings in SETTINGS.items():
        truth = results(block, given, dy, backend="reference", **settings)
        for keep, workspace in product(KEEPS, (1, 2**20)):
            ours = results(block, given, dy, backend=backend, keep=keep, workspace=workspace, **settings)
            cases.assert_same(ours, truth, 1e-9, (name, keep, workspace))


@BACKEND
@pytest.mark.parametrize("average", (True, False), ids=("averaged", "per head"))
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_weights_and_their_gradient_agree_with_the_reference(block, average, backend):
    given = block.operands()
    dy = _dy(block, given)
    for name, settings in SETTINGS.items():
        settings = settings | {"average_attn_weights": average}
        _, weights = block.reference(given, need_weights=True, **settings)
        dweights = torch.randn_like(weights)
        truth = results(block, given, dy, dweights, backend="reference", **settings)
        for keep, workspace in product(((), ("out",)), (1, 2**20)):
            ours = results(block, given, dy, dweights, backend=backend, keep=keep, workspace=workspace, **settings)
            cases.assert_same(ours, truth, 1e-9, (name, keep, workspace))


@BACKEND
def test_unused_outputs_have_no_gradient(backend):
    """Either output may be the only one that the loss uses."""
    block = Block(heads=4, kv_heads=2)
    given = block.operands()
    leaves = {name: value for name, value in given.items() if value.requires_grad}
    for position in (0, 1):
        grads = []
        for name in (backend, "reference"):
            output = block.call(given, backend=name, need_weights=True)[position]
            dout = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
            grads.append(cases.gradients(output, leaves, dout, materialize_grads=True))
        cases.assert_same(*grads, 1e-10)


@BACKEND
def test_empty_samples_give_the_bias_and_reach_nobody(backend):
    block = Block(batch=2, length=4, model=16, heads=2, width=8, mask="padding")
    given = block.operands()
    given["key_padding_mask"] = torch.tensor([[True] * 4, [False] * 4])
    one = dict(given, query=given["query"].detach()[:1].requires_grad_(), key_padding_mask=None)
    leaves = [name for name, value in given.items() if value.requires_grad and name != "query"]
    for need_weights in (False, True):
        y = block.call(given, backend=backend, need_weights=need_weights)
        alone = block.call(one, backend=backend, need_weights=need_weights)
        if need_weights:
            (y, weights), (alone, _) = y, alone
            assert (weights[1] == 0).all()
            torch.testing.assert_close(weights[0].sum(-1), torch.ones(4, dtype=torch.float64))
        torch.testing.assert_close(y[1], given["out_proj_bias"].expand(4, -1))
        dy = torch.randn(1, 4, 16, dtype=torch.float64)
        ours = torch.autograd.grad(y[:1], [given[n] for n in leaves], dy)
        truth = torch.autograd.grad(alone, [given[n] for n in leaves], dy)
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# Precision and determinism --------------------------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("keep", ((), ("out",), RESIDUALS), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_error_is_at_most_twice_that_of_eager(dtype, keep, backend):
    block = Block(length=64, model=32, heads=4, kv_heads=4, width=16, value_width=16)
    given = block.operands(dtype)
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    dy = torch.randn(2, 64, 32, dtype=torch.float64).to(dtype)
    found = {
        "ours": results(block, given, dy, backend=backend, keep=keep, workspace=20_000),
        "eager": _linear_and_sdpa(block, given, dy),
        "truth": results(block, exact, dy.double(), backend="reference"),
    }
    floor = torch.finfo(dtype).eps / 8
    for name, truth in found["truth"].items():
        assert found["ours"][name].dtype == dtype
        error, allowed = (cases.relative_error(found[who][name], truth) for who in ("ours", "eager"))
        assert error <= 2 * allowed + floor, (name, error, allowed)


def _linear_and_sdpa(block, given, dy):
    packed = torch.nn.functional.linear(given["query"], given["in_proj_weight"], given["in_proj_bias"])
    q, k, v = packed.unflatten(-1, (3, block.heads, block.width)).permute(2, 0, 3, 1, 4)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
    y = torch.nn.functional.linear(out, given["out_proj_weight"], given["out_proj_bias"])
    return {"y": y.detach()} | {f"d{name}": g for name, g in cases.gradients(y, given, dy).items()}


@pytest.mark.parametrize(("workspace", "threads"), ((1, 1), (60_000, 3), (2**20, 1), (2**20, 3)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_kept_and_rebuilt_residuals_give_the_same_bits(dtype, workspace, threads):
    """Of q, k and v. What is rebuilt of out differs in rounding: a known lse needs no running maximum."""
    block = Block(length=40, model=24, heads=6, kv_heads=3, width=16, norm="layer_norm", qk_norm=True, rotary=8)
    given = block.operands(dtype)
    dy = torch.randn(2, 40, 24).to(dtype)
    run = lambda *keep: results(block, given, dy, backend="cpp", keep=keep, workspace=workspace, dropout_p=0.1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = {keep: run(*keep) for keep in ((), ("q",), ("out",), ("k", "v", "out"), RESIDUALS[:3], RESIDUALS)}
    finally:
        torch.set_num_threads(before)
    for keep, found in runs.items():
        kept = RESIDUALS if "out" in keep else RESIDUALS[:3]
        for name, value in found.items():
            assert torch.equal(value, runs[kept][name]), (keep, name)
            assert cases.relative_error(value, runs[RESIDUALS][name]) <= 16 * torch.finfo(dtype).eps, (keep, name)


@pytest.mark.parametrize("keep", ((), ("out",), ("k",)), ids=str)
@pytest.mark.parametrize("workspace", (1, 60_000, 2**20))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_backward_sees_the_bits_of_forward(dtype, workspace, keep):
    """q, k and v as attention is given them, head group by head group, in forward and in backward."""
    block = Block(length=40, model=24, heads=6, kv_heads=3, width=16, norm="rms_norm", qk_norm=True, rotary=8)
    given = block.operands(dtype)

    def step():
        y = block.call(given, backend="cpp", workspace=workspace, keep=keep)
        y.backward(torch.randn_like(y))

    forward, backward = spy.heads_seen(step)
    assert len(forward) == len(backward) and (workspace > 1 or len(forward) == 3)
    for ours, theirs in zip(forward, backward, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@BACKEND
def test_same_bits_on_every_rerun(dtype, backend):
    block = Block(length=96, model=32, heads=4, kv_heads=2, width=16, mask="float-per-head")
    given = block.operands(dtype)
    dy, dweights = torch.randn(2, 96, 32).to(dtype), torch.randn(2, 96, 96).to(dtype)
    before, runs = torch.get_num_threads(), []
    workspace = 100_000 if backend == "cpp" else 2_000_000  # less than that, and aten goes row by row
    run = lambda: results(block, given, dy, dweights, backend=backend, workspace=workspace, dropout_p=0.1)
    try:
        for threads in (1, 2, 4) if backend == "cpp" else (1, 2):
            torch.set_num_threads(threads)
            runs.append(run())
            for _ in range(3):  # threads take their buffers in another order each time
                for name, value in run().items():
                    assert torch.equal(value, runs[-1][name]), name
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:  # the library's own products may round differently on other numbers of threads
        for name, value in other.items():
            assert cases.relative_error(value, runs[0][name]) <= 16 * torch.finfo(dtype).eps, name


@BACKEND
def test_the_named_backend_ran(backend):
    block = Block()
    ran = cases.kernels_of(lambda: block.call(block.operands(), backend=backend).sum().backward())
    assert cases.backends_of(ran) == {backend}
    assert {"multi_head_attention_fwd", "multi_head_attention_bwd"} <= set(ran)
