"""The attention op on every memory layout of its operands, with offsets beyond 32 bits, and on sizes of 0."""

from __future__ import annotations

import attention_cases as cases
import pytest
import torch

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)


def _layouts(batch, heads, length, width):
    """[B, H, L, E] tensors in every layout that a caller may bring."""
    make = lambda *shape: torch.randn(shape, dtype=torch.float64)
    yield "contiguous", make(batch, heads, length, width)
    yield "heads after lengths", make(batch, length, heads, width).transpose(1, 2)
    yield "length first", make(length, batch, heads, width).permute(1, 2, 0, 3)
    yield "part of a fused projection", make(batch, length, 3, heads, width)[:, :, 1].transpose(1, 2)
    yield "without the last rows", make(batch, heads, length + 5, width)[:, :, :-5]
    yield "every second row", make(batch, heads, 2 * length, width)[:, :, ::2]
    yield "expanded over the batch", make(1, heads, length, width).expand(batch, heads, length, width)
    yield "expanded over heads", make(batch, 1, length, width).expand(batch, heads, length, width)
    yield "one value", torch.full((), 0.7, dtype=torch.float64).expand(batch, heads, length, width)
    yield "width first", make(batch, heads, width, length).transpose(2, 3)
    yield "last stride 2", make(batch, heads, length, 2 * width)[..., ::2]


@BACKEND
@pytest.mark.parametrize("layout", [name for name, _ in _layouts(2, 3, 1, 1)])
def test_strides_of_inputs_and_of_the_incoming_gradient(layout, backend):
    laid = [dict(_layouts(2, 3, 33, 16))[layout] for _ in "qkv"]
    given = {name: value.detach().requires_grad_() for name, value in zip("qkv", laid, strict=True)}
    out = cases.run(given, backend=backend, workspace=1, is_causal=True)
    truth_out = cases.run_reference({name: value.contiguous() for name, value in given.items()}, is_causal=True)
    torch.testing.assert_close(out, truth_out, rtol=1e-10, atol=1e-10)
    for dout_layout, dout in _layouts(2, 3, 33, 16):
        ours = cases.gradients(out, given, dout, retain_graph=True)
        truth = cases.gradients(truth_out, given, dout.contiguous(), retain_graph=True)
        cases.assert_same(ours, truth, 1e-10, dout_layout)
    ours, truth = (torch.autograd.grad(y.sum(), given["k"])[0] for y in (out, truth_out))
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)


@BACKEND
def test_different_strides_for_each_input_and_shared_heads(backend):
    layouts = [layout for layout, _ in _layouts(1, 1, 1, 1)]
    for shift in range(1, len(layouts)):
        given, contiguous = {}, {}
        for position, (name, heads) in enumerate((("q", 6), ("k", 2), ("v", 2))):
            laid = dict(_layouts(2, heads, 13, 8))[layouts[(position * shift) % len(layouts)]]
            given[name] = laid.detach().requires_grad_()
            contiguous[name] = laid.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        out, truth_out = cases.run(given, backend=backend), cases.run_reference(contiguous)
        dout = torch.randn_like(truth_out)
        ours, truth = cases.gradients(out, given, dout), cases.gradients(truth_out, contiguous, dout)
        cases.assert_same({"out": out} | ours, {"out": truth_out} | truth, 1e-10, shift)


def _mask_layouts(batch, heads, length_q, length_k):
    make = lambda *shape: torch.randn(shape, dtype=torch.float64)
    yield "contiguous", make(batch, heads, length_q, length_k)
    yield "keys before queries", make(batch, heads, length_k, length_q).transpose(2, 3)
    yield "heads last", make(batch, length_q, length_k, heads).permute(0, 3, 1, 2)
    yield "part of a longer one", make(batch, heads, length_q + 7, length_k + 9)[:, :, 3:-4, 2:-7]
    yield "every second key", make(batch, heads, length_q, 2 * length_k)[..., ::2]
    yield "expanded over the batch", make(1, heads, length_q, length_k).expand(batch, -1, -1, -1)
    yield "expanded over heads and queries", make(batch, 1, 1, length_k).expand(-1, heads, length_q, -1)
    yield "expanded over keys", make(batch, heads, length_q, 1).expand(-1, -1, -1, length_k)
    yield "2-D, transposed", make(length_k, length_q).t()


