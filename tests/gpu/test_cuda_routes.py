"""The backend "cuda" goes each of its ways on a GPU, those by libraries and CUTLASS included, and each is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import cuda_routes
import mlp_chunks
import pytest
import torch
from cuda_routes import ATTENTION, BF16, CUT, CUTLASS, ELEMENTWISE, FP16, LAYERS, LIBRARY, OPERATORS, TILES
from gpu_device import captured, kernels_of, needs_gpu, step

import fused_remat
from fused_remat import _cuda_toolkit, dispatch
from fused_remat._triton import arch_of
from fused_remat.check import run as check
from fused_remat.check.cases import ALIGNED, NARROW, Case, Sizes

# Parts of the names of kernels: of CUTLASS with our epilogue, and between library products.
STAGE1, BETWEEN = "stage1", "mlp_dact_kernel"
ATTENTION_SIZES = replace(ALIGNED, workspace=2**29)


@pytest.fixture
def cuda() -> Iterator[None]:
    """The backend is named; skips where it cannot run, with its reasons."""
    call = dispatch.Call("mlp", "cuda", BF16, "gelu", arch=arch_of(torch.device("cuda")))
    if reasons := dispatch.why_not("cuda", call):
        pytest.skip(f"cuda: {'; '.join(reasons)}")
    with fused_remat.backend("cuda"):
        yield


pytestmark = [*needs_gpu, pytest.mark.usefixtures("cuda")]


def skip_without(way: str) -> None:
    """Skips a test of CUTLASS's kernels where none is for this GPU, or they were left out of the library."""
    if way != CUTLASS:
        return
    major, minor = torch.cuda.get_device_capability()
    kind = {8: "sm80", 9: "sm90a"}.get(major)
    if kind is None:
        pytest.skip(f"no kernel of CUTLASS is for compute capability {major}.{minor}")
    if kind not in torch.ops.fused_remat.cutlass_kinds():
        reason = _cuda_toolkit.find_cutlass().reason or f"see `fused-remat doctor`, CUTLASS for {kind}"
        pytest.skip(f"the library was compiled without CUTLASS for {kind}: {reason}")


def judged(case: Case, dtype: torch.dtype, sizes: Sizes) -> None:
    wrong = check.Judge(case, "cuda", dtype, sizes)(case, "cuda", "cuda")
    assert wrong is None, wrong


# MLP ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TILES)
def test_a_tile_goes_its_way_and_is_right(name):
    chunk, way = TILES[name]
    skip_without(way)
    given = mlp_chunks.operands(chunk)
    assert cuda_routes.route(chunk, given)[0] == way
    mlp_chunks.check(chunk, given, ops=cuda_routes.tile_ops())
    forward, backward = cuda_routes.tile_ops()
    made = mlp_chunks.forward(forward, chunk, given)
    products = cuda_routes.tile_products(lambda: mlp_chunks.backward(backward, chunk, given, made))
    assert products == [cuda_routes.products_of(way, cuda_routes.rebuilt(chunk))]  # nobody gave way to another


@pytest.mark.parametrize("name", TILES)
def test_the_kernels_of_a_tile(name):
    chunk, way = TILES[name]
    skip_without(way)
    given = mlp_chunks.operands(chunk)
    forward, backward = cuda_routes.tile_ops()
    made = mlp_chunks.forward(forward, chunk, given)
    names = kernels_of(lambda: mlp_chunks.backward(backward, chunk, given, made))
    assert sum(STAGE1 in kernel for kernel in names) == (way == CUTLASS), names
    assert sum(BETWEEN in kernel for kernel in names) == (way == ELEMENTWISE), names


