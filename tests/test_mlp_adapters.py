"""Low-rank adapters in the MLP op: values and gradients in forced tiles, and what is kept, allocated and multiplied."""

from __future__ import annotations

from itertools import product

import adapter_cases
import mlp_cases as cases
import pytest
import torch
from adapter_cases import SUBSETS
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import fused_remat
from fused_remat import Norm
from fused_remat.measure import measure

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BACKEND = pytest.mark.parametrize("backend", cases.BACKENDS)
SUBSET = pytest.mark.parametrize(
    ("gated", "adapted"), SUBSETS, ids=["-".join(("gated" if g else "plain", *names)) for g, names in SUBSETS]
)
ALL = {False: ("up", "down"), True: ("up", "gate", "down")}
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
# rows, hidden width: feature chunks iff M < 2 F (plain) or 3 F (gated)
AXES = {"features": (3, 5), "tokens": (11, 2)}
FROZEN = pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))


def _function(values, **settings):
    """`run` of everything trainable, by position, and these values."""
    chosen = adapter_cases.trainable(values)

    def function(*given):
        return adapter_cases.run(values | dict(zip(chosen, given, strict=True)), **settings)

    return function, tuple(chosen.values())


# Values and gradients -------------------------------------------------------------------------------------------------


@GATED
def test_reference_is_the_layer_with_merged_weights(gated):
    values = adapter_cases.operands(4, 3, 5, 2, adapted=ALL[gated], gated=gated)
    merged = dict(values)
    for name in ALL[gated]:
        a, b = merged.pop(f"{name}_a"), merged.pop(f"{name}_b")
        merged[f"w_{name}"] = merged[f"w_{name}"] + adapter_cases.SCALES[name] * b @ a
    torch.testing.assert_close(adapter_cases.run_reference(values), cases.run_reference(merged), rtol=1e-12, atol=1e-12)
    chosen = tuple(values.values())
    assert gradcheck(lambda *given: adapter_cases.run_reference(dict(zip(values, given, strict=True))), chosen)


@BACKEND
@pytest.mark.parametrize("axis", AXES)
@SUBSET
def test_gradcheck_in_forced_tiles(gated, adapted, axis, backend):
    """One row by one feature; some of both, in two sizes; everything at once."""
    rows, hidden = AXES[axis]
    for frozen, workspaces in ((False, (1500, 2**20)), (True, (1, 2000))):
        values = adapter_cases.operands(rows, 3, hidden, 2, adapted=adapted, gated=gated, frozen=frozen)
        for workspace in workspaces:
            function, chosen = _function(values, backend=backend, workspace=workspace, activation="silu")
            assert gradcheck(function, chosen, fast_mode=workspace > 1)
    function, chosen = _function(values, backend=backend, workspace=1)
    ran = cases.kernels_of(lambda: function(*chosen).sum().backward())
    assert ran.count(f"mlp_bwd_chunk_{backend}") == rows * hidden
    assert gradgradcheck(function, chosen, fast_mode=True)


