"""The kernels of narrow MLPs, run on the CPU: values, masks, layouts, sums over token ranges, reruns."""

from __future__ import annotations

import mlp_cases as cases
import mlp_small_calls as calls
import pytest
import torch
from mlp_small_calls import Narrow

from fused_remat import reference
from fused_remat.activations import ACTIVATIONS

pytestmark = [
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
]
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
DTYPE = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))


@GATED
@DTYPE
@pytest.mark.parametrize("width", (1, 3, 16, 32, 64, 100, 128))
def test_widths(width, dtype, gated):
    """Every bucket, full and padded, in rows that are aligned and that are not; a mask on half of them."""
    case = Narrow(17, width, 72, width, gated=gated, dtype=dtype, dropout_p=0.3 if width % 2 else 0.0)
    calls.check(case)
    calls.check(case.but(out=max(1, width // 3), activation="silu"))


@GATED
@pytest.mark.parametrize("hidden", (1, 16, 65, 200, 512))
@pytest.mark.parametrize("rows", (1, 130))
def test_rows_and_hidden_features(rows, hidden, gated):
    calls.check(Narrow(rows, 24, hidden, 20, gated=gated, activation="silu"))


@GATED
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_weights_that_do_not_fit_at_once(bias, gated):
    """F = 512 at D = 128 goes through shared memory in chunks."""
    calls.check(Narrow(17, 128, 512, 120, gated=gated, bias=bias, dropout_p=0.2))


def test_a_block_takes_several_tiles():
    """More tiles of 128 rows than blocks."""
    calls.check(Narrow(128 * 513 + 3, 8, 8, 8), wanted=("x",))


@GATED
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, gated):
    calls.check(Narrow(33, 16, 24, 8, gated=gated, activation=activation, dropout_p=0.25))


@GATED
@pytest.mark.parametrize("hidden", (64, 37, 6))
def test_masks_are_those_of_every_backend(hidden, gated):
    """Of each element, in both passes and both roles of backward's blocks."""
    rows, p = 100, 0.4
    case = Narrow(rows, hidden, hidden, hidden, gated=gated, activation="identity", dropout_p=p, bias=True)
    zeros, eye = torch.zeros(hidden, hidden, dtype=case.dtype), torch.eye(hidden, dtype=case.dtype)
    ones = torch.ones(hidden, dtype=case.dtype)
    given = {"x": torch.zeros(rows, hidden, dtype=case.dtype), "w_up": zeros, "w_down": eye, "b_up": ones}
    if gated:
        given |= {"w_gate": zeros, "b_gate": ones}
    scale = torch.tensor(1 / (1 - p)).to(case.dtype)
    mask = reference.dropout_mask(torch.tensor([case.seed]), p, (rows, hidden))
    given["dy"] = torch.ones(rows, hidden, dtype=case.dtype)
    made = calls.run(case, given, wanted=("b_up",))
    assert torch.equal(made["y"], mask * scale)
    # w_down's gradient with dy = I is hidden itself; dx with w_up = I is dhidden, masked.
    given["dy"] = torch.eye(rows, 128, dtype=case.dtype)
    wide = case.but(out=128)
    tall = given | {"w_down": torch.zeros(128, hidden, dtype=case.dtype)}
    assert torch.equal(calls.run(wide, tall)["w_down"][:rows], mask * scale)
    given["dy"] = torch.ones(rows, hidden, dtype=case.dtype)
    eyes = given | {"w_up": eye}
    assert torch.equal(calls.run(case, eyes, wanted=("x",))["x"], mask * scale)


def _layouts(given: calls.Named) -> dict[str, calls.Named]:
    def each(change, names=None):
        return {n: change(v) if names is None or n in names else v for n, v in given.items()}

    def in_gaps(t, before, after):
        """Rows between values that nobody may use."""
        whole = torch.nn.functional.pad(t, (before, after), value=float("nan"))
        return whole[..., before : before + t.shape[-1]]

    columns = lambda t: t.t().contiguous().t() if t.dim() == 2 else t
    apart = lambda t: torch.stack((t, t), -1)[..., 1]
    return {
        "wide rows": each(lambda t: in_gaps(t, 0, t.shape[-1])),
        "aligned rows": each(lambda t: in_gaps(t, 0, 8 - t.shape[-1] % 8)),
        "misaligned": each(lambda t: in_gaps(t, 1, 0)),
        "aligned strides, misaligned start": each(lambda t: in_gaps(t, 1, 7)),
        "columns": each(columns),
        "elements apart": each(apart),
        "transposed weights": each(columns, ("w_up", "w_down")),
        "fp32 parameters": each(torch.Tensor.float, calls.LAYER),
        "fp32 rows": each(torch.Tensor.float, ("x", "dy")),
        "another half": each(lambda t: t.half(), ("w_up", "b_down", "x")),
    }


@GATED
@pytest.mark.parametrize("width", (16, 33))
def test_layouts_and_dtypes(width, gated):
    """Whatever the strides, the alignment and the dtypes of the operands: the same bits where the values are."""
    case = Narrow(70, width, 72, width, gated=gated, activation="silu", dropout_p=0.1)
    given = calls.operands(case)
    dense = calls.check(case, given)
    for name, layout in _layouts(given).items():
        made = calls.run(case, layout)
        for key, value in made.items():
            assert value.dtype == (layout[key].dtype if key != "y" else case.dtype)
            wanted = dense[key]
            if value.dtype == case.dtype and name != "another half":
                assert torch.equal(value, wanted), (name, key)
            else:
                assert cases.relative_error(value, wanted) < 6e-3, (name, key)


@pytest.mark.parametrize("offset", (1, 2, 4))
def test_results_that_are_not_aligned(offset):
    case = Narrow(40, 16, 40, 24)
    given = calls.operands(case)
    calls.assert_same(calls.run(case, given), calls.run(case, given, offset=offset))


def test_gradients_of_one_row_repeated():
    """dy of stride 0, as `sum().backward()` makes it."""
    case = Narrow(40, 16, 40, 24, gated=True)
    given = calls.operands(case)
    given["dy"] = torch.ones(1, 1, dtype=case.dtype).expand(40, 24)
    calls.check(case, given)


@GATED
def test_only_what_is_wanted(gated):
    """The others are not written, and the same bits come out."""
    case = Narrow(1100, 12, 70, 20, gated=gated)
    given = calls.operands(case)
    whole = calls.run(case, given)
    for wanted in (("x",), ("w_down",), ("b_up",), ("b_down",), ("w_up", "b_gate"), ("w_gate",), ("x", "b_down"), ()):
        made = calls.run(case, given, wanted=wanted)
        assert set(made) == {"y", *wanted} & {"y", *given}
        calls.assert_same(made, {name: whole[name] for name in made})


def _ranges(case: Narrow) -> tuple[int, int]:
    """Token rows of a range, and bytes of partial sums."""
    axis, rows, _, nbytes = torch.ops.fused_remat.mlp_plan(
        case.rows, case.width, case.out, case.hidden, case.gated, True, case.dropout_p > 0, case.dtype, case.dtype,
        case.dtype, case.workspace, "cuda", "cpu",
    )  # fmt: skip
    assert axis == 2
    return rows, nbytes


def _with_wide_gradients(given: calls.Named) -> calls.Named:
    """The same values in fp32 parameters, whose gradients are the sums: rounding would hide another order."""
    return {name: value.float() if name in calls.LAYER else value for name, value in given.items()}


@GATED
def test_token_ranges(gated, thread_order):
    """Cut by shapes and budget alone; whichever block comes last, the same bits."""
    case = Narrow(3100, 20, 70, 9, gated=gated, activation="relu2")
    given = _with_wide_gradients(calls.operands(case))
    stock, truth = calls.plain(case, given, case.dtype), calls.plain(case, given, torch.float64)
    seen = set()
    one = _ranges(case.but(workspace=0))
    assert one == (3100, 0)
    rows, whole = _ranges(case)
    assert rows < 1024 and whole > 0
    for workspace in (0, whole - 1, whole):
        budgeted = case.but(workspace=workspace)
        rows, nbytes = _ranges(budgeted)
        assert nbytes <= workspace and (rows == 3100 or rows % 32 == 0)
        seen.add(rows)
        thread_order(0)
        made = calls.run(budgeted, given)
        calls.assert_exact(made, stock, truth)
    for order in (1, 2):
        thread_order(order)
        calls.assert_same(made, calls.run(case, given))
    assert len(seen) == 3


@GATED
def test_any_order_of_threads_gives_the_same_bits(gated, thread_order):
    for case in (Narrow(140, 33, 100, 65, gated=gated, dropout_p=0.2), Narrow(20, 128, 512, 128, gated=gated)):
        given = _with_wide_gradients(calls.operands(case))
        thread_order(0)
        first = calls.run(case, given)
        for order in (1, 2):
            thread_order(order)
            calls.assert_same(first, calls.run(case, given))


@pytest.mark.parametrize("activation", ("relu", "gelu", "sigmoid"))
def test_what_is_not_finite_stays_in_its_row(activation):
    """Neither padding features nor padding rows carry it on: as in torch, element by element."""
    case = Narrow(20, 9, 13, 7, activation=activation, bias=True)
    given = calls.operands(case)
    given["x"][3, 2], given["x"][5] = float("inf"), float("nan")
    given["w_up"][:, 2] = -given["w_up"][:, 2].abs()  # relu and sigmoid of -inf are finite
    made, plain = calls.run(case, given), calls.plain(case, given, torch.float32)
    for name in ("y", "x"):
        assert torch.equal(made[name].isfinite(), plain[name].isfinite()), name
    assert made["y"][6:].isfinite().all() and not made["y"][5].isfinite().any()
    if activation != "gelu":
        assert made["y"][3].isfinite().all()


@GATED
def test_biases_alone_do_not_count_past_the_last_row(gated):
    """Of rows past the end up is its bias alone, here with an infinite square; of each real row it is 0."""
    case = Narrow(20, 1, 5, 3, gated=gated, activation="relu2")
    given = calls.operands(case)
    for name, value in {
        "x": 1.0,
        "w_up": -(2.0**126),
        "b_up": 2.0**126,
        "w_gate": -(2.0**126),
        "b_gate": 2.0**126,
    }.items():
        if name in given:
            given[name].fill_(value)
    made = calls.run(case, given)
    for name in ("w_up", "b_up", "w_down", "w_gate", "b_gate", "x"):
        assert name not in made or (made[name] == 0).all(), name


def test_addresses_beyond_32_bits():
    """Two rows 2^31 elements apart; memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # would fill it
    case = Narrow(2, 8, 8, 8)
    given = calls.operands(case)
    far = torch.empty(2**31 + 16, dtype=case.dtype).as_strided((2, 8), (2**31, 1), 0)
    far.copy_(given["x"])
    calls.assert_same(calls.run(case, given), calls.run(case, given | {"x": far, "dy": given["dy"]}))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    (
        ({"x": torch.zeros(17, 15).bfloat16()}, ValueError, r"w_up must be \[16, 15\]"),
        ({"x": torch.zeros(17).bfloat16()}, ValueError, "must be matrices"),
        ({"b_up": torch.zeros(15)}, ValueError, r"b_up must be \[16\]; got \[15\]"),
        (
            {"w_down": torch.zeros(16, 16).double()},
            TypeError,
            "w_down must be float32, float16 or bfloat16; got Double",
        ),
        ({"w_up": torch.zeros(600, 16), "w_down": torch.zeros(16, 600)}, ValueError, "F is up to 512, got 600"),
    ),
)
def test_what_does_not_fit_is_refused(change, error, text):
    case = Narrow()
    with pytest.raises(error, match=text):
        calls.run(case, calls.operands(case) | change)


def test_settings_that_do_not_fit_are_refused():
    given = calls.operands(Narrow())
    layer, y = [given.get(name) for name in calls.LAYER], torch.empty(17, 16, dtype=torch.bfloat16)
    forward, seed = torch.ops.fused_remat.mlp_small_fwd_cuda, torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"no CUDA C\+\+ kernel for swish"):
        forward(given["x"], *layer, seed, "swish", 0.0, y)
    with pytest.raises(ValueError, match="dropout needs an int64 seed of 1 element; got 0"):
        forward(given["x"], *layer, seed, "gelu", 0.1, y)
    with pytest.raises(ValueError, match="dropout_p must be in"):
        forward(given["x"], *layer, seed, "gelu", 1.0, y)
    with pytest.raises(ValueError, match="the compute dtype is Half or BFloat16, got Float"):
        forward(given["x"], *layer, seed, "gelu", 0.0, y.float())
    backward, plain = torch.ops.fused_remat.mlp_small_bwd_cuda, (given["w_up"], given["w_down"], None, None, None)
    with pytest.raises(ValueError, match="w_gate was not given"):
        backward(given["dy"], given["x"], *plain, seed, "gelu", 0.0, y.dtype, 0, *[None] * 5, given["w_up"], None)
