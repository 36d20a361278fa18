"""How MLP kernels are launched: tiles of every architecture, descriptors or pointers, wide offsets, which path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import mlp_chunks as chunks
import pytest
import torch
from mlp_chunks import Chunk

from fused_remat.triton import configs, launch, mlp, mlp_configs, mlp_plan, targets
from fused_remat.triton.configs import Config

pytestmark = pytest.mark.usefixtures("one_thread")
PATHS = ("fused", "epilogue", "elementwise")
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
CHUNK = Chunk(rows=65, width=72, features=136, out=24, dropout_p=0.2)
interpreted = pytest.mark.skipif(chunks.DEVICE != "cpu", reason="tiles of other architectures need the interpreter")


def _both_halves(chunk: Chunk, given: chunks.Named, path: str | None) -> chunks.Named:
    made = chunks.forward(mlp.mlp_fwd_chunk, chunk, given)
    return {"forward": made["hidden"]} | chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path)


def _in_force(config: Config):
    """Every GEMM kernel with that configuration."""
    return configs.forced({key: config for key in mlp_configs.TABLE})


@pytest.fixture
def meta(monkeypatch) -> list[dict]:
    """The constants of every launch."""
    seen: list[dict] = []
    start = launch.launch_hook
    monkeypatch.setattr(launch, "launch_hook", lambda *given: (seen.append(given[3]), start(*given)))
    return seen


@interpreted
@GATED
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=("fp16", "fp32"))
def test_tiles_of_every_architecture_agree(dtype, gated):
    halves = ((80, 0.2, "fused"), (80, 0.0, "epilogue"), (90, 0.0, "fused"), (90, 0.2, "epilogue"), (100, 0.0, "fused"))
    for arch, dropout_p, path in halves if dtype == torch.float16 else ((90, 0.2, None),):
        chunk = CHUNK.but(gated=gated, dtype=dtype, dropout_p=dropout_p)
        given = chunks.operands(chunk)
        _, stock = chunks.plain(chunk, given, dtype)
        _, truth = chunks.plain(chunk, given, torch.float64)
        with targets.pretending(arch):
            made = _both_halves(chunk, given, path)
        del made["forward"]
        chunks.assert_as_exact_as_torch(made, stock, truth)


@GATED
@pytest.mark.parametrize("path", ("fused", "epilogue"))
def test_two_configurations_agree(path, gated):
    """No result depends on tiles but by the order of a sum."""
    chunk = CHUNK.but(gated=gated, features=40)
    given = chunks.operands(chunk)
    results = []
    for config in (Config(16, 16, 16, num_warps=4), Config(64, 32, 64, num_warps=4, num_stages=1)):
        with _in_force(config):
            results.append(_both_halves(chunk, given, path))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-5)


@GATED
@pytest.mark.parametrize("path", ("fused", "epilogue"))
def test_descriptors_and_pointers_load_the_same(path, gated, meta):
    """Bit for bit, whichever way an operand lies; what a descriptor cannot describe goes through pointers."""
    chunk = CHUNK.but(gated=gated, dtype=torch.float16, features=40)
    given = chunks.operands(chunk)
    turned = {name: value.t().contiguous().t() for name, value in given.items() if name.startswith("w_")}
    config = Config(64, 32, 32, num_warps=4)
    for variant, access in ((given, "rows"), (given | turned, "columns")):
        results, accesses = [], set()
        for tma in (False, True):
            meta.clear()
            with _in_force(Config(config.block_m, config.block_n, config.block_k, 4, 2, tma=tma)):
                results.append(_both_halves(chunk, variant, path))
            accesses.add(next(constants["W_UP_ACCESS"] for constants in meta if "W_UP_ACCESS" in constants))
        assert accesses == {"pointers", access}
        chunks.assert_same(*results)


def test_what_a_descriptor_cannot_describe():
    shape, itemsize = torch.Size((8, 16)), 2

    def access(strides, aligned=True, shape=shape, tma=True):
        return mlp_plan.access_of((shape, strides, aligned), itemsize, tma)

    assert access((16, 1)) == "rows"
    assert access((24, 1)) == "rows"
    assert access((1, 8)) == "columns"
    for strides in ((17, 1), (0, 1), (16, 2), (8, 1), (0, 0)):
        assert access(strides) == "pointers", strides
    assert access((16, 1), aligned=False) == access((16, 1), tma=False) == "pointers"
    assert access((16, 1), shape=torch.Size((0, 16))) == "pointers"


@GATED
@pytest.mark.parametrize("path", PATHS)
def test_wide_offsets_change_nothing(path, gated, meta, monkeypatch):
    """Where a block may reach beyond 2^31 elements its offsets are int64."""
    chunk = CHUNK.but(gated=gated, features=40, kept=(9, 9 * gated))
    given = chunks.operands(chunk)
    narrow = _both_halves(chunk, given, path)
    assert not any(constants.get("WIDE") for constants in meta)
    meta.clear()
    monkeypatch.setattr(mlp_plan, "overflows", lambda offset: True)
    with _in_force(configs.choose("mlp_fwd", 0, torch.float32, 0, "plain")):
        wide = _both_halves(chunk, given, path)
    assert all(constants.get("WIDE", True) for constants in meta)
    if chunks.DEVICE == "cpu":
        chunks.assert_same(narrow, wide)


def test_offsets_are_wide_where_they_must_be():
    shape, rows = torch.Size((64, 8)), 2**31 // 64

    def wide(stride):
        keys = ((shape, (stride, 1), True), (shape, (8, 1), True), None)
        return mlp_plan.plan("mlp_fwd", keys, (8,), torch.float32, "ieee", 0, False).meta["WIDE"]

    assert not wide(rows - 64)
    assert wide(rows)
    assert wide(2**40)


@pytest.fixture
def tf32() -> Iterator[Callable[[bool], None]]:
    """Allows or forbids TF32 until the test ends."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield lambda allowed: setattr(matmul, "allow_tf32", allowed)
    matmul.allow_tf32 = before


