"""Attention by torch's own kernels, end to end: stand-ins on the CPU run what only a GPU would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch_kernels
from attention_facts import (
    BF16,
    BOTTOM_RIGHT,
    FORWARD,
    FP16,
    FP32,
    FP64,
    MIB,
    NONE,
    TOP_LEFT,
    TORCH,
    Facts,
    bytes_of_one,
    rows,
)
from cuda_routes import OPERATORS, deterministic, without
from simt import build as simt_build
from torch import Tensor
from torch_kernels import Call

import fused_remat

ops = torch.ops.fused_remat


@pytest.fixture(autouse=True)
def hopper(capability) -> None:
    """Without it the host code sees no GPU that torch has kernels for."""
    capability(90)


@pytest.fixture
def calls() -> Iterator[list[Call]]:
    with torch_kernels.standing_in() as seen:
        yield seen


def operands(facts: Facts, layout: str = "dense") -> tuple[Tensor, ...]:
    """q, k, v and dout; "blocks": as a projection of all three leaves them."""
    batch, heads, kv_heads, length_q, length_k, width, value_width = facts.sizes
    shapes = ((heads, length_q, width), (kv_heads, length_k, width), (kv_heads, length_k, value_width),
              (heads, length_q, value_width))  # fmt: skip

    def tensor(n: int, length: int, size: int) -> Tensor:
        t = torch.randn(batch, length, n, size, dtype=FP64).to(facts.dtype)
        if layout == "blocks":
            return torch.cat((t, t), 3)[..., :size].transpose(1, 2)
        return t.transpose(1, 2).contiguous()

    return tuple(tensor(*shape) for shape in shapes)


def forward(backend: str, facts: Facts, q: Tensor, k: Tensor, v: Tensor, workspace: int = 512 * MIB):
    return ops.attention_fwd(
        q, k, v, None, None, facts.causal, *facts.window, 0.0, 0.3, 0.0, workspace, backend, None,
        torch.empty(0, dtype=torch.int64),
    )  # fmt: skip


def backward(backend: str, facts: Facts, given, out, lse, *, dlse=None, workspace: int = 512 * MIB):
    q, k, v, dout = given
    return ops.attention_bwd(
        dout, dlse, q, k, v, None, None, facts.causal, *facts.window, 0.0, 0.3, 0.0, workspace, backend, None,
        torch.empty(0, dtype=torch.int64), out, lse, [True, True, True, False, False],
    )[:3]  # fmt: skip


def assert_as_exact_as_aten(facts: Facts, given: tuple[Tensor, ...], found: dict[str, Tensor]) -> None:
    wide = tuple(t.double() for t in given)

    def all_of(given: tuple[Tensor, ...]) -> dict[str, Tensor]:
        out, lse = forward("aten", facts, *given[:3])
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *backward("aten", facts, given, out, lse)),
                        strict=True))  # fmt: skip

    truth, stock = all_of(wide), all_of(given)
    for name, exact in truth.items():
        error, allowed = ((made[name].double() - exact).norm() for made in (found, stock))
        floor = {FP32: 1e-6, FP16: 1e-3, BF16: 8e-3}[facts.dtype] * exact.norm()
        assert exact.norm() > 0 and error <= 2 * allowed + floor, (name, error, allowed)


def run(facts: Facts, layout: str = "dense", forward_by: str = "cuda", backward_by: str = "cuda", **sizes) -> None:
    given = operands(facts, layout)
    out, lse = forward(forward_by, facts, *given[:3], **sizes)
    gradients = backward(backward_by, facts, given, out, lse, **sizes)
    names = ("out", "lse", "dq", "dk", "dv")
    assert_as_exact_as_aten(facts, given, dict(zip(names, (out, lse, *gradients), strict=True)))


# The first row with nothing against it in forward, where those before it are switched off.
SMALL = FORWARD.but(sizes=(16, 8, 8, 40, 40, 16, 16))
GROUPED = FORWARD.but(sizes=(32, 8, 4, 40, 33, 16, 16))
CASES = {
    "full": SMALL,
    "float16": SMALL.but(dtype=FP16),
    "causal": SMALL.but(causal=TOP_LEFT),
    "grouped": GROUPED,
    "grouped causal": GROUPED.but(causal=TOP_LEFT),
    "more keys, bottom right": SMALL.sized(length_k=57).but(causal=BOTTOM_RIGHT),
    "more keys, top left": SMALL.sized(length_k=57).but(causal=TOP_LEFT),
    "one query": GROUPED.sized(length_q=1),
    "window": SMALL.sized(length_k=44).but(causal=BOTTOM_RIGHT, window=(7, -1)),
    "two-sided window": SMALL.sized(length_k=38).but(window=(7, 3)),
    "narrow values": SMALL.sized(value_width=8),
    "float32": SMALL.but(dtype=FP32).sized(width=12, value_width=20),
}


@pytest.mark.parametrize(("case", "layout"), (*((case, "blocks") for case in CASES), ("full", "dense")))
@pytest.mark.parametrize("route", TORCH)
def test_torchs_kernels_end_to_end(route, case, layout, calls):
    facts = CASES[case]
    passes = (facts, facts.but(backward=True))
    # torch counts cuDNN among what is not deterministic, and flash is so only when asked to be.
    with without(*(name for name in TORCH if name != route)), nullcontext() if route == "cudnn" else deterministic():
        expected = {op for op, asked in zip(OPERATORS[route], passes, strict=True) if not rows(asked)[route]}
        run(facts, layout)
    assert {call.name for call in calls} == expected
    if case == "full":
        assert len(expected) == (1 if route == "cudnn" else 2)


@pytest.mark.parametrize("other", ("cpp", "aten"))
@pytest.mark.parametrize("route", ("flash", "efficient"))
def test_forward_and_backward_by_others(route, other, calls):
    names = OPERATORS[route]
    with without(*(name for name in TORCH if name != route)), deterministic():
        run(GROUPED, forward_by=other)
        assert {call.name for call in calls} == {names[1]}
        calls.clear()
        run(GROUPED, backward_by=other)
        assert {call.name for call in calls} == {names[0]}


def test_default_choices(calls):
    run(SMALL)
    assert [call.name for call in calls] == ["_scaled_dot_product_cudnn_attention", "_efficient_attention_backward"]
    calls.clear()
    run(SMALL.sized(batch=2))  # too few heads for one block each
    assert [call.name for call in calls] == ["_scaled_dot_product_cudnn_attention"]


def test_arguments_that_kernels_are_given(calls):
    causal = SMALL.but(causal=BOTTOM_RIGHT).sized(length_k=44)
    wider = SMALL.but(causal=TOP_LEFT).sized(length_k=38)  # above the diagonal that flash counts from
    window = SMALL.but(window=(7, 3)).sized(length_k=38)
    with without("cudnn", "efficient"), deterministic():
        for facts in (SMALL, causal, wider, window):
            run(facts)
    kinds = [(c["is_causal"], c["window_size_left"], c["window_size_right"], c["scale"]) for c in calls]
    assert kinds[::2] == kinds[1::2]  # forward and backward alike
    assert kinds[::2] == [(False, None, None, 0.3), (True, None, None, 0.3), (False, None, 2, 0.3), (False, 5, 5, 0.3)]
    calls.clear()
    with without("cudnn", "flash"):
        for facts in (SMALL, causal, SMALL.but(causal=TOP_LEFT).sized(length_k=44)):
            run(facts)
    assert [c["custom_mask_type"] for c in calls] == [0, 0, 2, 2, 1, 1]
    assert {c["scale"] for c in calls} == {0.3}


@pytest.mark.parametrize("route", ("flash", "efficient"))
def test_pieces_stay_within_the_scratch(route, calls):
    """An eighth of the workspace is for what implementers allocate."""
    facts = GROUPED.sized(length_q=64, length_k=64)
    whole = facts.but(scratch=2**40)
    names = OPERATORS[route]
    with without(*(name for name in TORCH if name != route)), deterministic():
        assert rows(whole)[route] == []
        one = bytes_of_one(facts, route)
        run(facts, workspace=8 * 20 * one)
        pieces = [call["query"].shape for call in calls if call.name == names[0]]
        calls.clear()
        run(facts, workspace=8 * (one - 1))
        too_small = [call for call in calls if call.name == names[0]]
    assert not too_small
    heads = 8 if route == "flash" else 4
    assert all(shape[2] == heads for shape in pieces) and len(pieces) > 1, pieces
    samples = sum(shape[0] for shape in pieces)
    assert samples == 32 * (1 if route == "flash" else 2)
    most = max(shape[0] for shape in pieces)
    assert most * 4 <= 20


def test_heads_of_one_sample_in_pieces(calls):
    facts = FORWARD.but(sizes=(2, 8, 4, 64, 64, 16, 16))
    one = bytes_of_one(facts, "flash")
    with without("cudnn", "efficient"):
        run(facts, workspace=8 * 2 * one)
    assert [tuple(call["query"].shape[:3]) for call in calls] == [(1, 64, 4)] * 4


def test_windows_mean_to_flash_what_they_mean_to_us(calls):
    """Its sides count from another corner, and long ones are read as none."""
    seen = set()
    with without("cudnn", "efficient"):
        for _ in range(300):
            length_q, length_k, left, right, causal = (
                int(torch.randint(low, high, ())) for low, high in ((1, 9), (1, 9), (-1, 9), (-1, 9), (0, 3))
            )
            facts = SMALL.but(sizes=(1, 1, 1, length_q, length_k, 8, 8), causal=causal, window=(left, right))
            seen.add(rows(facts)["flash"] == [])
            calls.clear()
            q, k, v, _ = operands(facts)
            ours, theirs = (forward(backend, facts, q, k, v)[1] for backend in ("cuda", "aten"))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert bool(calls) == (rows(facts)["flash"] == [])
    assert seen == {True, False}


def test_a_gradient_of_lse_is_for_kernels_that_take_delta(calls):
    given = operands(SMALL)
    out, lse = forward("aten", SMALL, *given[:3])
    dlse = torch.randn_like(lse)
    found = backward("cuda", SMALL, given, out, lse, dlse=dlse)
    assert calls == []
    for ours, theirs in zip(found, backward("aten", SMALL, given, out, lse, dlse=dlse), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)
    backward("cuda", SMALL, given, out, lse)
    assert [call.name for call in calls] == ["_efficient_attention_backward"]


def test_gradients_that_nobody_wants():
    given = operands(SMALL)
    out, lse = forward("aten", SMALL, *given[:3])
    fixed = (torch.empty(0, dtype=torch.int64), out, lse)
    arguments = (None, None, NONE, -1, -1, 0.0, 0.3, 0.0, 512 * MIB, "cuda", None, *fixed)
    with torch_kernels.standing_in() as calls:
        everything = ops.attention_bwd(given[3], None, *given[:3], *arguments, [True] * 3 + [False] * 2)
        for wanted in range(3):
            mask = [which == wanted for which in range(5)]
            some = ops.attention_bwd(given[3], None, *given[:3], *arguments, mask)
            assert torch.equal(some[wanted], everything[wanted])
            assert all(some[which].numel() == 0 for which in range(5) if which != wanted)
    assert len(calls) == 4


@pytest.mark.parametrize("keep", ((), ("out",)))
def test_a_block_from_x(keep, calls):
    """`out` of a group is the kept one or the rebuilt one."""
    x = torch.randn(16, 40, 32, dtype=BF16, requires_grad=True)
    w_in, w_out = (torch.randn(n, 32, dtype=BF16).div(8).requires_grad_() for n in (3 * 128, 32))
    w_out = torch.randn(32, 128, dtype=BF16).div(8).requires_grad_()

    def step(backend: str) -> list[Tensor]:
        with fused_remat.backend(backend):
            y = fused_remat.multi_head_attention(x, None, None, w_in, None, w_out, None, num_heads=8, keep=keep)
        y = y[0] if isinstance(y, tuple) else y
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, w_in, w_out))]

    found = step("cuda")
    assert {call.name for call in calls} == {OPERATORS["cudnn"][0], "_efficient_attention_backward"}
    for ours, theirs in zip(found, step("aten"), strict=True):
        assert (ours.float() - theirs.float()).norm() <= 3e-2 * theirs.float().norm()


@pytest.mark.parametrize("route", TORCH)
def test_the_same_bits_again(route, calls):
    given = operands(GROUPED)
    with without(*(name for name in TORCH if name != route)):
        first, second = (forward("cuda", GROUPED, *given[:3], workspace=MIB) for _ in range(2))
        assert all(map(torch.equal, first, second)) and calls
        gradients = [backward("cuda", GROUPED, given, *first) for _ in range(2)]
    assert all(map(torch.equal, *gradients))


@pytest.mark.skipif(torch.version.cuda is None, reason="torch built for CUDA alone has fake CUDA tensors")
def test_torchs_own_meta_functions_take_these_arguments(calls):
    from torch._subclasses import FakeTensorMode

    with without("cudnn"), deterministic():
        run(GROUPED)
        with without("flash"):
            run(SMALL)
    run(SMALL)
    assert {call.name for call in calls} == {name for pair in OPERATORS.values() for name in pair if name}
    with FakeTensorMode() as mode:
        for call in calls:
            if call.name == "_efficient_attention_backward":
                continue  # whose meta function lacks `out`, which the schema has
            fake = {name: _on_gpu(mode, value) for name, value in call.items()}
            order = [argument for argument in call.op._schema.arguments]
            args = [fake[argument.name] for argument in order if not argument.kwarg_only]
            named = {argument.name: fake[argument.name] for argument in order if argument.kwarg_only}
            made = call.op(*args, **named)
            heads = call["query"].dim() - 1
            for theirs, ours in zip(made, call.results, strict=True):
                if isinstance(theirs, Tensor) and isinstance(ours, Tensor) and theirs.dim() >= heads:
                    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype, call.name


def _on_gpu(mode, value):
    if not isinstance(value, Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


CALLER = """
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include "aten_call.h"

