"""The MLP op against the reference and stock torch: values, precision, strides, dropout, determinism, extremes."""

from __future__ import annotations

import mlp_cases as cases
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st

import fused_remat
from fused_remat.activations import ACTIVATIONS

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)


def assert_same(ours, truth, tolerance, label=""):
    for name in truth:
        torch.testing.assert_close(
            ours[name], truth[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{label} {n}: {m}"
        )


@settings(deadline=None, max_examples=60)
@hypothesis_given(data=st.data())
def test_any_shape_agrees_with_the_reference(data):
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    rows, width, hidden, out = (data.draw(st.integers(low, 40)) for low in (0, 1, 1, 1))
    gated, bias, backend = draw(False, True), draw(False, True), draw(*cases.BACKENDS)
    keep = draw((), ("up",), data.draw(st.floats(0, 1)))
    chosen = {"activation": draw(*ACTIVATIONS), "dropout_p": draw(0.0, 0.25, 0.9)}
    given = cases.operands(rows, width, hidden, out, gated=gated, bias=bias)
    dy = torch.randn(rows, out, dtype=torch.float64)
    truth_y = cases.run_reference(given, **chosen)
    y = cases.run(given, backend=backend, keep=keep, workspace=data.draw(st.integers(1, 20_000)), **chosen)
    assert_same({"y": y}, {"y": truth_y}, 1e-9)
    assert_same(cases.gradients(y, given, dy), cases.gradients(truth_y, given, dy), 1e-9)


@GATED
@pytest.mark.parametrize("backend", cases.BACKENDS)
@pytest.mark.parametrize("chunks", (1, 4, 16))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("rows", (48, 320), ids=("feature-chunks", "token-chunks"))
def test_error_is_at_most_twice_that_of_eager(rows, dtype, chunks, backend, gated):
    given = cases.operands(rows, 32, 96, gated=gated, dtype=dtype)
    width = -(-(96 if rows == 48 else rows) // chunks)
    width = width if width < 8 else -(-width // 8) * 8
    exact = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    dy = torch.randn(rows, 32, dtype=torch.float64).to(dtype)
    workspace = cases.workspace_for(given, width, backend) if chunks > 1 else 2**24
    truth = cases.run_reference(exact)
    truth = {"y": truth} | cases.gradients(truth, exact, dy.double())
    eager = cases.run_reference(given)
    eager = {"y": eager} | cases.gradients(eager, given, dy)
    ours = cases.run(given, backend=backend, workspace=workspace)
    ours = {"y": ours} | cases.gradients(ours, given, dy)
    # Far below one rounding of the dtype, and far below any gradient here.
    floor = torch.finfo(dtype).eps / 8
    for name in truth:
        assert ours[name].dtype == eager[name].dtype
        error, allowed = cases.relative_error(ours[name], truth[name]), cases.relative_error(eager[name], truth[name])
        assert error <= 2 * allowed + floor, (name, error, allowed)


@GATED
def test_forward_and_backward_on_different_backends_agree(gated):
    given = cases.operands(9, 5, 12, gated=gated, requires_grad=False)
    layer = cases.op_layer(given)
    seed, dy = torch.tensor([5]), torch.randn(9, 5, dtype=torch.float64)
    chosen = ("silu", 0.2)
    mask = cases.output_mask(*[True] * 5, gated, gated)
    keep = (7, 4 if gated else 0)
    results = []
    for forward in cases.BACKENDS:
        for backward in cases.BACKENDS:
            y, up, gate = torch.ops.fused_remat.mlp_fwd(
                given["x"], *layer, *chosen, *keep, 1500, forward, torch.float64, seed
            )
            grads = torch.ops.fused_remat.mlp_bwd(
                dy, given["x"], *layer, *chosen, *keep, 1500, backward, torch.float64, seed, None, up, gate, mask
            )
            results.append([y, *grads])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@GATED
@BACKEND
@pytest.mark.parametrize("rows", (24, 200), ids=("feature-chunks", "token-chunks"))
def test_same_bits_on_every_rerun_and_thread_count(rows, backend, gated):
    given = cases.operands(rows, 48, 64, gated=gated, dtype=torch.float32)
    dy = torch.randn(rows, 48)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 2, 4, 1):
            torch.set_num_threads(threads)
            y = cases.run(given, backend=backend, dropout_p=0.1, workspace=40_000)
            torch.set_num_threads(5 - threads)
            runs.append([y.detach(), *cases.gradients(y, given, dy).values()])
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            # ATen's own column sums may regroup by thread; everything that we schedule may not.
            assert torch.equal(a, b) if backend == "cpp" or a.dim() > 1 else torch.allclose(a, b, atol=1e-4)


@GATED
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_kept_and_rebuilt_residuals_give_the_same_bits(dtype, gated):
    given = cases.operands(40, 16, 33, gated=gated, dtype=dtype)
    dy = torch.randn(40, 16).to(dtype)
    runs = []
    for keep in ((), ("up", "gate") if gated else ("up",), 1.0):
        y = cases.run(given, backend="cpp", keep=keep)
        runs.append([y.detach(), *cases.gradients(y, given, dy).values()])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


# Strides ----------------------------------------------------------------------------------------------------------


def _layouts(shape):
    """Tensors of that shape with every layout a caller may bring."""
    *lead, last = shape
    yield "contiguous", torch.randn(shape, dtype=torch.float64)
    yield "transposed", torch.randn(last, *lead, dtype=torch.float64).movedim(0, -1)
    yield "leading dims swapped", torch.randn(lead[1], lead[0], last, dtype=torch.float64).transpose(0, 1)
    yield "slice of a wider tensor", torch.randn(*lead, last + 5, dtype=torch.float64)[..., 2:-3]
    yield "every second row", torch.randn(lead[0], 2 * lead[1], last, dtype=torch.float64)[:, ::2]
    yield "expanded over the batch", torch.randn(1, lead[1], last, dtype=torch.float64).expand(shape)
    yield "one value", torch.ones((), dtype=torch.float64).expand(shape)
    yield "last stride 2", torch.randn(*lead, 2 * last, dtype=torch.float64)[..., ::2]


@GATED
@BACKEND
def test_strides_of_x_and_of_the_incoming_gradient(backend, gated):
    given = cases.operands((3, 11), 6, 10, 4, gated=gated)
    for x_layout, x in _layouts((3, 11, 6)):
        given["x"] = x.detach().requires_grad_()
        y = cases.run(given, backend=backend, workspace=3000)
        truth_y = cases.run_reference(given | {"x": given["x"].contiguous()})
        torch.testing.assert_close(y, truth_y, rtol=1e-10, atol=1e-10)
        for dy_layout, dy in _layouts((3, 11, 4)):
            ours = cases.gradients(y, given, dy, retain_graph=True)
            truth = cases.gradients(truth_y, given, dy.contiguous(), retain_graph=True)
            assert_same(ours, truth, 1e-10, f"{x_layout}/{dy_layout}")


@BACKEND
def test_transposed_and_strided_weights(backend):
    given = cases.operands(5, 6, 8, gated=True)
    truth_y = cases.run_reference(given)
    dy = torch.randn(5, 6, dtype=torch.float64)
    truth = cases.gradients(truth_y, given, dy)
    for layout in (lambda w: w.t().contiguous().t(), lambda w: torch.cat([w, w], 1)[:, : w.shape[1]]):
        laid = {name: layout(v.detach()) if name.startswith("w_") else v.detach() for name, v in given.items()}
        laid |= {name: v.repeat_interleave(3)[::3] for name, v in laid.items() if name.startswith("b_")}
        laid = {name: v.requires_grad_() for name, v in laid.items()}
        y = cases.run(laid, backend=backend, workspace=2000)
        torch.testing.assert_close(y, truth_y, rtol=1e-12, atol=1e-12)
        assert_same(cases.gradients(y, laid, dy), truth, 1e-12)


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_offsets_beyond_32_bits(gated):
    """The second row of x and of dy lies 2^31 elements behind the first, in memory that is never touched."""
    given = cases.operands(2, 16, 8, gated=gated, dtype=torch.bfloat16)
    far = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    for name, near in (("x", given["x"].detach()), ("dy", torch.randn(2, 16).bfloat16())):
        apart = far.as_strided((2, 16), (2**31, 1), 0 if name == "x" else 2048)
        apart.copy_(near)
        given[name] = apart
    dy = given.pop("dy")
    results = []
    for compact in (False, True):
        x = given["x"].detach()
        used = given | {"x": (x.contiguous() if compact else x).requires_grad_()}
        y = cases.run(used, backend="cpp")
        results.append([y.detach(), *cases.gradients(y, used, dy.contiguous() if compact else dy).values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Empty and tiny inputs ----------------------------------------------------------------------------------------------


@GATED
@BACKEND
@pytest.mark.parametrize("shape", ((0, 8), (2, 0, 8), (8,), (1, 8)), ids=str)
def test_empty_and_unbatched_inputs(shape, backend, gated):
    given = cases.operands(1, 8, 5, gated=gated)
    given["x"] = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for settings_ in ({}, {"keep": 0.5, "dropout_p": 0.4}):
        y = cases.run(given, backend=backend, **settings_)
        truth = cases.run_reference(given, dropout_p=settings_.get("dropout_p", 0.0))
        assert y.shape == shape
        torch.testing.assert_close(y, truth)
        dy = torch.randn(shape, dtype=torch.float64)
        assert_same(cases.gradients(y, given, dy), cases.gradients(truth, given, dy), 1e-12)


# Extremes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", (8, 16, 17, 31))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_very_large_pre_activations(activation, dtype, hidden):
    points = torch.tensor([-1e4, -200, -100, -90, -20, -13.3, 13.3, 20, 90, 1e4]).to(dtype)
    ones = {"w_up": torch.ones(hidden, 1), "w_down": torch.eye(hidden)}
    ones = {name: value.to(dtype).requires_grad_() for name, value in ones.items()}
    x = points.view(-1, 1).clone().requires_grad_()
    stock = points.view(-1, 1).expand(-1, hidden).float().clone().requires_grad_()
    dy = torch.randn(len(points), hidden).to(dtype)
    value = ACTIVATIONS[activation](stock)
    (slope,) = torch.autograd.grad(value, stock, dy.float())
    for backend in cases.BACKENDS:
        y = cases.run({"x": x} | ones, backend=backend, activation=activation)
        (dw_up,) = torch.autograd.grad(y, ones["w_up"], dy)
        # In bf16 a sigmoid that rounds to 1 has lost a slope of this size, in stock torch as here.
        tolerance, floor = (1e-6, 1e-6) if dtype == torch.float32 else (2e-2, 1e-4)
        torch.testing.assert_close(y.float(), value, rtol=tolerance, atol=1e-6)
        truth = (slope * points.float().view(-1, 1)).sum(0)
        scale = (slope * points.float().view(-1, 1)).abs().sum(0)
        assert ((dw_up.float().view(-1) - truth).abs() <= tolerance * scale + floor).all()


@BACKEND
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_positions_match_stock(activation, backend):
    given = {
        "x": torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [0.0], [1.0]]),
        "w_up": torch.ones(9, 1),
    }
    given["w_down"] = torch.eye(9)[:4]
    # One output per hidden feature; the other products are 0 * value, NaN exactly where the value is not finite.
    ours = cases.run(given, backend=backend, activation=activation)
    truth = cases.run_reference(given, activation=activation)
    torch.testing.assert_close(ours, truth, equal_nan=True)


# Other people's tensors ---------------------------------------------------------------------------------------------


@GATED
@BACKEND
def test_backward_writes_to_nobody_elses_tensor(backend, gated):
    p = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    given = cases.operands(6, 5, 9, gated=gated)
    results = []
    for forward in (lambda g: cases.run(g, backend=backend, keep=0.4), cases.run_reference):
        a = p.exp()  # exp saves its output, which is our x
        loss = forward(given | {"x": a}).sum() + 2 * a.sum()
        results.append(torch.autograd.grad(loss, p)[0])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    before = {name: value.detach().clone() for name, value in given.items()}
    dy = torch.randn(6, 5, dtype=torch.float64)
    dy_before = dy.clone()
    y = cases.run(given, backend=backend, keep=0.4, dropout_p=0.2)
    first = cases.gradients(y, given, dy, retain_graph=True)
    second = cases.gradients(y, given, dy)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(dy, dy_before) and all(torch.equal(before[name], given[name]) for name in before)


@pytest.mark.parametrize("name", ("x", "w_up", "w_down", "w_gate", "b_up"))
def test_changing_an_operand_after_forward_is_an_error(name):
    given = cases.operands(6, 5, 9, gated=True)
    y = cases.run(given)
    with torch.no_grad():
        given[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_backward_through_the_same_graph():
    given = cases.operands(6, 5, 9, gated=True)
    y = cases.run(given, dropout_p=0.3)
    y.sum().backward(retain_graph=True)
    once = {name: value.grad.clone() for name, value in given.items()}
    y.sum().backward()
    for name, value in given.items():
        torch.testing.assert_close(value.grad, 2 * once[name], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = cases.run(given, dropout_p=0.3)
    (dx,) = torch.autograd.grad(y.sum(), given["x"], retain_graph=True)
    rest = torch.autograd.grad(y.sum(), [v for n, v in given.items() if n != "x"])
    for gradient, name in zip([dx, *rest], given, strict=True):
        assert torch.equal(gradient, once[name])


def test_x_without_gradient_still_trains_the_weights():
    given = cases.operands(6, 5, 9)
    given["x"].requires_grad_(False)
    weights = {name: value for name, value in given.items() if name != "x"}
    y, truth = cases.run(given), cases.run_reference(given)
    dy = torch.randn(6, 5, dtype=torch.float64)
    assert y.requires_grad
    assert_same(cases.gradients(y, weights, dy), cases.gradients(truth, weights, dy), 1e-10)


def test_packed_gate_and_up_weights_in_either_order():
    packed = torch.randn(14, 5, dtype=torch.float64)
    x, w_down = torch.randn(3, 5, 5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    x *= (10.0 ** (torch.arange(15) % 4)).view(3, 5, 1).double() * 0.01
    results = []
    for gate, up in ((slice(0, 7), slice(7, 14)), (slice(7, 14), slice(0, 7))):
        leaf, weight = x.clone().requires_grad_(), packed.clone().requires_grad_()
        y = fused_remat.mlp(leaf, weight[up], w_down, w_gate=weight[gate], activation="silu")
        truth_leaf, truth_weight = x.clone().requires_grad_(), packed.clone().requires_grad_()
        truth = (F.silu(truth_leaf @ truth_weight[gate].t()) * (truth_leaf @ truth_weight[up].t())) @ w_down.t()
        dy = torch.randn_like(y)
        y.backward(dy)
        truth.backward(dy)
        torch.testing.assert_close(y, truth, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(leaf.grad, truth_leaf.grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(weight.grad, truth_weight.grad, rtol=1e-9, atol=1e-9)
        assert (leaf.grad.abs().sum(-1) > 0).all() and (weight.grad.abs().sum(-1) > 0).all()
        results.append(y.detach())
    assert (results[0] - results[1]).abs().max() > 1e-2
