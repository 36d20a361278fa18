"""torch.compile, compiled autograd, export, opcheck, torch.func and forward-mode AD."""

from __future__ import annotations

import mlp_cases as cases
import pytest
import spy
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.library import opcheck

import fused_remat
from fused_remat import reference

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    # torch's own tracing does all of this.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]
LAYERS = pytest.mark.parametrize("cls", (fused_remat.MLP, fused_remat.GatedMLP))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def _step(function, layer, x):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in layer.parameters()]]


def _assert_equal(ours, truth):
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@LAYERS
@pytest.mark.parametrize("keep", ((), 0.5), ids=str)
def test_fullgraph_forward_and_backward(cls, keep):
    layer, x = cls(8, 32, keep=keep), torch.randn(4, 8)
    _assert_equal(_step(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, x), _step(layer, layer, x))


@pytest.mark.slow
def test_fullgraph_with_inductor():
    layer, x = fused_remat.GatedMLP(8, 32), torch.randn(4, 8)
    _assert_equal(_step(torch.compile(layer, fullgraph=True), layer, x), _step(layer, layer, x))


def test_dropout_under_compile_replays_its_mask():
    given = cases.operands(6, 4, 8, dtype=torch.float64)
    compiled = torch.compile(lambda **g: fused_remat.mlp(**g, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    y = compiled(**given)
    truth = cases.run_reference(given, seed=4, dropout_p=0.5)
    torch.testing.assert_close(y, truth)
    dy = torch.randn_like(y)
    ours, expected = cases.gradients(y, given, dy), cases.gradients(truth, given, dy)
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name])


@LAYERS
def test_dynamic_lengths_recompile_at_most_once(cls):
    layer = cls(8, 32)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for length in (16, 33, 47, 64):
        x = torch.randn(2, length, 8)
        _assert_equal(_step(compiled, layer, x), _step(layer, layer, x))
    assert counter.frame_count <= 2


@LAYERS
def test_compiled_graph_saves_nothing_of_the_hidden_width(cls):
    layer, x = cls(8, 97), torch.randn(40, 8, requires_grad=True)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert shapes and not any(97 in shape and 40 in shape for shape in shapes)


@LAYERS
def test_compiled_autograd_twice_with_different_data(cls):
    layer = cls(8, 32, keep=0.25, dropout=0.3)
    for _ in range(2):
        x, state = torch.randn(5, 8), torch.get_rng_state()
        truth = _step(layer, layer, x)
        torch.set_rng_state(state)
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        loss = layer(leaf).square().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
        _assert_equal([leaf.grad, *[p.grad for p in layer.parameters()]], truth[1:])