@pytest.mark.once
@BACKEND
@pytest.mark.parametrize("axis", AXES)
@SUBSET
def test_with_norm_dropout_and_kept_fractions(gated, adapted, axis, backend):
    rows, hidden = AXES[axis]
    for frozen, bias, kind, keep, p in (
        (True, True, "rms_norm", (), 0.3),
        (False, False, "layer_norm", 0.5, 0.0),
        (True, True, None, ("up", "gate") if gated else ("up",), 0.3),
    ):
        values = adapter_cases.operands(rows, 3, hidden, 2, adapted=adapted, gated=gated, frozen=frozen, bias=bias)
        scale = torch.randn(3, dtype=torch.float64, requires_grad=True)
        norm = Norm(kind, scale, eps=1e-3) if kind else None
        for workspace in (1, 3000):
            settings = {"backend": backend, "workspace": workspace, "keep": keep, "dropout_p": p, "norm": norm}
            function, chosen = _function(values, **settings)
            assert gradcheck(function, chosen, fast_mode=True), (kind, keep)
            ours = adapter_cases.run(values, **settings)
            truth = adapter_cases.run_reference(values, dropout_p=p, norm=norm)
            torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)
            if norm is not None:
                dy = torch.randn_like(ours)
                for got, want in zip(*(torch.autograd.grad(y, scale, dy) for y in (ours, truth)), strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@BACKEND
@pytest.mark.parametrize("axis", AXES)
@GATED
def test_only_requested_gradients_are_computed(gated, axis, backend):
    rows, hidden = AXES[axis]
    values = adapter_cases.operands(rows, 3, hidden, 4, adapted=ALL[gated], gated=gated)
    dy = torch.randn(rows, 4, dtype=torch.float64)
    truth = adapter_cases.gradients(adapter_cases.run_reference(values), values, dy)
    factors = [name for name in values if name[-2:] in ("_a", "_b")]
    alone = [(name,) for name in values]
    for wanted in (*alone, *product(factors, ("x", "w_up", "b_down")), factors):
        for name, value in values.items():
            value.requires_grad_(name in wanted)
        y = adapter_cases.run(values, backend=backend, workspace=1500)
        for name, gradient in adapter_cases.gradients(y, values, dy).items():
            torch.testing.assert_close(gradient, truth[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", ((), (0,), (2, 3), (2, 0)))
def test_any_leading_dims_and_layouts(shape):
    values = adapter_cases.operands(shape, 3, 5, 2, adapted=ALL[True], gated=True)
    layouts = {
        "factors transposed": {n: v.detach().t().contiguous().t() for n, v in values.items() if n[-2:] in ("_a", "_b")}
    }
    layouts["expanded x"] = {"x": torch.randn(3, dtype=torch.float64).expand(*shape, 3)}
    for changed in layouts.values():
        given = values | {name: value.requires_grad_() for name, value in changed.items()}
        y, truth = adapter_cases.run(given, workspace=1), adapter_cases.run_reference(given)
        torch.testing.assert_close(y, truth, rtol=1e-10, atol=1e-12)
        for dy in (torch.ones((), dtype=y.dtype).expand_as(y), torch.randn_like(y)):
            ours, right = (adapter_cases.gradients(out, given, dy) for out in (y.clone(), truth.clone()))
            for name in right:
                torch.testing.assert_close(ours[name], right[name], rtol=1e-10, atol=1e-12)
            y, truth = adapter_cases.run(given, workspace=1), adapter_cases.run_reference(given)


# Precision ------------------------------------------------------------------------------------------------------------


@BACKEND
@pytest.mark.parametrize("factor_dtype", (torch.bfloat16, torch.float32), ids=("bf16 factors", "fp32 factors"))
@GATED
def test_bf16_is_as_precise_as_separate_products(gated, factor_dtype, backend):
    """Error against float64 at most twice that of plain torch in bf16 (factors cast), over tiles of each axis."""
    ranks = {"up": 4, "gate": 8, "down": 5}
    for rows, hidden in ((40, 96), (300, 24)):
        values = adapter_cases.operands(
            rows,
            16,
            hidden,
            adapted=ALL[gated],
            gated=gated,
            dtype=torch.bfloat16,
            factor_dtype=factor_dtype,
            ranks=ranks,
        )
        exact = {name: value.detach().double().requires_grad_() for name, value in values.items()}
        dy = torch.randn(rows, 16).bfloat16()
        truth = adapter_cases.run_reference(exact)
        right = {"y": truth} | adapter_cases.gradients(truth, exact, dy.double())
        stock = adapter_cases.run_reference(values)
        eager = {"y": stock} | adapter_cases.gradients(stock, values, dy)
        for workspace in (25_000, 2**20):
            y = adapter_cases.run(values, backend=backend, workspace=workspace)
            ours = {"y": y} | adapter_cases.gradients(y, values, dy)
            for name, value in right.items():
                assert name == "y" or ours[name].dtype == values[name].dtype
                allowed = 2 * cases.relative_error(eager[name], value) + 1e-3
                assert cases.relative_error(ours[name], value) <= allowed, (name, rows, workspace)


@GATED
def test_autocast_computes_in_bf16_and_keeps_fp32(gated):
    values = adapter_cases.operands(33, 16, 48, adapted=ALL[gated], gated=gated, dtype=torch.float32, frozen=True)
    dy, saved = torch.randn(33, 16).bfloat16(), []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = adapter_cases.run(values, workspace=20_000)
    assert {t.data_ptr() for t in saved if t.numel()} == {t.data_ptr() for t in values.values()}
    with torch.autocast("cpu", torch.bfloat16):
        stock = adapter_cases.run_reference(values)
    assert y.dtype == stock.dtype == torch.bfloat16
    exact = {n: v.detach().double().requires_grad_(v.requires_grad) for n, v in values.items()}
    right = adapter_cases.gradients(adapter_cases.run_reference(exact), exact, dy.double())
    ours, eager = (adapter_cases.gradients(out, values, dy) for out in (y, stock))
    for name, value in right.items():
        assert ours[name].dtype == torch.float32
        assert cases.relative_error(ours[name], value) <= 2 * cases.relative_error(eager[name], value) + 1e-3, name


@BACKEND
@GATED
def test_reruns_are_bit_equal(gated, backend):
    values = adapter_cases.operands(64, 16, 40, adapted=ALL[gated], gated=gated, dtype=torch.float32)
    dy = torch.randn(64, 16)
    for workspace in (20_000, 2**20):
        y = adapter_cases.run(values, backend=backend, dropout_p=0.2, workspace=workspace)
        chosen = list(adapter_cases.trainable(values).values())
        first, second = (torch.autograd.grad(y, chosen, dy, retain_graph=True) for _ in range(2))
        again = adapter_cases.run(values, backend=backend, dropout_p=0.2, workspace=workspace)
        third = torch.autograd.grad(again, chosen, dy)
        assert torch.equal(y, again)
        for results in zip(first, second, third, strict=True):
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint_replays_to_the_same_bits(use_reentrant):
    values = adapter_cases.operands(9, 4, 12, adapted=ALL[True], gated=True, frozen=True, dtype=torch.float32)
    function, chosen = _function(values, dropout_p=0.2)

    def of(call):
        y = call()
        return y, *torch.autograd.grad(y.square().sum(), chosen)

    if use_reentrant:  # which only backward() runs
        y = checkpoint(function, *chosen, use_reentrant=True)
        y.square().sum().backward()
        replayed = (y, *(value.grad for value in chosen))
    else:
        replayed = of(lambda: checkpoint(function, *chosen, use_reentrant=False))
        inside = checkpoint(function, *chosen, use_reentrant=False)
        ran = cases.kernels_of(lambda: inside.sum().backward())
        assert "mlp_fwd_chunk_cpp" not in ran, "what is saved before the compute stops the replay there"
    for ours, truth in zip(replayed, of(lambda: function(*chosen)), strict=True):
        assert torch.equal(ours, truth)


# Bytes and products ---------------------------------------------------------------------------------------------------


@GATED
def test_x_alone_is_kept(gated):
    values = adapter_cases.operands(
        (4, 128), 64, 256, adapted=ALL[gated], gated=gated, dtype=torch.float32, frozen=True
    )
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.shape
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = adapter_cases.run(values)
    caller_holds = {value.untyped_storage().data_ptr() for value in values.values()}
    assert all(0 in shape for pointer, shape in storages.items() if pointer not in caller_holds)
    assert y.requires_grad
    assert measure(lambda: adapter_cases.run(values), repeats=1).kept_bytes == 0


@FROZEN
@GATED
@pytest.mark.parametrize("rows", (2048, 512))
# Not aten in bf16: torch's own bf16 products take temporaries of their own on a CPU.
@pytest.mark.parametrize(
    ("backend", "dtype"), (("cpp", torch.float32), ("cpp", torch.bfloat16), ("aten", torch.float32)), ids=str
)
def test_peaks_stay_within_workspace_and_accumulators(backend, dtype, rows, gated, frozen):
    width, hidden, rank, workspace = 128, 512, 8, 2**21
    values = adapter_cases.operands(
        rows, width, hidden, adapted=ALL[gated], gated=gated, dtype=dtype, factor_dtype=torch.float32, frozen=frozen,
        ranks=dict.fromkeys(adapter_cases.RANKS, rank),
    )  # fmt: skip
    axis, tile_rows, tile_features, nbytes = cases.plan(adapter_cases.layer(values), workspace, backend)
    assert axis == ("features" if rows < (3 if gated else 2) * hidden else "tokens")
    assert nbytes <= workspace and tile_rows * tile_features < rows * hidden
    measured = measure(lambda: adapter_cases.run(values, backend=backend, workspace=workspace), repeats=1)
    weights = 0 if frozen else (3 if gated else 2) * hidden * width
    accumulator = 0 if dtype == torch.float32 else 4 * (rows * width if axis == "features" else weights)
    narrow = 4 * rows * rank * len(ALL[gated]) if axis == "features" else 0
    assert measured.kept_bytes == 0
    packed = cases.packed_by_the_library(dtype)
    assert measured.backward_peak_above_gradients_bytes <= 1.01 * (workspace + accumulator + narrow) + packed
    assert measured.forward_peak_above_output_bytes <= 1.01 * workspace + packed


@BACKEND
@FROZEN
@GATED
def test_frozen_weights_cost_no_products(gated, frozen, backend):
    """FLOP by profiler: of products with the weights, and of the narrow ones as the formulas count them."""
    from torch.utils.flop_counter import FlopCounterMode

    rows, width, hidden = 32, 16, 64
    values = adapter_cases.operands(
        rows, width, hidden, adapted=ALL[gated], gated=gated, dtype=torch.float32, frozen=frozen
    )
    ranks = [adapter_cases.RANKS[name] for name in ALL[gated]]
    measured = measure(lambda: adapter_cases.run(values, backend=backend), repeats=1)
    inputs, columns = (2, sum(ranks[:-1])) if gated else (1, ranks[0])
    # Rebuild, dhidden and dx; the weights' own gradients only where they are trained.
    weights = (2 * inputs + 1 + (0 if frozen else inputs + 1)) * rows * width * hidden
    narrow = rows * (
        inputs * hidden * columns  # the rebuild's columns, zeros included
        + hidden * ranks[-1]  # dhidden's
        + 2 * hidden * sum(ranks)  # db of inputs and da of down; sums over features for the others
        + width * (columns + ranks[-1])  # the columns of x and dy
        + width * (2 * columns + ranks[-1])  # da, dx; db of down
    )
    assert measured.backward_gemm_flop == 2 * (weights + narrow)
    assert measured.forward_gemm_flop == 2 * rows * (
        (inputs + 1) * width * hidden + hidden * (inputs * columns + ranks[-1]) + width * sum(ranks)
    )
    with FlopCounterMode(display=False) as counter, fused_remat.backend(backend):
        adapter_cases.run(values).sum().backward()
    assert counter.get_total_flops() == measured.forward_gemm_flop + measured.backward_gemm_flop


def test_narrow_products_are_made_only_where_asked_for():
    """A frozen x and frozen base weights: what one factor costs in backward, in units of M and the rank."""
    rows, width, hidden = 32, 16, 64
    for name in ("up_a", "up_b", "down_a", "down_b", "b_down"):
        values = adapter_cases.operands(rows, width, hidden, adapted=("up", "down"), dtype=torch.float32)
        for other, value in values.items():
            value.requires_grad_(other == name)
        measured = measure(lambda values=values: adapter_cases.run(values, backend="cpp"), repeats=1)
        up, down = adapter_cases.RANKS["up"], adapter_cases.RANKS["down"]
        rebuild, dhidden, narrow = hidden * (width + up), hidden * (width + down), width * (up + down)
        expected = {
            "up_a": rebuild + dhidden + narrow + up * (hidden + width),
            "up_b": rebuild + dhidden + narrow + up * hidden,
            "down_a": rebuild + narrow + down * hidden,
            "down_b": rebuild + narrow + down * (hidden + width),
            "b_down": 0,
        }
        assert measured.backward_gemm_flop == 2 * rows * expected[name], name


@GATED
def test_explain_counts_the_columns_of_adapters(gated):
    values = adapter_cases.operands(64, 16, 96, adapted=ALL[gated], gated=gated, dtype=torch.float32)
    with fused_remat.backend("cpp"):
        told = fused_remat.explain(fused_remat.mlp, **adapter_cases.layer(values), workspace=30_000)
        bare = fused_remat.explain(
            fused_remat.mlp, **{n: v for n, v in values.items() if n[-2:] not in ("_a", "_b")}, workspace=30_000
        )
    _, rows, features, nbytes = cases.plan(adapter_cases.layer(values), 30_000, "cpp")
    assert (told.backward.rows, told.backward.features, told.backward.nbytes) == (rows, features, nbytes)
    assert told.backward.rows * told.backward.features < bare.backward.rows * bare.backward.features
    assert told.forward.nbytes <= 30_000