@BACKEND
@pytest.mark.parametrize("dtype", (torch.float64, torch.bool), ids=str)
def test_strides_of_masks(dtype, backend):
    given = cases.operands(2, 3, 18, 41, 4)
    dout = torch.randn(2, 3, 18, 4, dtype=torch.float64)
    for layout, mask in _mask_layouts(2, 3, 18, 41):
        if dtype == torch.bool:
            mask = _as_bool(mask)
        everything = given | {"attn_mask": mask.detach().requires_grad_(dtype != torch.bool)}
        contiguous = given | {"attn_mask": mask.detach().contiguous().requires_grad_(dtype != torch.bool)}
        padding = torch.ones(41, 2, dtype=torch.bool).t()
        padding[1, 30:] = False
        ours = cases.run(everything, backend=backend, key_padding_mask=padding, workspace=1)
        truth = cases.run_reference(contiguous, key_padding_mask=padding.contiguous())
        results = [
            {"out": y} | cases.gradients(y, tensors, dout) for y, tensors in ((ours, everything), (truth, contiguous))
        ]
        cases.assert_same(*results, 1e-10, layout)


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    """True where above -1/2, in the layout of `mask`."""
    strided = torch.zeros(mask.untyped_storage().nbytes() // mask.element_size(), dtype=torch.bool)
    strided = strided.as_strided(mask.shape, mask.stride(), mask.storage_offset())
    if 0 not in mask.stride():
        return strided.copy_(mask > -0.5)
    view = mask[tuple(slice(1) if stride == 0 else slice(None) for stride in mask.stride())]
    return (view > -0.5).expand(mask.shape)


# Offsets --------------------------------------------------------------------------------------------------------------


def _far_apart(shape, strides, dtype, values):
    """A tensor whose strides reach beyond 2^31 elements, in memory that is never touched between them."""
    base = torch.empty(2**31 + 65536, dtype=dtype)
    return base.as_strided(shape, strides).copy_(values)


@BACKEND
@pytest.mark.parametrize("dim", ("heads", "lengths"))
@pytest.mark.parametrize("name", ("q", "k", "v", "bool mask", "float mask", "padding", "dout"))
def test_offsets_beyond_32_bits(name, dim, backend):
    heads, length = (2, 8) if dim == "heads" else (1, 2)
    far = lambda inner: (0, 2**31, inner, 1) if dim == "heads" else (0, 0, 2**31, 1)
    given = cases.operands(1, heads, length, length, 16, dtype=torch.bfloat16)
    near = dict(given)
    dout = near_dout = torch.randn(1, heads, length, 16).bfloat16()
    masks = {}
    if name in given:
        given[name] = _far_apart((1, heads, length, 16), far(16), torch.bfloat16, given[name].detach()).requires_grad_()
    elif name == "dout":
        dout = _far_apart((1, heads, length, 16), far(16), torch.bfloat16, dout)
    elif name == "padding":
        masks["key_padding_mask"] = torch.rand(1, 2) < 0.9
        given, near = ({n: v[:, :, :2] for n, v in g.items()} for g in (given, near))
        dout = near_dout = dout[:, :, :2]
    else:
        values = torch.randn(1, heads, length, length).bfloat16()
        masks["attn_mask"] = values if name == "float mask" else values > -1
    near_masks = dict(masks)
    for argument, mask in masks.items():
        strides = far(length) if argument == "attn_mask" else (0, 2**31)
        masks[argument] = _far_apart(mask.shape, strides, mask.dtype, mask)
    results = []
    for tensors, mask, incoming in ((given, masks, dout), (near, near_masks, near_dout)):
        out = cases.run(tensors, backend=backend, **mask)
        results.append({"out": out} | cases.gradients(out, tensors, incoming))
    for tensor in results[1]:
        assert torch.equal(results[0][tensor], results[1][tensor]), tensor


# Sizes of 0 -----------------------------------------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("empty", ("batch", "queries", "keys", "width", "value width", "heads"))
def test_sizes_of_zero(empty, backend):
    sizes = {"batch": 2, "heads": 2, "queries": 3, "keys": 4, "width": 5, "value width": 6}
    sizes[empty] = 0
    b, h, i, j, e, f = sizes.values()
    shapes = {"q": (b, h, i, e), "k": (b, max(h, 1), j, e), "v": (b, max(h, 1), j, f)}
    given = {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    for settings in (
        {},
        {"is_causal": True, "dropout_p": 0.3},
        {"attn_mask": torch.zeros(i, j, dtype=torch.float64, requires_grad=True)},
        {"key_padding_mask": torch.ones(b, j, dtype=torch.bool)},
    ):
        everything = given | {n: v for n, v in settings.items() if n == "attn_mask"}
        out, lse = cases.run(given, backend=backend, return_lse=True, **settings)
        truth, truth_lse = cases.run_reference(given, return_lse=True, **settings)
        assert out.shape == (b, h, i, f) and out.requires_grad
        torch.testing.assert_close(out, truth)
        torch.testing.assert_close(lse, truth_lse)
        assert empty != "keys" or ((out == 0).all() and (lse == -torch.inf).all())
        dout = torch.randn_like(out)
        cases.assert_same(
            cases.gradients(out, everything, dout),
            cases.gradients(truth, everything, dout, materialize_grads=True),
            1e-12,
            settings,
        )