@LAYERS
def test_export_with_a_dynamic_batch(cls):
    layer = cls(8, 32)
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(layer, (torch.randn(3, 8),), dynamic_shapes=({0: batch},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["fused_remat.mlp.default"]
    x = torch.randn(5, 8)
    torch.testing.assert_close(program.module()(x), layer(x))
    decomposed = program.run_decompositions()
    torch.testing.assert_close(decomposed.module()(x), layer(x))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_no_grad_and_inference_mode(mode):
    layer, x = fused_remat.MLP(8, 16, keep=1.0), torch.randn(3, 8)
    expected = layer(x)
    with mode():
        y = layer(x)
        assert not y.requires_grad and torch.equal(y, expected)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)


# Every registered op ------------------------------------------------------------------------------------------------


def _level1(given, backend):
    width = given["x"].shape[-1]
    ones = torch.ones(width, dtype=given["x"].dtype, requires_grad=True)
    for kept, norm in (((0, 0), None), ((3, 2), fused_remat.Norm("layer_norm", ones, ones))):
        yield "mlp", (given["x"], *cases.op_layer(given, norm), "gelu", 0.0, *kept, 2000, backend)


def _level2(given, backend):
    given = {name: value.detach() for name, value in given.items()}
    rows, hidden, dtype = given["x"].shape[:-1].numel(), given["w_up"].shape[0], given["x"].dtype
    for p in (0.0, 0.3):
        seed = torch.tensor([3]) if p else torch.empty(0, dtype=torch.int64)
        call = (given["x"], *cases.op_layer(given), "silu", p, 3, 2, 2000, backend, dtype, seed)
        yield "mlp_fwd", call
        dy = torch.randn(*given["x"].shape[:-1], given["w_down"].shape[0]).to(dtype)
        up, gate = (torch.randn(rows, n).to(dtype) for n in (hidden, 2))
        for mask in (cases.output_mask(*[True] * 7), cases.output_mask(*[True, False] * 3)):
            yield "mlp_bwd", (dy, *call, None, up, gate, mask)


def _level3(given, backend):
    given = {name: value.detach() for name, value in given.items()}
    x = given["x"].reshape(-1, given["x"].shape[-1])
    rows, hidden, dtype, sums = x.shape[0], given["w_up"].shape[0], x.dtype, torch.float32
    buffer = lambda n=hidden: torch.zeros(rows, n, dtype=dtype)
    w_up, w_down, b_up, _, w_gate, b_gate, *_ = cases.op_layer(given)
    seed = torch.empty(0, dtype=torch.int64)
    chosen = (seed, "silu", 0.0, 0, 0, hidden)
    yield (
        f"mlp_fwd_chunk_{backend}",
        (x, w_up, b_up, w_gate, b_gate, *chosen, buffer(3), buffer(0), buffer(), buffer()),
    )
    dy = torch.randn(rows, w_down.shape[0]).to(dtype)
    db = [torch.zeros(hidden, dtype=sums) for _ in range(2)]
    buffers = [buffer() for _ in range(4)]
    yield (
        f"mlp_bwd_chunk_{backend}",
        (x, dy, w_up, w_down, b_up, w_gate, b_gate, buffer(3), buffer(0), *chosen, *buffers, *db),
    )
    yield f"column_sums_{backend}", (dy, torch.zeros(dy.shape[1], dtype=sums))


@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("layout", ("contiguous", "transposed", "expanded"))
def test_opcheck_every_op(layout, dtype, backend):
    given = cases.operands((2, 3), 4, 6, 5, gated=True, dtype=dtype)
    if layout == "transposed":
        given["x"] = torch.randn(3, 2, 4).to(dtype).transpose(0, 1).requires_grad_()
    elif layout == "expanded":
        given["x"] = torch.randn(1, 3, 4).to(dtype).expand(2, 3, 4).requires_grad_()
    seen = set()
    for samples in (_level1, _level2, _level3):
        for name, args in samples(given, backend):
            results = opcheck(getattr(torch.ops.fused_remat, name).default, args)
            assert set(results.values()) == {"SUCCESS"}, name
            seen.add(name)
    ours = {name for name in spy.registered_for(backend) if name.startswith(("mlp", "column_sums"))}
    assert seen == ours - {"mlp_reference"}


def test_inner_ops_refuse_to_be_differentiated():
    given = cases.operands(3, 4, 6)
    y, _, _ = torch.ops.fused_remat.mlp_fwd(
        given["x"],
        *cases.op_layer(given),
        "gelu",
        0.0,
        0,
        0,
        2000,
        "cpp",
        torch.float64,
        torch.empty(0, dtype=torch.int64),
    )
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()


# torch.func and forward mode ------------------------------------------------------------------------------------------


@LAYERS
def test_per_sample_gradients(cls):
    layer, x = cls(6, 16), torch.randn(3, 4, 6)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, sample):
        return functional_call(layer, parameters, (sample,)).square().sum()

    batched = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, sample in enumerate(x):
        layer.zero_grad()
        layer(sample).square().sum().backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(batched[name][i], p.grad, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grad(loss)(parameters, sample)[name], p.grad, rtol=1e-5, atol=1e-5)


@LAYERS
def test_jvp_and_dual_numbers(cls):
    layer, x, tangent = cls(6, 16).double(), torch.randn(4, 6).double(), torch.randn(4, 6).double()
    epsilon = 1e-6
    numeric = (layer(x + epsilon * tangent) - layer(x - epsilon * tangent)) / (2 * epsilon)
    torch.testing.assert_close(jvp(layer, (x,), (tangent,))[1], numeric, rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(dual.tangent, numeric, rtol=1e-6, atol=1e-7)


def test_the_bare_op_refuses_transforms_instead_of_dropping_them():
    given = cases.operands(3, 4, 6, requires_grad=False)
    op = lambda x: torch.ops.fused_remat.mlp(x, *cases.op_layer(given), "gelu", 0.0, 0, 0, 2000, "cpp")
    with pytest.raises(NotImplementedError, match="reference path"):
        grad(lambda x: op(x).sum())(given["x"])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="reference"):
        op(forward_ad.make_dual(given["x"], torch.ones_like(given["x"])))


def test_a_named_backend_is_refused_under_transforms():
    layer, x = fused_remat.MLP(6, 16), torch.randn(4, 6)
    with fused_remat.backend("cpp"), pytest.raises(RuntimeError, match=r"torch\.func"):
        grad(lambda x: layer(x).sum())(x)


def test_second_derivative_of_a_training_step():
    layer, x = fused_remat.GatedMLP(6, 16).double(), torch.randn(4, 6).double().requires_grad_()
    results = []
    for function in (layer, lambda x: reference.mlp(
        x, layer.up_proj.weight, layer.down_proj.weight, w_gate=layer.gate_proj.weight, activation="silu"
    )):  # fmt: skip
        (dx,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), [x, *layer.parameters()]))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)
