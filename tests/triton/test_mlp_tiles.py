"""The MLP's Triton kernels on one tile, forward and backward on every path, against plain torch in float64."""

from __future__ import annotations

from itertools import product

import mlp_cases as cases
import mlp_chunks as chunks
import pytest
import torch
from mlp_chunks import Chunk

from fused_remat import reference
from fused_remat.activations import ACTIVATIONS
from fused_remat.triton import mlp

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")
PATHS = ("fused", "epilogue", "elementwise")
PATH = pytest.mark.parametrize("path", PATHS)
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
SMALL = Chunk(rows=17, width=24, features=33, out=20)


@pytest.mark.parametrize(
    ("gated", "path"), ((False, "fused"), (True, "fused"), (True, "epilogue"), (False, "elementwise"))
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, gated, path):
    chunks.check(SMALL.but(activation=activation, gated=gated), path=path)


@PATH
@pytest.mark.parametrize(
    ("rows", "width", "features", "out"),
    (
        (1, 1, 1, 1),
        (1, 63, 17, 129),
        (17, 1, 127, 1),
        (63, 129, 1, 17),
        (129, 17, 33, 63),
        (17, 341, 33, 127),
        (1, 1, 341, 1),
    ),
)
def test_odd_shapes(rows, width, features, out, path):
    for gated in (False, True):
        chunks.check(Chunk(rows, width, features, out, gated=gated, activation="silu"), path=path)


@PATH
@GATED
@pytest.mark.parametrize("dtype", (torch.float16, torch.float64), ids=("fp16", "fp64"))
def test_other_dtypes(dtype, gated, path):
    """fp64 has library GEMMs alone."""
    if dtype == torch.float64:
        path = None
    chunks.check(SMALL.but(dtype=dtype, gated=gated, dropout_p=0.2), path=path)


@PATH
@GATED
def test_without_biases_and_with_biases_of_another_dtype(gated, path):
    chunks.check(SMALL.but(bias=False, gated=gated), path=path)
    chunk = SMALL.but(gated=gated, dtype=torch.float16)
    given = chunks.operands(chunk)
    wide = given | {name: given[name].float() for name in ("b_up", "b_gate") if name in given}
    made = chunks.forward(mlp.mlp_fwd_chunk, chunk, wide)
    chunks.assert_same(made, chunks.forward(mlp.mlp_fwd_chunk, chunk, given))
    _, truth = chunks.plain(chunk, given, torch.float64)
    _, stock = chunks.plain(chunk, given, torch.float16)
    chunks.assert_as_exact_as_torch(chunks.backward(mlp.mlp_bwd_chunk, chunk, wide, made, path=path), stock, truth)


@PATH
@pytest.mark.parametrize("kept", ((0, 0), (63, 63), (63, 0), (0, 20), (10, 40)))
def test_kept_columns(kept, path):
    """Any leading columns of each, 0 to all; a plain layer has the first alone."""
    chunk = Chunk(rows=17, kept=kept, dropout_p=0.1, gated=True)
    given = chunks.operands(chunk)
    with_kept = chunks.check(chunk, given, path=path)
    rebuilt = chunks.check(chunk.but(kept=(0, 0)), given, path=path)
    for name, value in rebuilt.items():
        torch.testing.assert_close(with_kept[name], value, rtol=1e-5, atol=1e-5)
    chunks.check(chunk.but(kept=(kept[0], 0), gated=False), path=path)


@PATH
def test_kept_columns_are_what_backward_reads(path):
    """Changed residuals change the gradients: nothing that is kept is rebuilt."""
    chunk = SMALL.but(kept=(20, 9), gated=True, activation="silu")
    given = chunks.operands(chunk)
    made = chunks.forward(mlp.mlp_fwd_chunk, chunk, given)
    before = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path)
    for name, columns in (("up", 20), ("gate", 9)):
        changed = made | {name: made[name] + 1}
        after = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, changed, path=path)["hidden"]
        assert (after[:, :columns] != before["hidden"][:, :columns]).all()
        torch.testing.assert_close(after[:, columns:], before["hidden"][:, columns:])


@PATH
@GATED
@pytest.mark.parametrize("kept", ((0, 0), (33, 33), (20, 5)))
def test_wanted_subsets(kept, gated, path):
    """Without gradients through the activation only hidden is made; without bias gradients the rest is the same."""
    chunk = SMALL.but(gated=gated, dropout_p=0.3, kept=kept if gated else (kept[0], 0))
    given = chunks.operands(chunk)
    made = chunks.forward(mlp.mlp_fwd_chunk, chunk, given)
    everything = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path)
    no_sums = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, sums=False, path=path)
    assert not {"db_up", "db_gate"} & set(no_sums)
    chunks.assert_same(no_sums, {name: everything[name] for name in no_sums})
    hidden = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, gradient=False, path=path)
    assert set(hidden) == {"hidden"}
    torch.testing.assert_close(hidden["hidden"], everything["hidden"], rtol=1e-5, atol=1e-6)