using fused_remat::cuda::AtenCall;

TORCH_LIBRARY_FRAGMENT(fused_remat_test, m) {
  m.def("sum(Tensor a, str name, int dim) -> Tensor", [](at::Tensor a, std::string name, int64_t dim) {
    AtenCall call("aten::narrow_copy");
    call.with({"self", "of_an_older_torch"}, a).with({"of_another", name.c_str()}, dim);
    if (dim == 0) call.with("start", 1).with("length", 2);
    return call()[0].toTensor();
  });
  m.def("absent() -> ()", [] { AtenCall("aten::_no_such_attention"); });
}
"""


@pytest.mark.slow
def test_arguments_by_name(tmp_path):
    """An operator or an argument that a version of torch lacks, or one that it asks for, is an error that names it."""
    source = tmp_path / "caller.cpp"
    source.write_text(CALLER)
    torch.ops.load_library(simt_build.build("caller", [source, simt_build.CSRC / "cuda/aten_call.cpp"]))
    caller, a = torch.ops.fused_remat_test, torch.arange(5)
    assert caller.sum(a, "dim", 0).tolist() == [1, 2]
    switch = re.escape("switch that kernel off with torch.backends.cuda.enable_*_sdp(False)")
    with pytest.raises(NotImplementedError, match=rf"narrow_copy.* of torch .* has no argument of_another; {switch}"):
        caller.sum(a, "axis", 0)
    with pytest.raises(NotImplementedError, match=rf"asks for start; {switch}"):
        caller.sum(a, "dim", 1)
    with pytest.raises(NotImplementedError, match=rf"has no operator aten::_no_such_attention; {switch}"):
        caller.absent()
