"""Multi-head attention from x under torch.compile, compiled autograd, export, opcheck and torch.func."""

from __future__ import annotations

import mha_cases as cases
import pytest
import spy
import torch
from mha_cases import Block
from test_mha_checkpoint import Layer
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.library import opcheck

import fused_remat
from fused_remat import ops

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    # torch's own tracing does all of this.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
PLAIN = Block(length=9, model=8, heads=4, kv_heads=2, width=4)
EVERYTHING = Block(
    heads=4, kv_heads=2, width=6, value_width=3, norm="layer_norm", qk_norm=True, rotary=4, bias_kv=True,
    zero_key=True, mask="float+padding",
)  # fmt: skip
THREE = Block(length_k=7, model_k=5, model_v=8, separate_value=True, packed=False, norm="rms_norm")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def _step(function, layer, x):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    outputs = function(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.square().sum() for output in outputs).backward()
    return [*(o.detach() for o in outputs), x.grad, *(p.grad.clone() for p in layer.parameters())]


def _assert_equal(ours, truth):
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("settings", ({}, {"keep": (), "is_causal": True}, {"need_weights": True}), ids=str)
@pytest.mark.parametrize(
    "block", (PLAIN, Block(norm="rms_norm", qk_norm=True, rotary=4, zero_key=True)), ids=("plain", "norms")
)
def test_fullgraph_forward_and_backward(block, settings):
    layer, x = Layer(block, **settings), torch.randn(2, block.length, block.model)
    _assert_equal(_step(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, x), _step(layer, layer, x))


@pytest.mark.slow
def test_fullgraph_with_inductor():
    layer, x = Layer(), torch.randn(2, 9, 8)
    _assert_equal(_step(torch.compile(layer, fullgraph=True), layer, x), _step(layer, layer, x))


def test_dropout_under_compile_replays_its_mask():
    given = PLAIN.operands()
    compiled = torch.compile(lambda g: PLAIN._call(g, {"dropout_p": 0.5}), fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    y = compiled(given)
    truth = PLAIN.reference(given, seed=4, dropout_p=0.5)
    dy = torch.randn_like(y)
    cases.assert_same({"y": y} | cases.gradients(y, given, dy), {"y": truth} | cases.gradients(truth, given, dy), 1e-9)


def test_dynamic_lengths_recompile_at_most_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    layer = Layer(is_causal=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for length in (16, 33, 47, 64):
        x = torch.randn(2, length, 8)
        _assert_equal(_step(compiled, layer, x), _step(layer, layer, x))
    assert counter.frame_count <= 2


def test_compiled_graph_saves_neither_projections_nor_scores():
    block = Block(length=37, model=8, heads=2, kv_heads=2, width=23)
    layer, x = Layer(block, keep=()), torch.randn(2, 37, 8, requires_grad=True)
    parameters = {tuple(p.shape) for p in layer.parameters()}
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    others = [shape for shape in shapes if shape not in parameters]
    assert others and not any(23 in shape or 46 in shape or shape.count(37) > 1 for shape in others)


def test_compiled_autograd_twice_with_different_data():
    layer = Layer(dropout_p=0.3, need_weights=True, keep=("k", "v"))
    for _ in range(2):
        x, state = torch.randn(2, 9, 8), torch.get_rng_state()
        truth = _step(layer, layer, x)
        torch.set_rng_state(state)
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        loss = sum(output.square().sum() for output in layer(leaf))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
        _assert_equal([leaf.grad, *[p.grad for p in layer.parameters()]], truth[2:])


def test_export_with_a_dynamic_batch():
    layer = Layer()
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(layer, (torch.randn(3, 9, 8),), dynamic_shapes=({0: batch},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "fused_remat.multi_head_attention.default" in targets
    x = torch.randn(5, 9, 8)
    torch.testing.assert_close(program.module()(x), layer(x))
    torch.testing.assert_close(program.run_decompositions().module()(x), layer(x))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_no_grad_and_inference_mode(mode):
    layer, x = Layer(keep=("q", "out")), torch.randn(2, 9, 8)
    expected = layer(x)
    with mode():
        y = layer(x)
        assert not y.requires_grad and torch.equal(y, expected)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)


# Every registered op ------------------------------------------------------------------------------------------------


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
    seen = set()
    grid = (
        (PLAIN, {"keep": ()}), (EVERYTHING, {"need_weights": True, "dropout_p": 0.2}), (THREE, {"keep": ("q", "out")})
    )  # fmt: skip
    for block, settings in grid:
        given = block.operands(dtype)
        if layout != "contiguous":
            x = given["query"].detach()
            x = x.transpose(0, 1).contiguous().transpose(0, 1) if layout == "transposed" else x[:1].expand(x.shape)
            given["query"] = x.requires_grad_()
        for name, arguments in spy.samples(lambda b=block, g=given, s=settings: b.call(g, **s), backend):
            results = opcheck(getattr(torch.ops.fused_remat, name).default, arguments)
            assert set(results.values()) == {"SUCCESS"}, name
            seen.add(name)
        arguments = level1_arguments(block, given, settings, backend)
        assert set(opcheck(torch.ops.fused_remat.multi_head_attention.default, arguments).values()) == {"SUCCESS"}
    ours = {
        name
        for name in spy.registered_for(backend)
        if any(part in name for part in ("attention", "normalize", "transform")) and not name.endswith("_reference")
    }
    assert ours <= seen | {"attention", "attention_fwd", "attention_bwd", "multi_head_attention"}


def level1_arguments(block, given, settings, backend):
    """What the functional call passes to the level-1 op."""
    ops.ready()  # which describes the op to torch, not what stands in for it
    op, caught = torch.ops.fused_remat.multi_head_attention, []

    class Found(Exception):
        pass

    def catch(*arguments):
        caught.append(arguments)
        raise Found

    torch.ops.fused_remat.multi_head_attention = catch
    try:
        with pytest.raises(Found):
            block.call(given, backend=backend, **settings)
    finally:
        torch.ops.fused_remat.multi_head_attention = op
    return caught[0]


# torch.func and forward mode ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", (False, True))
def test_per_sample_gradients(need_weights):
    layer, x = Layer(need_weights=need_weights), torch.randn(3, 1, 9, 8)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, sample):
        outputs = functional_call(layer, parameters, (sample,))
        return sum(o.square().sum() for o in (outputs if need_weights else (outputs,)))

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        layer.zero_grad()
        loss(dict(layer.named_parameters()), sample).backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(batched[name][i], p.grad, rtol=1e-4, atol=1e-5)


def test_jvp_and_dual_numbers():
    layer = Layer().double()
    x, tangent, epsilon = torch.randn(2, 9, 8).double(), torch.randn(2, 9, 8).double(), 1e-6
    numeric = (layer(x + epsilon * tangent) - layer(x - epsilon * tangent)) / (2 * epsilon)
    torch.testing.assert_close(jvp(layer, (x,), (tangent,))[1], numeric, rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(dual.tangent, numeric, rtol=1e-6, atol=1e-7)


def test_a_named_backend_is_refused_under_transforms():
    layer, x = Layer(), torch.randn(2, 9, 8)
    with fused_remat.backend("cpp"), pytest.raises(RuntimeError, match=r"torch\.func"):
        grad(lambda x: layer(x).sum())(x)
