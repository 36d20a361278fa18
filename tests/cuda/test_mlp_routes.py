"""The ways that stage 1 of a backward tile goes on CUDA C++: which is chosen and why, and that all agree."""

from __future__ import annotations

import ctypes

import cuda_routes
import mlp_cases as cases
import mlp_chunks as chunks
import pytest
import torch
from cuda_routes import CUTLASS, ELEMENTWISE, LIBRARY
from mlp_chunks import Chunk
from torch.autograd.profiler import profile

from fused_remat.activations import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
HALVES = (torch.bfloat16, torch.float16)
# Fits every way.
EVEN = Chunk(rows=19, width=16, features=40, out=24, dtype=torch.bfloat16, activation="gelu_tanh")
_route = cuda_routes.route


def _ops():
    return torch.ops.fused_remat.mlp_fwd_chunk_cuda, torch.ops.fused_remat.mlp_bwd_chunk_cuda


def _check(chunk: Chunk, given=None, **settings):
    return chunks.check(chunk, given, ops=_ops(), **settings)


def _products(call) -> int:
    """Products by ATen in `call()`; those of the stand-ins for cuBLASLt and CUTLASS are not among them."""
    with profile() as trace:
        call()
    return sum(event.name in ("aten::mm", "aten::addmm") for event in trace.function_events)


@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no-bias"))
@pytest.mark.parametrize("dtype", (*HALVES, torch.float32), ids=str)
def test_library_epilogues(dtype, bias):
    """All products by cuBLASLt, forward and backward, with operands dense in either dim."""
    chunk = EVEN.but(dtype=dtype, bias=bias)
    assert _route(chunk) == [LIBRARY]
    given = chunks.operands(chunk)
    assert _products(lambda: _check(chunk, given)) == 2 * 2  # of plain torch: forward and dhidden, in two dtypes
    for name in ("x", "dy", "w_up", "w_down"):
        columns = torch.empty(given[name].shape[1], 64, dtype=dtype).t()[: given[name].shape[0]].copy_(given[name])
        wide = torch.empty(given[name].shape[0], 64, dtype=dtype)[:, : given[name].shape[1]].copy_(given[name])
        for other in (columns, wide):
            assert _route(chunk, given | {name: other}) == [LIBRARY]
            chunks.assert_same(_check(chunk, given | {name: other}), _check(chunk, given))


def test_library_without_an_algorithm_gives_way_and_tells(capability):
    """The stand-in for the library refuses this width."""
    chunk = EVEN.but(features=8 * 13)
    given = chunks.operands(chunk)
    refused = f"{LIBRARY}: the library has no algorithm"
    assert _route(chunk, given)[:2] == [ELEMENTWISE, refused]
    _check(chunk, given)
    capability(86)
    assert _route(chunk, given) == [CUTLASS, refused]
    _check(chunk, given)


