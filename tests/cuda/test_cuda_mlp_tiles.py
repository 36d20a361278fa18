"""The CUDA C++ kernels of the MLP on one tile, forward and backward by every route, against plain torch in float64."""

from __future__ import annotations

from itertools import product

import mlp_chunks as chunks
import pytest
import torch
from mlp_chunks import Chunk

from fused_remat.activations import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SMALL = Chunk(rows=17, width=24, features=33, out=20)
# Fits every route: what each is for is said where it is used.
EVEN = Chunk(rows=19, width=16, features=40, out=24, dtype=torch.bfloat16, activation="gelu_tanh")


def _ops():
    return torch.ops.fused_remat.mlp_fwd_chunk_cuda, torch.ops.fused_remat.mlp_bwd_chunk_cuda


def _check(chunk: Chunk, given=None, **settings):
    return chunks.check(chunk, given, ops=_ops(), **settings)


def _cpp():
    return torch.ops.fused_remat.mlp_fwd_chunk_cpp, torch.ops.fused_remat.mlp_bwd_chunk_cpp


@GATED
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("fp32", "fp64"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, dtype, gated):
    _check(SMALL.but(activation=activation, gated=gated, dtype=dtype))


@pytest.mark.parametrize(
    ("rows", "width", "features", "out"),
    (
        (1, 1, 1, 1),
        (1, 63, 17, 129),
        (17, 1, 127, 1),
        (63, 129, 1, 17),
        (129, 17, 33, 63),
        (65, 8, 257, 8),
        (1, 1, 341, 1),
        (3, 5, 8, 7),
    ),
)
def test_odd_shapes(rows, width, features, out):
    for gated, dtype in product((False, True), DTYPES):
        _check(Chunk(rows, width, features, out, gated=gated, activation="silu", dtype=dtype, dropout_p=0.2))


