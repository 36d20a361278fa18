"""What a GPU is asked to prove goes where it is said to: the same calls, on CPU tensors and stand-ins for libraries."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import cuda_routes
import mlp_chunks
import pytest
import torch
import torch_kernels
from cuda_routes import LAYERS, OPERATORS, TILES
from mlp_cases import kernels_of

from benchmarks import sanitized
from fused_remat.check import run as check
from fused_remat.check.cases import ALIGNED, NARROW, SMALL, Sizes

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16
ONE_OF_EACH_WAY = ("gelu_tanh", "gated, one kept, some of the other", "odd features")  # a second each


@pytest.mark.parametrize("name", TILES)
def test_tiles(name, capability):
    capability(86)
    chunk, way = TILES[name]
    given = mlp_chunks.operands(chunk)
    assert cuda_routes.route(chunk, given)[0] == way
    if name in ONE_OF_EACH_WAY:
        forward, backward = cuda_routes.tile_ops()
        made = mlp_chunks.forward(forward, chunk, given)
        products = cuda_routes.tile_products(lambda: mlp_chunks.backward(backward, chunk, given, made))
        assert products == [cuda_routes.products_of(way, cuda_routes.rebuilt(chunk))]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_the_aligned_size(name, capability):
    """All products of a tile are right, and as few of them are ATen's as its way leaves."""
    capability(86)
    rows = []
    products = cuda_routes.tile_products(lambda: rows.append(_row(name, ALIGNED)))
    assert rows[0].passed, rows[0].detail
    assert products == [cuda_routes.products_of(*LAYERS[name])]
    assert rows[0].case == f"{name}, aligned"


def test_layers_of_odd_sizes_do_not_go_there(capability):
    capability(86)
    sizes = replace(ALIGNED, hidden=ALIGNED.hidden - 1)
    for name in ("gelu", "gelu_tanh, LayerNorm"):
        assert cuda_routes.tile_products(lambda name=name: _row(name, sizes)) == [2]


def _row(name: str, sizes: Sizes) -> check.Row:
    case = cuda_routes.layer(name)
    return check.judged_row(case, "bfloat16", "cuda", "cpu", BF16, sizes, check.Judge(case, "cpu", BF16, sizes))


@pytest.mark.parametrize("cut", cuda_routes.CUT, ids=("features", "tokens"))
@pytest.mark.parametrize("name", ("gelu_tanh, LayerNorm", "gated, dropout, a quarter kept"))
def test_layers_in_tiles(name, cut, capability):
    capability(86)
    products = cuda_routes.tile_products(lambda: _row(name, cut))
    assert len(products) > 1 and set(products) == {cuda_routes.products_of(*LAYERS[name])}


@pytest.mark.parametrize("axis", cuda_routes.SUMMED)
def test_sums_over_tiles(axis):
    """Their size is cut along that axis; a CPU rounds products before it adds them up, by another operator."""
    case, sizes = cuda_routes.summed(axis)
    for backend, dtype in product(("cuda", "aten"), check.HALVES):
        cut, tiles = cuda_routes.tiles_of(case, sizes, dtype, backend)
        assert cut == axis and tiles > 2
    judge, wrong = check.Judge(case, "cpu", BF16, sizes), []
    assert cuda_routes.additions(lambda: wrong.append(judge(case, "aten", "cpu"))) == 0
    assert wrong == [None]


def test_the_narrow_size_takes_one_kernel_a_pass_whose_blocks_share_the_tokens():
    """Fewer tokens of it here: the kernels run thread by thread."""
    sizes = replace(NARROW, tokens=33)
    names = kernels_of(lambda: _row("gelu", sizes))
    assert [name for name in names if name.endswith("_cuda")] == ["mlp_small_fwd_cuda", "mlp_small_bwd_cuda"]
    for gated, fixed in ((False, 37), (True, 53)):
        partial_sums = 2 * (NARROW.hidden // 64) * fixed * 256 * 4  # of two ranges of tokens
        assert NARROW.tokens > 1024 and partial_sums < NARROW.workspace, gated


@pytest.mark.parametrize("case", cuda_routes.ATTENTION, ids=lambda case: case.name)
@pytest.mark.parametrize("way", OPERATORS)
def test_attention(way, case, capability):
    capability(90)
    sizes = Sizes(tokens=24, width=0, hidden=0, head=16, workspace=512 * 2**20)
    judge = check.Judge(case, "cpu", BF16, sizes)
    assert judge(case, "reference", "cpu") is None
    wrong = []
    with torch_kernels.standing_in(), cuda_routes.only(way):
        seen = cuda_routes.attention_operators(lambda: wrong.append(judge(case, "cuda", "cpu")))
    assert seen == set(filter(None, OPERATORS[way]))
    assert wrong == [None]


def test_what_a_sanitizer_sees():
    for backend, sizes in (("triton", {SMALL}), ("cuda", {SMALL, ALIGNED, NARROW})):
        calls = sanitized.calls(backend)
        assert {size for _, size in calls} == sizes
        chosen = {SMALL: sanitized.NAMES} | sanitized.NAMES_IN
        assert len(calls) == sum(len(chosen[size]) for size in sizes)
    ways = {LAYERS[case.name][0] for case, size in calls if size is ALIGNED and case.op == "mlp"}
    assert ways == {cuda_routes.LIBRARY, cuda_routes.CUTLASS}
    assert all(case.op == "mlp" for case, size in calls if size is NARROW)
