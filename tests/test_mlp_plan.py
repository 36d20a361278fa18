"""How the streaming cuts [M, F] into tiles: widths, chunks and bytes of real models' layers, without running any."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from mlp_cases import needs_extension

pytestmark = pytest.mark.skipif(needs_extension is not None, reason=str(needs_extension))
MIB = 2**20
BF16, FP32 = torch.bfloat16, torch.float32


class Layer(NamedTuple):
    width: int
    hidden: int
    gated: bool


LAYERS = {
    "GPT-2": Layer(768, 3072, False),
    "OPT-13B": Layer(5120, 20480, False),
    "Falcon-40B": Layer(8192, 32768, False),
    "Llama-7B": Layer(4096, 11008, True),
    "Llama-13B": Layer(5120, 13824, True),
    "Llama-3-8B": Layer(4096, 14336, True),
    "Llama-3-70B": Layer(8192, 28672, True),
    "Gemma-7B": Layer(3072, 24576, True),
    "Gemma-2-2B": Layer(2304, 9216, True),
    "Gemma-2-9B": Layer(3584, 14336, True),
    "Qwen2.5-0.5B": Layer(896, 4864, True),
    "Qwen2.5-7B": Layer(3584, 18944, True),
}
ROWS = (512, 2048, 8192, 12288, 16384, 20000, 32768, 131072)
BUDGETS = tuple(mib * MIB for mib in (32, 64, 128, 192, 256, 512))


class Tiles(NamedTuple):
    axis: str
    rows: int
    features: int
    nbytes: int


def _plan(
    rows: int,
    layer: Layer,
    budget: int = 256 * MIB,
    *,
    dtype: torch.dtype = BF16,
    parameters: torch.dtype | None = None,
    backend: str = "cuda",
    device: str = "cuda",
    backward: bool = True,
    dropout: bool = False,
    activation: str = "silu",
    kept: int = 0,
) -> Tiles:
    axis, *rest = torch.ops.fused_remat.mlp_plan(
        rows, layer.width, layer.width, layer.hidden, layer.gated, backward, dropout, dtype, parameters or dtype, dtype,
        budget, backend, device, False, [0, 0, 0], activation, kept,
    )  # fmt: skip
    return Tiles("features" if axis else "tokens", *rest)


@pytest.mark.parametrize("device", ("cuda", "cpu"))
@pytest.mark.parametrize("name", LAYERS)
def test_features_come_in_eights_within_the_budget(name, device):
    layer = LAYERS[name]
    backends = ("cuda", "triton", "aten") if device == "cuda" else ("cpp", "aten")
    for rows, budget, backend, backward, parameters, dropout in itertools.product(
        ROWS, BUDGETS, backends, (True, False), (BF16, FP32), (True, False)
    ):
        how = {"backend": backend, "device": device, "backward": backward, "parameters": parameters}
        tiles = _plan(rows, layer, budget, dropout=dropout, **how)
        assert tiles.features % 8 == 0 or tiles.features == layer.hidden, (rows, budget, how, tiles)
        assert tiles.nbytes <= budget, (rows, budget, how, tiles)


@pytest.mark.parametrize("hidden", (8, 40, 344, 1001, 4096))
def test_small_budgets_and_odd_layers(hidden):
    """Eights too where features are halved, and down to a budget that has no room for eight."""
    for rows, budget, device in itertools.product((1, 40, 3000, 20000), range(2**10, 2**19, 3000), ("cpu", "cuda")):
        tiles = _plan(rows, Layer(16, hidden, True), budget, dtype=torch.float64, device=device)
        assert tiles.features % 8 == 0 or tiles.features == hidden or tiles.features < 8, (rows, budget, tiles)
        assert tiles.nbytes <= budget or (tiles.rows, tiles.features) == (1, 1), (rows, budget, tiles)


def _halves(size: int, multiple: int) -> list[int]:
    found = [size]
    while found[-1] >= 2048:
        half = -(-found[-1] // 2)
        found.append(-(-half // multiple) * multiple)
    return found


def _is_preferred(tiles: Tiles, rows: int, layer: Layer, backward: bool) -> bool:
    """At least 1024 wide, and of a backward at most 16 chunks: each reads and writes the sums of dx or of weights."""
    width, full = (tiles.features, layer.hidden) if tiles.axis == "features" else (tiles.rows, rows)
    return width >= min(full, 1024) and (-(-full // width) <= 16 or not backward)


@pytest.mark.parametrize("name", LAYERS)
def test_wide_and_few_chunks_on_a_gpu(name):
    """Where the budget has room for such chunks beside rows (features) halved to no less than a chunk and 1024."""
    layer, preferred, held = LAYERS[name], 0, 0
    for rows, budget, backward in itertools.product(ROWS, BUDGETS, (True, False)):
        how = {"backward": backward, "activation": "gelu_tanh"}
        tiles = _plan(rows, layer, budget, **how)
        by_features = tiles.axis == "features"
        inner = _halves(rows if by_features else layer.hidden, 1 if by_features else 8)
        for size in inner:
            # On a CPU the inner direction stays as it is until a chunk is below 256.
            sizes = (size, layer) if by_features else (rows, layer._replace(hidden=size))
            there = _plan(*sizes, budget, device="cpu", **how)
            whole, width = (there.rows, there.features) if by_features else (there.features, there.rows)
            if whole == size >= max(1024, width) and _is_preferred(there, rows, layer, backward):
                held += 1
                assert _is_preferred(tiles, rows, layer, backward), (rows, budget, backward, tiles, there)
                break
        preferred += _is_preferred(tiles, rows, layer, backward)
    assert held and preferred >= held


@pytest.mark.parametrize(
    ("rows", "layer", "mib", "axis"),
    (
        (16384, Layer(5120, 20480, False), 256, "features"),
        (12288, Layer(3584, 14336, True), 256, "features"),
        (20000, Layer(5120, 13824, True), 256, "features"),
        (32768, Layer(3072, 24576, True), 256, "features"),
        (8192, Layer(3584, 18944, True), 128, "features"),
        (98304, Layer(4096, 11008, True), 512, "tokens"),
    ),
)
def test_models_whose_equal_shares_are_odd_or_narrow(rows, layer, mib, axis):
    for backend in ("cuda", "triton", "aten"):
        tiles = _plan(rows, layer, mib * MIB, backend=backend)
        assert tiles.axis == axis and tiles.features % 8 == 0
        assert _is_preferred(tiles, rows, layer, True), (backend, tiles)


def test_a_cpu_halves_below_256_alone():
    """Its products are at their peak at 256 already, and every halving of rows adds a pass over the gradients."""
    layer = LAYERS["Llama-13B"]
    how = {"backend": "aten", "dtype": FP32, "device": "cpu"}
    for rows, budget in itertools.product(ROWS, BUDGETS):
        tiles = _plan(rows, layer, budget, **how)
        inner, whole = (tiles.rows, rows) if tiles.axis == "features" else (tiles.features, layer.hidden)
        if inner == whole:
            continue
        twice = (2 * inner, layer) if tiles.axis == "features" else (rows, layer._replace(hidden=2 * inner))
        wider = _plan(*twice, budget, **how)
        outer = wider.features if tiles.axis == "features" else wider.rows
        kept_whole = (wider.rows if tiles.axis == "features" else wider.features) == 2 * inner
        assert not kept_whole or outer < 256, (rows, budget, tiles, wider)


def test_room_for_pre_activations_only_where_the_library_may_write_them():
    """cuBLASLt's epilogues of plain gelu_tanh layers: not in float64, nor where all of them were kept."""
    by_features, by_tokens = (512, Layer(64, 1024, False)), (4096, Layer(256, 1024, False))

    def room(where, activation="gelu_tanh", **how) -> int:
        rows, layer = where
        return _plan(rows, layer, 2**30, activation=activation, **how).nbytes - _plan(rows, layer, 2**30, **how).nbytes

    for where in (by_features, by_tokens):
        whole = where[0] * where[1].hidden
        assert room(where) == 2 * whole
        assert room(where, dtype=FP32) == 4 * whole
        assert room(where, dtype=torch.float64) == 0
        assert room(where, dropout=True) == room(where, kept=1024) == room(where, backend="triton") == 0
        assert room((where[0], where[1]._replace(gated=True))) == 0
    # Chunks of features after the kept ones have none; a chunk of tokens has some of each.
    assert _plan(*by_features, kept=256).axis == "features" and room(by_features, kept=256) == room(by_features)
    assert _plan(*by_tokens, kept=256).axis == "tokens" and room(by_tokens, kept=256) == 0