@GATED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_biases_and_with_biases_of_another_dtype(dtype, gated):
    chunk = SMALL.but(gated=gated, dtype=dtype)
    _check(chunk.but(bias=False))
    given = chunks.operands(chunk)
    for other in set(DTYPES) - {dtype}:
        # Biases that both dtypes can hold, so that the truth is the same.
        mixed = given | {name: given[name].bfloat16().half() for name in ("b_up", "b_gate") if name in given}
        (stock_made, stock), (true_made, truth) = (chunks.plain(chunk, mixed, to) for to in (dtype, torch.float64))
        mixed |= {name: mixed[name].to(other) for name in ("b_up", "b_gate") if name in given}
        made = chunks.forward(_ops()[0], chunk, mixed)
        chunks.assert_as_exact_as_torch({k: v for k, v in made.items() if v.numel()}, stock_made, true_made)
        chunks.assert_as_exact_as_torch(chunks.backward(_ops()[1], chunk, mixed, made), stock, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", ((0, 0), (63, 63), (63, 0), (0, 20), (10, 40)))
def test_kept_columns(kept, dtype):
    """Any leading columns of each, 0 to all. A kept number is the one that is rebuilt: gradients have the same bits."""
    chunk = Chunk(rows=17, kept=kept, dropout_p=0.1, gated=True, dtype=dtype)
    given = chunks.operands(chunk)
    _check(chunk, given)
    _check(chunk.but(kept=(kept[0], 0), gated=False))
    if dtype == torch.float64:  # products of fewer columns round otherwise
        return
    for biases in ({}, {name: given[name].float() for name in ("b_up", "b_gate")}):
        rebuilt = _both_ways(chunk.but(kept=(0, 0)), given | biases)
        chunks.assert_same(_both_ways(chunk, given | biases), rebuilt)


def _both_ways(chunk: Chunk, given):
    return chunks.backward(_ops()[1], chunk, given, chunks.forward(_ops()[0], chunk, given))


@GATED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_alone(dtype, gated):
    """Without gradients backward writes hidden, the very values of forward, from kept or rebuilt pre-activations."""
    for kept in ((0, 0), (33, 33), (5, 20)):
        chunk = SMALL.but(gated=gated, dtype=dtype, dropout_p=0.3, kept=(kept[0], kept[1] * gated))
        given = chunks.operands(chunk)
        made = chunks.forward(_ops()[0], chunk, given)
        alone = chunks.backward(_ops()[1], chunk, given, made, gradient=False)["hidden"]
        if kept[0] in (0, 33):  # a product of fewer columns may round otherwise
            assert torch.equal(alone, made["hidden"])
        torch.testing.assert_close(alone, made["hidden"])


@GATED
def test_sums_are_only_made_where_wanted(gated):
    chunk = Chunk(gated=gated)
    given = chunks.operands(chunk)
    made = chunks.forward(_ops()[0], chunk, given)
    everything = chunks.backward(_ops()[1], chunk, given, made)
    no_sums = chunks.backward(_ops()[1], chunk, given, made, sums=False)
    chunks.assert_same(no_sums, {name: everything[name] for name in no_sums})
    assert set(everything) - set(no_sums) == {"db_up", *(["db_gate"] if gated else [])}


@pytest.mark.parametrize("p", (0.1, 0.5, 0.999))
@pytest.mark.parametrize(
    ("feature0", "hidden_features"), ((0, 400), (1, 401), (2, 402), (3, 403), (3, 400), (0, 2**33 + 1))
)
def test_masks_are_those_of_the_other_backends(feature0, hidden_features, p):
    """Wherever the tile begins, at counters beyond 32 bits, and for every element type's width of a vector."""
    for dtype in DTYPES:
        chunk = Chunk(
            rows=5, features=70, width=3, out=3, activation="identity", bias=False, dropout_p=p, dtype=dtype,
            feature0=feature0, hidden_features=hidden_features, row0=2**20 + 7,
        )  # fmt: skip
        given = chunks.operands(chunk)
        ours, theirs = (chunks.forward(op, chunk, given)["hidden"] for op in (_ops()[0], _cpp()[0]))
        assert torch.equal(ours == 0, theirs == 0)
        assert (ours == 0).any() == (p > 0.05)
        torch.testing.assert_close(ours, theirs)


def test_the_mask_is_that_of_the_reference():
    chunk = Chunk(activation="identity", bias=False, dropout_p=0.3)
    ones = chunks.operands(chunk)
    ones = {name: torch.ones_like(value) for name, value in ones.items()}
    hidden = chunks.forward(_ops()[0], chunk, ones)["hidden"]
    assert torch.equal(hidden != 0, chunks.mask(chunk))


def test_what_is_dropped_is_zero_even_where_it_is_infinite():
    chunk = Chunk(rows=8, features=24, width=2, out=2, bias=False, activation="identity", dropout_p=0.5)
    given = {name: torch.full_like(value, 1e30) for name, value in chunks.operands(chunk).items()}
    made = chunks.forward(_ops()[0], chunk, given)
    gradients = chunks.backward(_ops()[1], chunk, given, made)
    kept = chunks.mask(chunk)
    for name in ("hidden", "dup"):
        assert gradients[name][kept].isinf().all() and (gradients[name][~kept] == 0).all()


@GATED
@pytest.mark.parametrize("activation", ("relu", "gelu_tanh", "silu"))
def test_nan_goes_where_torch_has_it(activation, gated):
    for dtype in (torch.float32, torch.bfloat16):
        chunk = EVEN.but(dtype=dtype, activation=activation, gated=gated)
        given = chunks.operands(chunk)
        given["x"][3, 2] = float("nan")
        given["w_gate" if gated else "w_up"][7, 1] = float("nan")
        gradients = _both_ways(chunk, given)
        _, truth = chunks.plain(chunk, given, torch.float64)
        for name, value in gradients.items():
            assert torch.equal(value.isnan(), truth[name].isnan()), name


def _misaligned(value: torch.Tensor, columns: int = 3) -> torch.Tensor:
    """The same numbers one element off, in wider rows of poison."""
    if value.dim() == 1:
        return torch.full((len(value) + 1,), float("nan"), dtype=value.dtype)[1:].copy_(value)
    wide = torch.full((len(value), value.shape[1] + columns), float("nan"), dtype=value.dtype)
    return wide[:, 1 : 1 + value.shape[1]].copy_(value)


@GATED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_misaligned_operands(dtype, gated):
    chunk = EVEN.but(gated=gated, dtype=dtype, activation="gelu", dropout_p=0.1)
    given = chunks.operands(chunk)
    result = _check(chunk, {name: _misaligned(value) for name, value in given.items()})
    for name, value in _check(chunk, given).items():
        torch.testing.assert_close(result[name], value)
    _check(chunk, given | {name: given[name].t().contiguous().t() for name in ("x", "dy", "w_up", "w_down")})


@GATED
@pytest.mark.parametrize("offset", (0, 1))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
def test_nothing_outside_the_outputs_is_written(dtype, offset, gated):
    """Buffers as views of wider poisoned ones, at both alignments: what surrounds them keeps its bits."""
    chunk = Chunk(
        rows=70, width=8, features=43, out=8, gated=gated, dtype=dtype, activation="silu", kept=(11, 20 * gated)
    )
    given = chunks.operands(chunk)
    names = ("up", "gate", "hidden", "scratch", "dup", "dgate")
    columns = (*chunk.kept, 43, 43 * gated, 43, 43 * gated)
    zones, views = {}, {}
    for name, n in zip(names, columns, strict=True):
        zones[name] = torch.full((chunk.rows + 2, 64), 7.0, dtype=dtype)
        views[name] = zones[name][1:-1, offset : offset + n] if n else torch.empty(chunk.rows, 0, dtype=dtype)
    place = (torch.empty(0, dtype=torch.int64), chunk.activation, 0.0, 0, 0, 43)
    weights = [given.get(name) for name in ("w_up", "b_up", "w_gate", "b_gate")]
    _ops()[0](given["x"], *weights, *place, *(views[name] for name in names[:4]))
    wide = torch.promote_types(dtype, torch.float32)
    sums = torch.zeros(64, dtype=wide)
    weights = [given.get(name) for name in ("w_up", "w_down", "b_up", "w_gate", "b_gate")]
    _ops()[1](
        given["x"], given["dy"], *weights, views["up"], views["gate"], *place, views["hidden"], views["dup"],
        views["dgate"], torch.empty(0, dtype=dtype), sums[3:46], sums[:0],
    )  # fmt: skip
    _, truth = chunks.plain(chunk.but(kept=(0, 0)), given, dtype)
    for name, n in zip(names, columns, strict=True):
        if name in truth:
            torch.testing.assert_close(views[name], truth[name])
        zones[name][1:-1, offset : offset + n] = 7.0
        assert (zones[name] == 7.0).all(), name
    assert (sums[:3] == 0).all() and (sums[46:] == 0).all()
    torch.testing.assert_close(
        sums[3:46], truth["db_up"] - 1, rtol=0.02, atol=0.05 if dtype == torch.bfloat16 else 1e-9
    )


@GATED
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_same_bits_in_any_order_of_threads(dtype, gated, thread_order):
    chunk = Chunk(rows=150, width=9, features=70, out=5, gated=gated, dtype=dtype, dropout_p=0.2, kept=(9, 9 * gated))
    given = chunks.operands(chunk)
    first = _both_ways(chunk, given)
    for seed in (1, 2):
        thread_order(seed)
        chunks.assert_same(first, _both_ways(chunk, given))


def test_sums_of_many_rows_stay_exact():
    """Block by block, a tree above them: one long chain of fp32 additions would lose digits."""
    chunk = Chunk(rows=20_000, width=1, features=9, out=1, activation="identity", bias=False)
    given = chunks.operands(chunk)
    given["dy"].uniform_(0.5, 1.5)
    _check(chunk, given)


@pytest.mark.parametrize("empty", ("rows", "features"))
def test_empty_tiles(empty):
    chunk = SMALL.but(**{empty: 0}, gated=True)
    gradients = _both_ways(chunk, chunks.operands(chunk))
    assert all((value == 1).all() for name, value in gradients.items() if name.startswith("db"))


def test_zero_width_products_are_zero():
    """x or dy without columns: pre-activations are the bias alone, and no gradient flows."""
    _check(SMALL.but(width=0, gated=True))
    gradients = _both_ways(SMALL.but(out=0), chunks.operands(SMALL.but(out=0)))
    assert (gradients["dup"] == 0).all() and (gradients["db_up"] == 1).all()


@GATED
def test_forward_here_and_backward_on_the_others(gated):
    for dtype in DTYPES:
        chunk = SMALL.but(gated=gated, dtype=dtype, dropout_p=0.2, kept=(7, 12 * gated))
        given = chunks.operands(chunk)
        (stock_made, stock), (true_made, truth) = (chunks.plain(chunk, given, to) for to in (dtype, torch.float64))
        for (forward, _), (_, backward) in product((_ops(), _cpp()), repeat=2):
            made = chunks.forward(forward, chunk, given)
            chunks.assert_as_exact_as_torch({k: v for k, v in made.items() if v.numel()}, stock_made, true_made)
            chunks.assert_as_exact_as_torch(chunks.backward(backward, chunk, given, made), stock, truth)


def test_errors_name_the_argument():
    given = chunks.operands(SMALL)
    made = chunks.forward(_ops()[0], SMALL, given)
    with pytest.raises(ValueError, match=r"no CUDA C\+\+ kernel for mish"):
        chunks.forward(_ops()[0], SMALL.but(activation="mish"), given)
    with pytest.raises(TypeError, match="a residual must have the dtype of hidden, Float; got Double"):
        chunks.backward(_ops()[1], SMALL, given, made | {"up": torch.zeros(17, 4, dtype=torch.float64)})
    with pytest.raises(ValueError, match="a residual must be a matrix with dense rows"):
        chunks.backward(_ops()[1], SMALL, given, made | {"up": torch.zeros(4, 17).t()})
