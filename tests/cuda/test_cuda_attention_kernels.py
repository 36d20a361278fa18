"""Attention kernels in CUDA C++ at level 3, against ATen in the same dtype and in float64: masks, bands, shapes,
layouts, dtypes. Everything goes through the kernels of forward, delta and backward."""

from __future__ import annotations

import math
from collections.abc import Callable

import attention_level3 as calls
import pytest
import torch
from attention_level3 import UNLIMITED, Case

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread", "own_attention")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


def check(case, given=None, label="", **how):
    return calls.check("cuda", case, given, label, **how)


# What one call may ask for; each dtype takes all of it, plain halves take kernels of their own.
SETTINGS = {
    "plain": Case(),
    "causal": Case(batch=1, length_q=66, length_k=70, high=4),
    "rebuilt": Case(batch=1, length_q=70, length_k=67, high=0, rebuild=True),
    "bool masks": Case(attn_mask="bool 1hij", key_mask="bool b11j", rebuild=True),
    "float masks": Case(attn_mask="float bhij", key_mask="float b11j"),
    "dropout": Case(dropout_p=0.3, rebuild=True),
    "cap": Case(softcap=0.8, high=20),
    "everything": Case(
        attn_mask="float 1hij", key_mask="bool b11j", dropout_p=0.3, dweights="b1ij", rebuild=True, high=20,
        softcap=2.0, extra_keys=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_dtype(settings, dtype):
    check(SETTINGS[settings].but(dtype=dtype))


# Masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("bool", "float"))
@pytest.mark.parametrize("letters", ("bhij", "1hij", "b1ij", "11ij", "bh1j", "1h1j", "b11j", "bhi1", "1hi1", "1111"))
def test_masks_broadcast_over_any_dims(letters, kind):
    check(Case(length_k=70, attn_mask=f"{kind} {letters}"))


@pytest.mark.parametrize("key_mask", ("bool b11j", "float b11j"))
@pytest.mark.parametrize("attn_mask", ("", "bool 1hij", "float b1i1"))
def test_key_masks_alone_and_with_another(attn_mask, key_mask):
    check(Case(attn_mask=attn_mask, key_mask=key_mask, rebuild=True))


def test_masks_of_strides_of_their_own():
    case = Case()
    given = calls.operands(case)
    for name, masks in calls.masks_of_odd_strides().items():
        check(case, given | masks, name)


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
@pytest.mark.parametrize("mask_dtype", (torch.float32, *HALVES), ids=str)
def test_masks_of_other_dtypes(mask_dtype, dtype):
    case = Case(batch=1, dtype=dtype)
    given = calls.operands(case)
    masks = {"attn_mask": torch.randn(1, 2, 17, 35), "key_mask": torch.randn(1, 1, 1, 35)}
    check(case, given | {name: mask.to(mask_dtype) for name, mask in masks.items()})


# Bands ----------------------------------------------------------------------------------------------------------------

# (low, high) of what a query may see, relative to itself
BANDS = {
    "causal": (-UNLIMITED, 0),
    "bottom right": (-UNLIMITED, 41),
    "causal window": (-33, 0),
    "window": (-9, 40),
    "left": (-5, UNLIMITED),
    "later keys only": (70, UNLIMITED),
    "nothing": (200, 300),
    "one key": (3, 3),
    "empty": (5, 4),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("extra_keys", (0, 2))
@pytest.mark.parametrize("band", BANDS)
def test_bands_with_and_without_keys_that_they_do_not_concern(band, extra_keys, dtype):
    low, high = BANDS[band]
    check(Case(1, 1, 1, 70, 133, low=low, high=high, extra_keys=extra_keys, dtype=dtype))


@pytest.mark.parametrize("band", ("bottom right", "window", "later keys only"))
def test_bands_with_everything_else(band):
    low, high = BANDS[band]
    case = Case(batch=1, length_q=66, length_k=101, low=low, high=high, extra_keys=2, rebuild=True)
    check(case.but(attn_mask="float 1h1j", key_mask="bool b11j", dweights="b1ij", dropout_p=0.2))


def test_extra_keys_in_tiles_of_their_own():
    """The band ends tiles before them."""
    for dtype in (torch.float32, torch.float16):
        case = Case(batch=1, length_q=9, length_k=200, low=-3, high=0, extra_keys=2, dtype=dtype)
        check(case)
        check(case.but(attn_mask="float bhij", key_mask="float b11j"))
    for attn_mask in ("float bhi1", "float 1111"):  # its gradient sums over keys, but not over these
        check(Case(batch=1, extra_keys=2, attn_mask=attn_mask))
    given = calls.operands(Case(length_k=3, extra_keys=3))  # no key but extra ones
    check(Case(length_k=3, extra_keys=3, high=0), given)


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize(
    ("length_q", "length_k"), ((1, 1), (1, 129), (17, 63), (63, 17), (64, 64), (65, 65), (130, 33), (128, 64))
)
def test_lengths_around_tiles(length_q, length_k, dtype):
    case = Case(batch=1, heads=1, length_q=length_q, length_k=length_k, dtype=dtype)
    for high in (UNLIMITED, length_k - length_q):
        check(case.but(high=high))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "value_width"),
    ((1, 1), (8, 64), (16, 24), (40, 40), (64, 1), (65, 65), (80, 24), (128, 128), (120, 200), (256, 256), (24, 250)),
)
def test_widths(width, value_width, dtype):
    if dtype == torch.float64 and max(width, value_width) > 128:
        pytest.skip("float64 heads are at most 128 wide")
    case = Case(1, 2, 1, 17, 67, width, value_width, dtype, scale=width**-0.5)
    check(case)
    check(case.but(attn_mask="float 1hij", dropout_p=0.2, rebuild=True, softcap=3.0))


def _against_own(dtype: torch.dtype, length: int, width: int, value_width: int) -> str:
    """What the table of routes has against our own kernels."""
    sizes = (1, 1, 1, length, length, width, value_width)
    rows = torch.ops.fused_remat.attention_routes(
        False, dtype, sizes, True, 0, -1, -1, 2, 0.1, 5.0, False, False, True, True, 2**20, 90, 132, 91501
    )
    (row,) = (row for row in rows if row.split(":")[0] == "own")
    return row.removeprefix("own")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_own_kernels_take_everything_but_very_wide_heads(dtype):
    widest = 128 if dtype == torch.float64 else 256
    assert _against_own(dtype, 2**29 - 1, widest, widest) == ""
    for widths in ((widest + 1, 1), (1, widest + 1)):
        reason = _against_own(dtype, 3, *widths)
        assert reason.startswith(": heads of ")
        assert reason.endswith(f" are at most {widest} wide, got {widths[0]} and {widths[1]}")
        check(Case(1, 2, 1, 5, 6, *widths, dtype, scale=0.1, dweights="b1ij"), weights_of="b1ij")  # by others
    assert _against_own(dtype, 2**29, 8, 8) == f": lengths stay below {2**29}, got {2**29} and {2**29}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), ((6, 6), (6, 2), (6, 1)))
def test_shared_heads(heads, kv_heads, dtype):
    check(Case(heads=heads, kv_heads=kv_heads, high=18, rebuild=True, dtype=dtype))


@pytest.mark.parametrize("name", ("batch", "heads", "length_q", "length_k"))
def test_nothing_to_do(name):
    case = Case(**{name: 0} | ({"kv_heads": 2} if name == "heads" else {}))
    given = calls.operands(case)
    ours = calls.run("cuda", case, given)
    if name == "length_k":
        assert (ours["out"] == 0).all() and (ours["lse"] == -math.inf).all() and (ours["dq"] == 0).all()
    for gradient in ("dk", "dv"):
        assert (ours[gradient] == 0).all()


# Layouts --------------------------------------------------------------------------------------------------------------


def _layouts(batch: int, heads: int, length: int, width: int, dtype: torch.dtype = torch.float32):
    """[B, H, L, E] tensors with a dense last dim, in every layout that a caller may bring."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    yield "heads after lengths", randn(batch, length, heads, width).transpose(1, 2)
    yield "part of a fused projection", randn(batch, length, 3, heads, width)[:, :, 1].transpose(1, 2)
    yield "every second row", randn(batch, heads, 2 * length, width)[:, :, ::2]
    yield "expanded over the batch", randn(1, heads, length, width).expand(batch, -1, -1, -1)
    yield "expanded over rows", randn(batch, heads, 1, width).expand(-1, -1, length, -1)
    yield "odd rows", randn(batch, heads, length, width + 1)[..., :width]
    yield "odd start", randn(batch * heads * length * width + 3)[3:].view(batch, heads, length, width)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("layout", [name for name, _ in _layouts(1, 1, 1, 1)])
def test_strides_of_operands(layout, dtype):
    case = Case(kv_heads=2, dtype=dtype)
    given = {name: dict(_layouts(2, 2, length, 16, dtype))[layout] for name, length in
             {"q": 17, "k": 35, "v": 35, "dout": 17}.items()}  # fmt: skip
    dense = calls.operands(case)
    if layout == "expanded over rows":
        given["v"] = dense["v"]  # of one value for all keys the gradients of scores would be 0
    check(case.but(rebuild=True), given)
    for names in ("qv", "k"):
        check(case, given | {name: dense[name] for name in names}, names)


def _guarded(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A tensor of that shape inside a larger one whose surroundings hold 7, and whether they still do."""
    *outer, rows, width = shape
    whole = torch.full((*outer, rows + 2, width + 16), 7, dtype=dtype)
    inner = whole[..., 1:-1, first : first + width]
    inner.fill_(0)

    def untouched() -> bool:
        rest = whole.clone()
        rest[..., 1:-1, first : first + width] = 7
        return bool((rest == 7).all())

    return inner, untouched


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "first"), ((13, 3), (16, 8)), ids=("odd", "aligned"))
def test_nothing_is_written_beside_the_results(width, first, dtype):
    case = Case(dtype=dtype, width=width, value_width=width, attn_mask="float bhij", key_mask="float b11j")
    given = calls.operands(case)
    plain = {name: given[name] for name in ("q", "k", "v", "dout")}
    for operands in (given, plain):
        expected = calls.run("cuda", case, operands)
        out, out_untouched = _guarded((2, 2, 17, width), dtype, first)
        lse, lse_untouched = _guarded((2, 2, 17), case.wide, first)
        fixed = calls.attending(case, operands)
        qkv = [operands[name] for name in ("q", "k", "v")]
        torch.ops.fused_remat.attention_fwd_cuda(*qkv, *fixed, out, lse)
        assert torch.equal(out, expected["out"]) and torch.equal(lse, expected["lse"])
        assert out_untouched() and lse_untouched()
        rows = calls.delta("cuda", case, operands, expected)
        made = {name: _guarded(operands[name[1:]].shape, case.wide, first)
                for name in calls.wanted_of(operands)}  # fmt: skip
        calls.op("attention_bwd", "cuda")(
            *qkv, *fixed, expected["lse"], rows["correction"], rows["delta"], operands["dout"], None, None, 1.0,
            *(made[name][0] if name in made else None for name in calls.GRADIENTS),
        )  # fmt: skip
        for name, (gradient, untouched) in made.items():
            added_to = 1 if "mask" in name else 0
            torch.testing.assert_close(gradient + added_to, expected[name], rtol=1e-5, atol=1e-6)
            assert untouched(), name