@PATH
@GATED
def test_any_strides(gated, path):
    """Transposed weights, x and dy with gaps or transposed, dy of stride 0; inputs keep their bits."""
    chunk = SMALL.but(gated=gated)
    given = chunks.operands(chunk)
    weights = ("w_up", "w_gate", "w_down")
    transposed = {name: value.t().contiguous().t() for name, value in given.items() if name in (*weights, "x", "dy")}
    gaps = {
        name: torch.cat((value, value), 1)[:, : value.shape[1]] for name, value in given.items() if value.dim() == 2
    }
    ones = given | {"dy": torch.ones(1, 1, device=chunks.DEVICE).expand(chunk.rows, chunk.out)}
    rows_alike = given | {"dy": given["dy"][:1].expand(chunk.rows, chunk.out)}
    for variant in (given | transposed, given | gaps, ones, rows_alike):
        before = {name: value.clone() for name, value in variant.items()}
        dense = {name: value.contiguous() for name, value in variant.items()}
        result = chunks.check(chunk, variant, path=path)
        for name, value in chunks.check(chunk, dense, path=path).items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-5)
        chunks.assert_same(variant, before)


@PATH
@GATED
def test_first_and_second_call_give_the_same_bits(gated, path):
    chunk = Chunk(rows=65, width=19, features=33, out=23, gated=gated, dropout_p=0.25, kept=(11, 7 * gated))
    given = chunks.operands(chunk)
    made = chunks.forward(mlp.mlp_fwd_chunk, chunk, given)
    chunks.assert_same(made, chunks.forward(mlp.mlp_fwd_chunk, chunk, given))
    first = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path)
    chunks.assert_same(first, chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path))


@PATH
@pytest.mark.parametrize(
    ("seed", "row0", "feature0", "hidden_features"),
    ((0, 0, 0, 33), (-1, 2**40, 5, 3001), (2**62 + 12345, 2**20, 2**33, 2**34)),
)
def test_dropout_masks_are_those_of_the_reference(seed, row0, feature0, hidden_features, path):
    """An element is numbered within the whole [M, F], wherever its tile is."""
    chunk = SMALL.but(
        dropout_p=0.3, activation="identity", bias=False, seed=seed, row0=row0, feature0=feature0,
        hidden_features=hidden_features,
    )  # fmt: skip
    index = (torch.arange(chunk.rows)[:, None] + row0) * hidden_features + feature0 + torch.arange(chunk.features)
    words = torch.stack(reference.philox_words(torch.tensor([seed]), index >> 2), -1)
    kept = words.gather(-1, (index & 3)[..., None])[..., 0] >= round(0.3 * 2**32)
    given = chunks.operands(chunk)
    made = chunks.forward(mlp.mlp_fwd_chunk, chunk, given)
    gradients = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path)
    for value in (made["hidden"], gradients["hidden"], gradients["dup"]):
        assert torch.equal(value.cpu() != 0, kept)


@PATH
@GATED
@pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
def test_forward_and_backward_on_different_implementers(gated, path):
    """Residuals and masks mean the same to C++: each half of a pass may run on either."""
    forward, backward = (f"mlp_{half}_chunk_{'cpp' if chunks.DEVICE == 'cpu' else 'aten'}" for half in ("fwd", "bwd"))
    other = getattr(torch.ops.fused_remat, forward), getattr(torch.ops.fused_remat, backward)
    chunk = Chunk(rows=17, features=63, gated=gated, dropout_p=0.3, kept=(40, 17 * gated))
    given = chunks.operands(chunk)
    made = [chunks.forward(op, chunk, given) for op in (other[0], mlp.mlp_fwd_chunk)]
    assert torch.equal(made[0]["hidden"] == 0, made[1]["hidden"] == 0)
    _, truth = chunks.plain(chunk, given, torch.float64)
    _, stock = chunks.plain(chunk, given, torch.float32)
    for residuals in made:
        for op, settings in ((other[1], {}), (mlp.mlp_bwd_chunk, {"path": path})):
            gradients = chunks.backward(op, chunk, given, residuals, **settings)
            chunks.assert_as_exact_as_torch(gradients, stock, truth)


@PATH
def test_bias_sums_of_many_rows(path):
    """A long column loses no digits: partial sums, not one chain of additions."""
    chunk = Chunk(rows=700, width=3, features=5, out=2, gated=True)
    given = chunks.operands(chunk)
    given["dy"] = given["dy"] + 3  # sums of what does not cancel
    chunks.check(chunk, given, path=path)


def _operands_of_no_width(chunk: Chunk) -> chunks.Named:
    """Operands of a chunk with a size of 0, which have no scale of their own."""
    given = chunks.operands(chunk.but(**{name: max(getattr(chunk, name), 1) for name in ("width", "features", "out")}))
    sizes = {"x": (chunk.rows, chunk.width), "dy": (chunk.rows, chunk.out), "w_down": (chunk.out, chunk.features)}
    weight, bias = (chunk.features, chunk.width), (chunk.features,)
    sizes |= {"w_up": weight, "w_gate": weight, "b_up": bias, "b_gate": bias}
    return {name: value[tuple(map(slice, sizes[name]))] for name, value in given.items() if name in sizes}


@PATH
def test_nothing_to_do(path):
    for gated, empty in product((False, True), ("rows", "features")):
        chunk = SMALL.but(gated=gated, **{empty: 0})
        given = _operands_of_no_width(chunk)
        made = chunks.forward(mlp.mlp_fwd_chunk, chunk, given)
        gradients = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path)
        assert all((value == 1).all() for value in gradients.values())
    # Nothing to sum over: pre-activations are the biases, dhidden is zero.
    for chunk in (SMALL.but(width=0), SMALL.but(out=0)):
        given = _operands_of_no_width(chunk)
        made = chunks.forward(mlp.mlp_fwd_chunk, chunk, given)
        gradients = chunks.backward(mlp.mlp_bwd_chunk, chunk, given, made, path=path)
        _, truth = chunks.plain(chunk, given, torch.float32)
        for name, value in gradients.items():
            torch.testing.assert_close(value, truth[name])
