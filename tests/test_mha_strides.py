"""Multi-head attention from x on every memory layout, with offsets beyond 32 bits, and on sizes of 0."""

from __future__ import annotations

from dataclasses import replace

import mha_cases as cases
import pytest
import torch
from mha_cases import Block, results

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)


def _layouts(batch, length, width):
    make = lambda *shape: torch.randn(shape, dtype=torch.float64)
    yield "contiguous", make(batch, length, width)
    yield "length first", make(length, batch, width).transpose(0, 1)
    yield "width first", make(batch, width, length).transpose(1, 2)
    yield "slice of a wider tensor", make(batch, length, width + 5)[..., 2:-3]
    yield "every second row", make(batch, 2 * length, width)[:, ::2]
    yield "expanded over the batch", make(1, length, width).expand(batch, length, width)
    yield "one value", torch.ones((), dtype=torch.float64).expand(batch, length, width)
    yield "last stride 2", make(batch, length, 2 * width)[..., ::2]


@BACKEND
@pytest.mark.parametrize("cross", (False, True), ids=("self", "cross"))
def test_strides_of_inputs_and_of_the_incoming_gradient(cross, backend):
    block = Block(length=9, length_k=9 if cross else None, separate_value=cross, heads=3, kv_heads=3, model=6, out=5)
    given = block.operands()
    for layout, x in _layouts(2, 9, 6):
        inputs = {name: x.detach().requires_grad_() for name in ("query", "key", "value") if name in given}
        laid, contiguous = given | inputs, given | {name: t.contiguous() for name, t in inputs.items()}
        y, truth_y = block.call(laid, backend=backend, workspace=1), block.reference(contiguous)
        torch.testing.assert_close(y, truth_y, rtol=1e-10, atol=1e-10)
        for dy_layout, dy in _layouts(2, 9, 5):
            ours = cases.gradients(y, laid, dy, retain_graph=True)
            truth = cases.gradients(truth_y, laid, dy.contiguous(), retain_graph=True)
            cases.assert_same(ours, truth, 1e-10, (layout, dy_layout))


@BACKEND
def test_transposed_and_strided_weights(backend):
    block = Block(packed=False, heads=2, width=4, norm="layer_norm", bias_kv=True)
    given = block.operands()
    dy = torch.randn(2, 5, 6, dtype=torch.float64)
    truth = results(block, given, dy, backend="reference")
    for layout in (lambda w: w.t().contiguous().t(), lambda w: torch.cat((w, w), 1)[:, : w.shape[1]]):
        laid = {n: layout(v.detach()) if v.dim() == 2 else v.detach() for n, v in given.items()}
        laid = {n: v.repeat_interleave(3)[::3] if v.dim() == 1 else v for n, v in laid.items()}
        laid = {n: v.requires_grad_() for n, v in laid.items()}
        cases.assert_same(results(block, laid, dy, backend=backend, workspace=1), truth, 1e-10)


def test_the_same_tensor_twice_is_self_attention():
    block = Block(norm=None)
    given = block.operands()
    twice = replace(block, length_k=5, separate_value=True)
    x = given["query"]
    y = twice.call(given | {"key": x, "value": x})
    assert torch.equal(y, block.call(given))
    dy = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(block.call(given), x, dy)[0])


@BACKEND
@pytest.mark.parametrize("sizes", ({"batch": 0}, {"length": 0}, {"length": 3, "length_k": 0}), ids=str)
def test_sizes_of_zero(sizes, backend):
    block = Block(**{"model": 8, "width": 4} | {k: v for k, v in sizes.items() if v or k != "length_k"})
    given = block.operands()
    if "length_k" in sizes:
        given["key"] = torch.randn(2, 0, 8, dtype=torch.float64, requires_grad=True)
    for settings in ({}, {"is_causal": True, "dropout_p": 0.3}, {"keep": ()}):
        y, weights = block.call(given, backend=backend, need_weights=True, **settings)
        truth, truth_weights = block.reference(given, need_weights=True, **settings)
        torch.testing.assert_close(y, truth)
        torch.testing.assert_close(weights, truth_weights)
        if "length_k" in sizes:
            torch.testing.assert_close(y, given["out_proj_bias"].expand(y.shape))
        douts = torch.randn_like(y), torch.randn_like(weights)
        ours = cases.gradients((y, weights), given, douts)
        cases.assert_same(ours, cases.gradients((truth, truth_weights), given, douts), 1e-12, settings)


@BACKEND
@pytest.mark.parametrize("name", ("query", "key", "dy"))
def test_offsets_beyond_32_bits(name, backend):
    """The second sample lies 2^31 elements behind the first, in memory that is never touched."""

    def far(values):
        base = torch.empty(2**31 + 65536, dtype=values.dtype)
        return base.as_strided(values.shape, (2**31, values.shape[2], 1)).copy_(values)

    block = Block(length=8, model=16, width=8, length_k=8 if name == "key" else None)
    given = block.operands(torch.bfloat16)
    dy = torch.randn(2, 8, 16).bfloat16()
    truth = results(block, given, dy, backend=backend)
    if name == "dy":
        dy = far(dy)
    else:
        given[name] = far(given[name].detach()).requires_grad_()
    for tensor, value in results(block, given, dy, backend=backend).items():
        assert torch.equal(value, truth[tensor]), tensor