# Hidden with its pre-activations, then the gradient; where the first is refused, as in 104 features, nothing else.
@pytest.mark.parametrize(("features", "asked"), ((40, (2, 3, 4)), (104, (1, 2, 2))), ids=("taken", "refused"))
def test_library_is_asked_once_for_each_kind_of_product(features, asked, cuda_on_cpu):
    """Also of operands that lie elsewhere: what starts on 16 bytes alone may not take what 64 allow."""
    chunk = EVEN.but(rows=21, features=features)
    given, rows = chunks.operands(chunk), chunk.rows
    hidden, dup, scratch = (torch.empty(rows, features, dtype=chunk.dtype) for _ in range(3))
    dgate, up, gate = (torch.empty(n, 0, dtype=chunk.dtype) for n in (0, rows, rows))
    seed, sums = torch.empty(0, dtype=torch.int64), torch.empty(0)

    def run(given):
        weights = [given.get(name) for name in ("w_up", "w_down", "b_up", "w_gate", "b_gate")]
        place = (seed, chunk.activation, 0.0, 0, 0, features)
        _ops()[1](given["x"], given["dy"], *weights, up, gate, *place, hidden, dup, dgate, scratch, sums, sums)
        return cuda_on_cpu.simt_cublaslt_questions() - before

    before = cuda_on_cpu.simt_cublaslt_questions()
    assert run(given) == asked[0]
    made = hidden.clone(), dup.clone()
    assert run(given) == asked[0]
    for name, so_far in zip(("x", "dy"), asked[1:], strict=True):
        flat = torch.empty(given[name].numel() + 8, dtype=chunk.dtype)
        assert run(given | {name: flat[8:].view_as(given[name]).copy_(given[name])}) == so_far
        assert torch.equal(hidden, made[0]) and torch.equal(dup, made[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    (
        ({"gated": True}, "the layer is gated"),
        ({"activation": "gelu"}, "the activation is not gelu_tanh"),
        ({"activation": "relu"}, "the activation is not gelu_tanh"),
        ({"dropout_p": 0.1}, "hidden values are dropped"),
        ({"kept": (8, 0)}, "pre-activations are kept"),
        ({"dtype": torch.float64}, "the dtype is none of float32, float16 and bfloat16"),
        ({"features": 36}, "rows of a matrix do not start at 16 bytes"),
        ({"width": 12}, "rows of a matrix do not start at 16 bytes"),
        ({"out": 12}, "rows of a matrix do not start at 16 bytes"),
        ({"width": 1}, "a matrix is too small"),
    ),
)
def test_why_not_library_epilogues(changes, reason):
    chunk = EVEN.but(**changes)
    if changes == {"out": 12}:  # its rows alone: those of w_down are as long as hidden's
        given = chunks.operands(chunk)
        assert _route(chunk, given)[1] == f"{LIBRARY}: {reason}"
    route = _route(chunk)
    assert route[0] == ELEMENTWISE and route[1] == f"{LIBRARY}: {reason}"
    _check(chunk)


@pytest.mark.parametrize("name", ("x", "dy", "w_up", "w_down"))
def test_rows_that_overlap_are_no_matrix_of_a_library(name, capability):
    """No leading dimension is below a row's length: with the row's for it, rows would be read that are not there."""
    capability(86)
    chunk = EVEN.but(width=40, out=40)
    given = chunks.operands(chunk)
    rows, columns = given[name].shape
    expanded = given[name][:1].expand(rows, columns)
    shifted = torch.randn(rows * 8 + columns, dtype=torch.float64).to(chunk.dtype).as_strided((rows, columns), (8, 1))
    for matrix in (expanded, shifted):
        route = _route(chunk, given | {name: matrix})
        assert route[1] == f"{LIBRARY}: rows of a matrix overlap"
        if name in ("dy", "w_down"):  # the others meet ATen's products alone
            assert route[0] == ELEMENTWISE and route[2] == f"{CUTLASS}: rows of dy or w_down overlap"
        else:
            assert route[0] == CUTLASS
        _check(chunk, given | {name: matrix})
    alone = chunk.but(rows=1)  # one row has no next
    given = chunks.operands(alone)
    assert _route(alone, given | {"dy": given["dy"].as_strided((1, 40), (0, 1))}) == [LIBRARY]


def test_library_epilogues_need_room_and_one_dtype():
    assert _route(EVEN, scratch=0)[1] == f"{LIBRARY}: the scratch has no room for the pre-activations"
    given = chunks.operands(EVEN)
    wide = given | {"b_up": given["b_up"].float()}
    assert _route(EVEN, wide)[1] == f"{LIBRARY}: the operands have different dtypes"
    shifted = given | {"b_up": torch.empty(1 + EVEN.features, dtype=EVEN.dtype)[1:].copy_(given["b_up"])}
    assert _route(EVEN, shifted)[1] == f"{LIBRARY}: the bias does not start at 16 bytes"
    _check(EVEN, shifted)
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    try:
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        assert _route(EVEN.but(dtype=torch.float16))[1] == f"{LIBRARY}: sums in float16 are asked for"
        assert _route(EVEN) == [LIBRARY]
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


def test_library_epilogues_read_either_of_torchs_flags_for_tf32():
    """Torch raises where its older question is asked and only the newer flag was set."""
    chunk = EVEN.but(dtype=torch.float32)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        _check(chunk)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _cutlass_calls(library) -> dict[str, int]:
    """How often each GEMM's stand-in ran since the last question."""
    return {kind: library.simt_cutlass_calls(ctypes.c_bool(kind == "sm90a")) for kind in ("sm80", "sm90a")}


@pytest.mark.parametrize("arch", (86, 90))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_cutlass(activation, gated, arch, dtype, capability, cuda_on_cpu):
    """The operands that its kernel is given, through a stand-in that takes them as the kernel does."""
    capability(arch)
    _cutlass_calls(cuda_on_cpu)
    for kept in ((0, 0), (40, 40), (8, 24), (40, 0)):
        chunk = EVEN.but(
            activation=activation, gated=gated, dtype=dtype, dropout_p=0.2, kept=(kept[0], kept[1] * gated)
        )
        assert _route(chunk)[0] == CUTLASS
        _check(chunk)
    _check(chunk.but(bias=False))
    calls = _cutlass_calls(cuda_on_cpu)
    assert (calls["sm80"] > 0, calls["sm90a"] > 0) == (arch < 90, arch == 90)


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_cutlass_with_biases_of_another_dtype(gated, capability):
    chunk = EVEN.but(activation="silu", gated=gated, kept=(8, 0))
    given = chunks.operands(chunk)
    wide = given | {name: given[name].float() for name in ("b_up", "b_gate") if name in given}
    elementwise = _check(chunk, wide)
    capability(80)
    assert _route(chunk, wide)[0] == CUTLASS
    for name, value in _check(chunk, wide).items():
        torch.testing.assert_close(value, elementwise[name], rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("arch", "changes", "reason"),
    (
        (0, {}, "no kernel was compiled for this device"),
        (100, {}, "no kernel was compiled for this device"),
        (80, {"dtype": torch.float32}, "the dtype is neither float16 nor bfloat16"),
        (80, {"features": 36}, "the number of features is no multiple of 8"),
        (80, {"out": 12}, "the output width is no multiple of 8"),
    ),
)
def test_why_not_cutlass(arch, changes, reason, capability):
    capability(arch)
    chunk = EVEN.but(activation="silu", **changes)
    route = _route(chunk)
    assert route[0] == ELEMENTWISE and route[2] == f"{CUTLASS}: {reason}"
    _check(chunk)


def test_cutlass_needs_dense_rows_of_one_dtype(capability):
    capability(80)
    chunk = EVEN.but(activation="silu")
    given = chunks.operands(chunk)
    for name in ("dy", "w_down"):
        columns = given | {name: given[name].t().contiguous().t()}
        assert _route(chunk, columns)[2] == f"{CUTLASS}: rows of dy or w_down are not dense"
        _check(chunk, columns)


def test_the_whole_layer_goes_by_the_library():
    """The plan leaves room for the pre-activations, whole and in chunks on both axes, within the promised bytes."""
    for rows, hidden in ((24, 64), (200, 16)):
        given = cases.operands(rows, 16, hidden, dtype=torch.float32)
        for workspace in (2**13, 2**20):
            _, tile_rows, features, nbytes = cases.plan(given, workspace, "cuda", activation="gelu_tanh")
            assert nbytes <= workspace
            assert (tile_rows * features < rows * hidden) == (workspace == 2**13)

            def step(given=given, workspace=workspace):
                y = cases.run(given, backend="cuda", activation="gelu_tanh", workspace=workspace)
                y.backward(torch.ones_like(y))

            names = _names(step)
            tiles = -(-rows // tile_rows) * -(-hidden // features)
            assert names.count("fused_remat::mlp_bwd_chunk_cuda") == tiles
            assert "aten::addmm" not in _inside(step, "fused_remat::mlp_bwd_chunk_cuda")


def _names(call) -> list[str]:
    with profile() as trace:
        call()
    return [event.name for event in trace.function_events]


def _inside(call, name: str) -> set[str]:
    """Names of what ran inside the ops of that name."""
    with profile() as trace:
        call()
    return {child.name for event in trace.function_events if event.name == name for child in event.cpu_children}
