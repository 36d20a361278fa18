"""The attention op under torch.compile, compiled autograd, export, opcheck, torch.func and forward-mode AD."""

from __future__ import annotations

import attention_cases as cases
import pytest
import spy
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.library import opcheck

import fused_remat

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    # torch's own tracing does all of this.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
SETTINGS = pytest.mark.parametrize(
    "settings",
    ({}, {"is_causal": True}, {"causal": "bottom_right", "window": (3, 1)}, {"return_lse": True}),
    ids=("full", "causal", "window", "lse"),
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def _step(function, given):
    """Outputs and gradients of one step; outputs enter the loss one by one."""
    given = {name: value.detach().clone().requires_grad_(value.is_floating_point()) for name, value in given.items()}
    outputs = function(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.square().sum() for output in outputs).backward()
    return [*(output.detach() for output in outputs), *(v.grad for v in given.values() if v.requires_grad)]


def _assert_equal(ours, truth):
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@SETTINGS
@pytest.mark.parametrize("mask", ("none", "bool", "float", "float+padding"))
def test_fullgraph_forward_and_backward(mask, settings):
    given = cases.operands(2, 4, 5, 7, 3, kv_heads=2, dtype=torch.float32)
    given |= cases.masks(mask, given)
    eager = lambda **tensors: fused_remat.attention(**tensors, **settings)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    _assert_equal(_step(compiled, given), _step(eager, given))


@pytest.mark.slow
def test_fullgraph_with_inductor():
    given = cases.operands(2, 4, 5, 7, 3, kv_heads=2, dtype=torch.float32)
    eager = lambda **tensors: fused_remat.attention(**tensors, is_causal=True)
    _assert_equal(_step(torch.compile(eager, fullgraph=True), given), _step(eager, given))


def test_dropout_under_compile_replays_its_mask():
    given = cases.operands(2, 2, 9, 33, 4)
    compiled = torch.compile(
        lambda **tensors: fused_remat.attention(**tensors, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(4)
    out = compiled(**given)
    truth = cases.run_reference(given, seed=4, dropout_p=0.5)
    dout = torch.randn_like(out)
    cases.assert_same(
        {"out": out} | cases.gradients(out, given, dout), {"out": truth} | cases.gradients(truth, given, dout), 1e-9
    )


def test_dynamic_lengths_recompile_at_most_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    eager = lambda **tensors: fused_remat.attention(**tensors, causal="bottom_right")
    compiled = torch.compile(eager, fullgraph=True, backend=counter, dynamic=True)
    for length in (16, 33, 47, 64):
        given = cases.operands(2, 4, length, length + 5, 8, kv_heads=2, dtype=torch.float32)
        given["key_padding_mask"] = torch.rand(2, length + 5) < 0.8
        _assert_equal(_step(compiled, given), _step(eager, given))
    assert counter.frame_count <= 2


def test_compiled_graph_saves_no_scores():
    given = cases.operands(2, 3, 37, 41, 8, dtype=torch.float32)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        torch.compile(fused_remat.attention, fullgraph=True, backend="aot_eager")(*given.values())
    assert shapes and not any({37, 41} <= set(shape) for shape in shapes)


def test_compiled_autograd_twice_with_different_data():
    eager = lambda **tensors: fused_remat.attention(**tensors, dropout_p=0.3, is_causal=True, return_lse=True)
    for _ in range(2):
        given = cases.operands(2, 2, 9, 9, 4, dtype=torch.float32)
        state = torch.get_rng_state()
        truth = _step(eager, given)
        torch.set_rng_state(state)
        for value in given.values():
            value.grad = None
        loss = sum(output.square().sum() for output in eager(**given))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
        _assert_equal([value.grad for value in given.values()], truth[2:])


class _Attention(torch.nn.Module):
    def forward(self, q, k, v, mask):
        return fused_remat.attention(q, k, v, key_padding_mask=mask, is_causal=True)


def test_export_with_a_dynamic_batch():
    batch = torch.export.Dim("batch", min=2, max=8)

    def inputs(n):
        given = cases.operands(n, 4, 6, 7, 3, kv_heads=2, dtype=torch.float32, requires_grad=False)
        return (*given.values(), torch.rand(n, 7) < 0.8)

    program = torch.export.export(_Attention(), inputs(3), dynamic_shapes=({0: batch},) * 4)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "fused_remat.attention.default" in targets
    tensors = inputs(5)
    torch.testing.assert_close(program.module()(*tensors), _Attention()(*tensors))
    torch.testing.assert_close(program.run_decompositions().module()(*tensors), _Attention()(*tensors))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_no_grad_and_inference_mode(mode):
    given = cases.operands(dtype=torch.float32)
    expected = cases.run(given)
    with mode():
        out = cases.run(given)
        assert not out.requires_grad and torch.equal(out, expected)
        compiled = torch.compile(fused_remat.attention, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*given.values()), expected)


# Every registered op ------------------------------------------------------------------------------------------------


def _laid_out(layout, dtype):
    given = cases.operands(2, 4, 3, 5, 4, kv_heads=2, value_width=3, dtype=dtype)
    if layout == "transposed":
        for name, value in given.items():
            given[name] = value.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    elif layout == "expanded":
        for name, value in given.items():
            given[name] = value.detach()[:1].expand(value.shape).requires_grad_()
    return given


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    (
        ("contiguous", torch.float32),
        ("contiguous", torch.bfloat16),
        ("transposed", torch.float32),
        ("expanded", torch.float32),
    ),
    ids=str,
)
def test_opcheck_every_op(layout, dtype, backend):
    given = _laid_out(layout, dtype)
    seen = set()
    for kind, settings in (
        ("none", {}),
        ("float+padding", {"dropout_p": 0.3}),
        ("bool-empty-row", {"is_causal": True, "softcap": 2.0}),
    ):
        masks = cases.masks(kind, given)
        cases.learned(masks)
        checked = spy.samples(lambda m=masks, s=settings: cases.run(given, **m, **s, return_lse=True), backend)
        mask = masks.get("attn_mask")
        mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
        level1 = (*given.values(), mask, masks.get("key_padding_mask"), 1, 2, -1, 0.0, 0.5, 0.0, 2000, backend)
        composite = ("attention_reference", (*level1, None, None))
        for name, arguments in (("attention", level1), composite, *checked):
            results = opcheck(getattr(torch.ops.fused_remat, name).default, arguments)
            assert set(results.values()) == {"SUCCESS"}, name
            seen.add(name)
    ours = {name for name in spy.registered_for(backend) if name.startswith("attention")}
    assert seen == ours - {f"attention_weights_{backend}"}


def test_inner_ops_refuse_to_be_differentiated():
    given = cases.operands()
    ((name, arguments), *_) = spy.samples(lambda: cases.run(given), "cpp")
    q, *rest = arguments
    out, *_ = getattr(torch.ops.fused_remat, name)(q.detach().requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()


# torch.func and forward mode ------------------------------------------------------------------------------------------


def test_per_sample_gradients():
    given = cases.operands(3, 2, 4, 5, 3, requires_grad=False)

    def loss(q, k, v):
        return fused_remat.attention(q[None], k[None], v[None], is_causal=True).square().sum()

    batched = vmap(grad(loss, argnums=(0, 1, 2)))(*given.values())
    leaves = [value.clone().requires_grad_() for value in given.values()]
    truth = torch.autograd.grad(fused_remat.attention(*leaves, is_causal=True).square().sum(), leaves)
    for ours, expected in zip(batched, truth, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_jvp_and_dual_numbers():
    given = cases.operands(1, 2, 4, 5, 3, requires_grad=False)
    q, k, v = given.values()
    tangent, epsilon = torch.randn_like(q), 1e-6
    function = lambda q: fused_remat.attention(q, k, v)
    numeric = (function(q + epsilon * tangent) - function(q - epsilon * tangent)) / (2 * epsilon)
    torch.testing.assert_close(jvp(function, (q,), (tangent,))[1], numeric, rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(q, tangent)))
    torch.testing.assert_close(dual.tangent, numeric, rtol=1e-6, atol=1e-7)


def test_the_bare_op_refuses_transforms_instead_of_dropping_them():
    q, k, v = cases.operands(requires_grad=False).values()
    op = lambda q: torch.ops.fused_remat.attention(q, k, v, None, None, 0, -1, -1, 0.0, 1.0, 0.0, 2000, "cpp")[0]
    with pytest.raises(NotImplementedError, match="reference path"):
        grad(lambda q: op(q).sum())(q)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="reference"):
        op(forward_ad.make_dual(q, torch.ones_like(q)))


def test_a_named_backend_is_refused_under_transforms():
    q, k, v = cases.operands(requires_grad=False).values()
    with fused_remat.backend("cpp"), pytest.raises(RuntimeError, match=r"torch\.func"):
        grad(lambda q: fused_remat.attention(q, k, v).sum())(q)