@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "attn_mask", "key_mask"))
def test_offsets_beyond_32_bits(name):
    case = Case(1, 1, 1, 3, 3, dtype=torch.float16, attn_mask="float 11ij", key_mask="float b11j")
    given = calls.operands(case)
    near = calls.run("cuda", case, given)
    strides = {"attn_mask": (0, 0, 2**30, 1), "key_mask": (0, 0, 0, 2**30)}.get(name, (0, 0, 2**30, 1))
    base = torch.empty(0, dtype=torch.float16).set_(torch.UntypedStorage(2 * (2**31 + 65536)))
    far = base.as_strided(given[name].shape, strides).copy_(given[name])
    for result, tensor in calls.run("cuda", case, given | {name: far}).items():
        assert torch.equal(tensor, near[result]), result


# What is computed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", (16, 200))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_gradients_that_nobody_wants_are_not_needed_by_the_others(dtype, width):
    case = Case(attn_mask="float 1hij", key_mask="float b11j", dropout_p=0.1, dtype=dtype, width=width)
    given = calls.operands(case)
    saved = calls.forward("cuda", case, given)
    rows = calls.delta("cuda", case, given, saved)
    everything = calls.backward("cuda", case, given, saved, rows)
    for wanted in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dattn_mask",), ("dkey_mask",), ("dq", "dkey_mask"), ()):
        some = calls.backward("cuda", case, given, saved, rows, wanted)
        assert all(torch.equal(some[name], everything[name]) for name in wanted), wanted


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_same_bits_in_every_order_of_threads(settings, dtype, thread_order):
    case = SETTINGS[settings].but(batch=1, dtype=dtype)
    given = calls.operands(case)
    first = calls.run("cuda", case, given, weights_of="b1ij")
    for seed in (1, 2, 3):
        thread_order(seed)
        again = calls.run("cuda", case, given, weights_of="b1ij")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_groups_of_heads_are_parts_of_the_whole(settings, dtype):
    case = SETTINGS[settings].but(heads=4, kv_heads=2, dtype=dtype)
    given = calls.operands(case)
    whole = calls.run("cuda", case, given)
    for group in range(2):
        heads, kv_heads = slice(2 * group, 2 * group + 2), slice(group, group + 1)
        part = {n: t[:, kv_heads if n in "kv" else heads] if t.shape[1] > 1 else t for n, t in given.items()}
        ours = case.but(heads=2, kv_heads=1, head0=2 * group, num_heads=4, dweights="")
        part.pop("dweights", None)
        saved = calls.forward("cuda", ours, part)
        for name, tensor in saved.items():
            assert torch.equal(tensor, whole[name][:, heads]), name