@pytest.mark.parametrize("dtype", check.HALVES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_goes_its_way(name, dtype):
    """In one tile, and in several on either axis."""
    skip_without(LAYERS[name][0])
    case = cuda_routes.layer(name)
    for sizes in (ALIGNED, *CUT):
        products = cuda_routes.tile_products(lambda sizes=sizes: judged(case, dtype, sizes))
        assert set(products) == {cuda_routes.products_of(*LAYERS[name])}
        assert (len(products) > 1) == (sizes is not ALIGNED)


@pytest.mark.parametrize("dtype", check.HALVES, ids=str)
@pytest.mark.parametrize("name", ("gelu", "gated silu", "dropout"))
def test_a_narrow_layer_is_one_kernel_a_pass(name, dtype):
    case = cuda_routes.layer(name)
    judged(case, dtype, NARROW)
    tensors = check.placed(case.tensors(NARROW), "cuda", dtype)
    names = kernels_of(lambda: step(case, tensors, NARROW))
    assert [kernel for kernel in names if "mlp_small" in kernel] == [
        kernel for kernel in names if "fused_remat" in kernel or "gemm" in kernel
    ]  # fmt: skip
    assert sum("mlp_small_fwd" in kernel for kernel in names) == 1, names
    assert sum("mlp_small_bwd" in kernel for kernel in names) == 1, names


# Sums over tiles ------------------------------------------------------------------------------------------------------


@contextmanager
def fp16_sums() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


@pytest.mark.parametrize("backend", ("cuda", "aten"))
@pytest.mark.parametrize("dtype", check.HALVES, ids=str)
@pytest.mark.parametrize("axis", cuda_routes.SUMMED)
def test_sums_over_tiles_are_not_rounded(axis, dtype, backend):
    """Library products add to float32 sums: that of the first tile sets them, later ones add theirs."""
    case, sizes = cuda_routes.summed(axis)
    cut, tiles = cuda_routes.tiles_of(case, sizes, dtype, backend)
    assert cut == axis and tiles > 2
    judge = check.Judge(case, "cuda", dtype, sizes)
    assert judge(case, "reference", "cuda") is None
    wrong = []
    additions = cuda_routes.additions(lambda: wrong.append(judge(case, backend, "cuda")))
    assert wrong == [None]
    assert additions >= tiles - 1  # without such products there is none: they are rounded, then added


@pytest.mark.parametrize("backend", ("cuda", "aten"))
@pytest.mark.parametrize("axis", cuda_routes.SUMMED)
def test_sums_in_float16_are_torchs_where_it_is_told_so(axis, backend):
    """Such products have no float32 results; a call after the flag is off again has its bits from before."""
    case, sizes = cuda_routes.summed(axis)
    tensors = check.placed(case.tensors(sizes), "cuda", FP16)
    judge = check.Judge(case, "cuda", FP16, sizes)
    with fused_remat.backend(backend):
        before = step(case, tensors, sizes)
        with fp16_sums():
            assert judge(case, backend, "cuda") is None
        after = step(case, tensors, sizes)
    assert all(map(torch.equal, before, after))


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", check.HALVES, ids=str)
@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
@pytest.mark.parametrize("way", OPERATORS)
def test_attention_goes_its_way_and_is_right(way, case, dtype):
    sizes = ATTENTION_SIZES
    judge = check.Judge(case, "cuda", dtype, sizes)
    assert judge(case, "reference", "cuda") is None
    wrong = []
    with cuda_routes.only(way):
        told = fused_remat.explain(
            case.function, **case.arguments(check.placed(case.tensors(sizes), "cuda", dtype), sizes)
        )
        against = told.forward.why_not.get(way, [])
        if way == "cudnn" and any("compute capability" in text or "cuDNN" in text for text in against):
            pytest.skip("; ".join(against))
        seen = cuda_routes.attention_operators(lambda: wrong.append(judge(case, "cuda", "cuda")))
    assert told.forward.kernels == way, against
    assert told.backward.kernels == ("own" if way == "cudnn" else way), told.backward.why_not
    assert seen == set(filter(None, OPERATORS[way]))
    assert wrong == [None]


def test_by_default_attention_takes_the_first_way_that_keeps_its_bits():
    """Of a Hopper GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("which ways are preferred depends on the GPU")
    full, sizes = ATTENTION[0], ATTENTION_SIZES
    tensors = check.placed(full.tensors(sizes), "cuda", BF16)
    for context, allowed in (
        (nullcontext(), {OPERATORS["cudnn"][0], OPERATORS["flash"][0], OPERATORS["efficient"][1]}),
        (cuda_routes.deterministic(), set(OPERATORS["flash"])),
    ):
        with context:
            seen = cuda_routes.attention_operators(lambda: step(full, tensors, sizes))
            again = [step(full, tensors, sizes) for _ in range(2)]
        assert len(seen) == 2 and seen <= allowed
        assert all(map(torch.equal, *again))


# Graphs ---------------------------------------------------------------------------------------------------------------

GRAPHS = {
    "library epilogues": (cuda_routes.layer("gelu_tanh, LayerNorm"), ALIGNED, LIBRARY),
    "cutlass": (cuda_routes.layer("gelu"), ALIGNED, CUTLASS),
    "cutlass, gated, in tiles": (cuda_routes.layer("gated silu"), CUT[0], CUTLASS),
    "narrow": (cuda_routes.layer("gated silu"), NARROW, ""),
    "attention": (ATTENTION[1], ATTENTION_SIZES, ""),
}


@pytest.mark.parametrize("dtype", check.HALVES, ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_replays_forward_and_backward_to_the_same_bits(name, dtype):
    case, sizes, way = GRAPHS[name]
    skip_without(way)
    tensors = check.placed(case.tensors(sizes), "cuda", dtype)
    expected = step(case, tensors, sizes)
    graph, results = captured(lambda: step(case, tensors, sizes))
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))