@pytest.mark.parametrize("arch", (80, 90, 100))
def test_paths_are_chosen_by_shape_dtype_and_architecture(arch, tf32):
    def paths(depth, depth_out, dtype, aligned=True):
        forward = mlp_configs.forward_path(dtype, arch, aligned)
        return forward, mlp_configs.backward_path(depth, depth_out, dtype, arch, aligned)

    for half in (torch.bfloat16, torch.float16):
        for width, out in ((768, 768), (1024, 1024), (1536, 512)):
            assert paths(width, out, half) == ("fused", "fused")
        for width, out in ((2048, 2048), (4096, 4096), (1024, 1032)):
            assert paths(width, out, half) == ("fused", "epilogue")
        assert paths(768, 768, half, aligned=False) == ("elementwise", "elementwise")
    tf32(False)
    for dtype, width in product((torch.float32, torch.float64), (64, 4096)):
        assert paths(width, width, dtype) == ("elementwise", "elementwise")
    tf32(True)
    assert paths(64, 64, torch.float32) == ("fused", "epilogue")
    assert paths(64, 64, torch.float64) == ("elementwise", "elementwise")


@interpreted
def test_operands_that_are_not_aligned_go_to_the_library(meta):
    """Strides that are no multiples of 16 bytes, an odd address, a gradient of stride 0."""
    chunk = CHUNK.but(rows=40, dtype=torch.float16, dropout_p=0.0)
    given = chunks.operands(chunk)
    shifted = torch.cat((given["w_up"].flatten(), given["w_up"].new_zeros(1)))[1:].view_as(given["w_up"])
    odd = [given, given | {"w_up": shifted}, given | {"dy": given["dy"][:1, :1].expand(40, 24)}]
    expected = [("x", "dy"), (), ("x",)]
    with targets.pretending(90):
        for variant, loaded in zip(odd, expected, strict=True):
            meta.clear()
            _both_halves(chunk, variant, None)
            assert ("X_ACCESS" in meta[0]) == ("x" in loaded)
            assert any("DY_ACCESS" in constants for constants in meta) == ("dy" in loaded)


def test_bias_sums_have_as_many_partials_as_the_workspace_counts():
    """One per 64 rows at the most."""
    assert mlp.SUM_ROWS >= 64
    for (op, *_), config in mlp_configs.TABLE.items():
        assert config.block_m >= 64, op
