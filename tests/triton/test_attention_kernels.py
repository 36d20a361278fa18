"""The attention kernels at level 3, against ATen in the same dtype and in float64: masks, bands, shapes, layouts."""

from __future__ import annotations

import math

import attention_calls as calls
import pytest
import torch
from attention_calls import UNLIMITED, Case

from fused_remat.triton import attention
from fused_remat.triton.configs import Config

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(calls.needs_extension is not None, reason=str(calls.needs_extension)),
]


# Masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("bool", "float"))
@pytest.mark.parametrize("letters", ("bhij", "1hij", "b1ij", "11ij", "bh1j", "1h1j", "b11j", "bhi1", "1hi1", "1111"))
def test_masks_broadcast_over_any_dims(letters, kind):
    calls.check(Case(attn_mask=f"{kind} {letters}"), weights_of="b1ij")


@pytest.mark.parametrize("key_mask", ("bool b11j", "float b11j"))
@pytest.mark.parametrize("attn_mask", ("", "bool 1hij", "float b1i1"))
def test_key_masks_alone_and_with_another(attn_mask, key_mask):
    calls.check(Case(attn_mask=attn_mask, key_mask=key_mask, rebuild=True))


def test_masks_of_strides_of_their_own():
    case = Case()
    given = calls.operands(case)
    for name, masks in calls.masks_of_odd_strides().items():
        calls.check(case, given | masks, name)


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


@pytest.mark.parametrize("extra_keys", (0, 2))
@pytest.mark.parametrize("band", BANDS)
def test_bands_with_and_without_keys_that_they_do_not_concern(band, extra_keys):
    low, high = BANDS[band]
    case = Case(batch=1, heads=1, length_q=70, length_k=101, low=low, high=high, extra_keys=extra_keys)
    calls.check(case, weights_of="bhij")


@pytest.mark.parametrize("band", ("bottom right", "window", "later keys only"))
def test_bands_with_everything_else(band):
    low, high = BANDS[band]
    case = Case(batch=1, length_q=66, length_k=101, low=low, high=high, extra_keys=2, rebuild=True)
    calls.check(case.but(attn_mask="float 1h1j", key_mask="bool b11j", dweights="b1ij", dropout_p=0.2))


def test_keys_beyond_every_mask():
    for attn_mask, key_mask in (("bool bhij", ""), ("float 11ij", "bool b11j"), ("", "float b11j")):
        calls.check(Case(length_k=66, extra_keys=2, attn_mask=attn_mask, key_mask=key_mask), weights_of="b1ij")
    given = calls.operands(Case(length_k=3, extra_keys=3))  # no key but extra ones
    calls.check(Case(length_k=3, extra_keys=3, high=0), given)


# Shapes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length_q", "length_k"), ((1, 1), (1, 129), (17, 63), (63, 17), (127, 129), (129, 127), (341, 17), (17, 341))
)
def test_lengths_around_tiles(length_q, length_k):
    case = Case(batch=1, heads=1, length_q=length_q, length_k=length_k)
    for high in (UNLIMITED, 0, length_k - length_q):
        calls.check(case.but(high=high))


def test_a_long_sequence():
    calls.check(Case(batch=1, heads=1, length_q=341, length_k=341, width=8, value_width=8, high=0, low=-150))


@pytest.mark.parametrize(
    ("width", "value_width"),
    ((1, 1), (16, 24), (40, 40), (64, 1), (80, 24), (128, 128), (200, 200), (256, 256), (24, 256)),
)
def test_widths(width, value_width):
    case = Case(batch=1, length_k=33, width=width, value_width=value_width, scale=width**-0.5)
    calls.check(case.but(rebuild=True))


@pytest.mark.parametrize(("heads", "kv_heads"), ((6, 6), (6, 2), (6, 1)))
def test_shared_heads(heads, kv_heads):
    calls.check(Case(heads=heads, kv_heads=kv_heads, high=18, rebuild=True), weights_of="b1ij")


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16), ids=str)
def test_other_dtypes(dtype):
    case = Case(batch=1, length_q=66, length_k=70, dtype=dtype)
    calls.check(case.but(high=4), weights_of="bhij")
    calls.check(case.but(attn_mask="float 1hij", key_mask="bool b11j", rebuild=True, dropout_p=0.25, dweights="b1ij"))


# Layouts --------------------------------------------------------------------------------------------------------------


def _layouts(batch: int, heads: int, length: int, width: int):
    """[B, H, L, E] tensors with a dense last dim, in every layout that a caller may bring."""
    yield "heads after lengths", torch.randn(batch, length, heads, width).transpose(1, 2)
    yield "part of a fused projection", torch.randn(batch, length, 3, heads, width)[:, :, 1].transpose(1, 2)
    yield "every second row", torch.randn(batch, heads, 2 * length, width)[:, :, ::2]
    yield "expanded over the batch", torch.randn(1, heads, length, width).expand(batch, -1, -1, -1)
    yield "expanded over rows", torch.randn(batch, heads, 1, width).expand(-1, -1, length, -1)


@pytest.mark.parametrize("layout", [name for name, _ in _layouts(1, 1, 1, 1)])
def test_strides_of_operands(layout):
    case = Case(kv_heads=2)
    lengths = {"q": 17, "k": 35, "v": 35, "dout": 17}
    given = {name: dict(_layouts(2, 2, length, 16))[layout] for name, length in lengths.items()}
    dense = calls.operands(case)
    if layout == "expanded over rows":
        given["v"] = dense["v"]  # of one value for all keys the gradients of scores would be 0
    calls.check(case.but(rebuild=True), given)
    for names in ("qv", "k"):
        calls.check(case, given | {name: dense[name] for name in names}, names)


@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "attn_mask", "key_mask"))
def test_offsets_beyond_32_bits(name):
    case = Case(batch=1, heads=1, length_q=3, length_k=3, dtype=torch.float16, attn_mask="float 11ij",
                key_mask="float b11j")  # fmt: skip
    given = calls.operands(case)
    near = calls.run("triton", case, given)
    strides = {"attn_mask": (0, 0, 2**30, 1), "key_mask": (0, 0, 0, 2**30)}.get(name, (0, 0, 2**30, 1))
    base = torch.empty(2**31 + 65536, dtype=torch.float16)  # memory that is never touched between the rows
    far = base.as_strided(given[name].shape, strides).copy_(given[name])
    for result, tensor in calls.run("triton", case, given | {name: far}).items():
        assert torch.equal(tensor, near[result]), result


def test_results_beyond_32_bits():
    case = Case(batch=1, heads=1, length_q=3, length_k=3, dtype=torch.float16)
    given = calls.operands(case)
    near = calls.run("triton", case, given)
    memory = torch.empty(2**31 + 65536, dtype=torch.float16)
    out = memory.as_strided((1, 1, 3, 16), (0, 0, 2**30, 1))
    lse = torch.empty(1, 1, 3)
    attention.attention_fwd(given["q"], given["k"], given["v"], *calls.attending(case, given), out, lse)
    assert torch.equal(out, near["out"])
    memory = torch.empty(2**31 + 65536, dtype=torch.float32)
    made = {name: memory.as_strided((1, 1, 3, 16), (0, 0, 2**30, 1), 32 * place)
            for place, name in enumerate(("dq", "dk", "dv"))}  # fmt: skip
    rows = calls.delta("triton", case, given, near)
    attention.attention_bwd(
        given["q"], given["k"], given["v"], *calls.attending(case, given), near["lse"], rows["correction"],
        rows["delta"], given["dout"], None, None, 1.0, *made.values(), None, None,
    )  # fmt: skip
    for name, gradient in made.items():
        assert torch.equal(gradient, near[name]), name


# What is computed -----------------------------------------------------------------------------------------------------


def test_gradients_that_nobody_wants_are_not_needed_by_the_others():
    case = Case(attn_mask="float 1hij", key_mask="float b11j", dropout_p=0.1)
    given = calls.operands(case)
    saved = calls.forward("triton", case, given)
    rows = calls.delta("triton", case, given, saved)
    everything = calls.backward("triton", case, given, saved, rows)
    for wanted in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dattn_mask",), ("dkey_mask",), ("dq", "dkey_mask"), ()):
        some = calls.backward("triton", case, given, saved, rows, wanted)
        assert all(torch.equal(some[name], everything[name]) for name in wanted), wanted


SETTINGS = {
    "plain": Case(),
    "causal": Case(high=0),
    "everything": Case(
        attn_mask="float 1hij", key_mask="bool b11j", dropout_p=0.3, dweights="b1ij", rebuild=True, high=20
    ),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_same_bits_on_every_rerun(settings):
    case = SETTINGS[settings].but(batch=1)
    given = calls.operands(case)
    first, second = (calls.run("triton", case, given, weights_of="b1ij") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tile", ((32, 16), (16, 64)), ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_any_tiles_give_the_same(settings, tile):
    case = SETTINGS[settings].but(batch=1, length_q=34, length_k=50)
    with calls.forced(Config(*tile)):
        calls.check(case, weights_of="b1ij")


@pytest.mark.parametrize("settings", SETTINGS)
def test_groups_of_heads_are_parts_of_the_whole(settings):
    case = SETTINGS[settings].but(heads=4, kv_heads=2)
    given = calls.operands(case)
    whole = calls.run("triton", case, given)
    for group in range(2):
        heads, kv_heads = slice(2 * group, 2 * group + 2), slice(group, group + 1)
        part = {n: t[:, kv_heads if n in "kv" else heads] if t.shape[1] > 1 else t for n, t in given.items()}
        ours = case.but(heads=2, kv_heads=1, head0=2 * group, num_heads=4, dweights="")
        part.pop("dweights", None)
        saved = calls.forward("triton", ours, part)
        for name, tensor in saved.items():
            assert torch.equal(tensor, whole[name][:, heads]), name


# Rows with nothing to attend to, and what is not finite --------------------------------------------------------------


@pytest.mark.parametrize("kind", ("bool", "float"))
def test_rows_with_nothing_to_attend_to(kind):
    case = Case(attn_mask=f"{kind} bhij", rebuild=True, dweights="b1ij", dropout_p=0.2)
    given = calls.operands(case)
    nothing = False if kind == "bool" else -math.inf
    given["attn_mask"][:, :, 3] = nothing
    given["attn_mask"][1, 0] = nothing
    ours = calls.check(case, given, weights_of="bhij")
    assert (ours["lse"][1, 0] == -math.inf).all()
    for name in ("out", "rebuilt", "delta", "dq"):
        assert (ours[name][1, 0] == 0).all() and (ours[name][:, :, 3] == 0).all()
    assert (ours["weights"][1, 0] == 1).all()
    assert all(ours[name].isfinite().all() for name in calls.wanted_of(given))


@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_what_is_not_finite_shows_where_it_should(value, name):
    case = Case(batch=1, heads=1, length_q=4, length_k=5, width=3, value_width=3)
    given = calls.operands(case)
    given[name][0, 0, 1, 2] = value
    ours, truth = calls.run("triton", case, given), calls.run("aten", case, given)
    for key in ("out", "dq", "dk", "dv"):
        assert torch.equal(ours[key].isfinite(), truth[key].isfinite()), key


def test_what_is_not_finite_stays_with_the_rows_that_see_it():
    case = Case(batch=1, heads=1, length_q=70, length_k=70, high=0)
    given = calls.operands(case)
    given["k"][0, 0, 40] = math.nan
    ours = calls.run("triton", case, given)
    assert ours["out"][:, :, :40].isfinite().all() and ours["out"][:, :, 40:].isnan().all()
    assert ours["dv"][:, :, 41:].isnan().all()
    given = calls.operands(case.but(key_mask="bool b11j"))
    given["k"][0, 0, 40], given["key_mask"][..., 40] = math.nan, False
    given["key_mask"][..., 0] = True
    assert calls.run("triton", case, given)["out"].isfinite().all()


# Scores that a log-sum-exp cannot carry ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", (torch.finfo(torch.float32).min, -1e9, -1e6, -1e4, 1e4))
@pytest.mark.parametrize("rebuild", (False, True))
def test_a_row_masked_by_one_large_number_keeps_its_probabilities(value, rebuild):
    case = Case(batch=1, length_q=5, length_k=40, attn_mask="float 11ij", rebuild=rebuild, dweights="b1ij" * rebuild)
    given = calls.operands(case)
    given["attn_mask"] = torch.zeros(1, 1, 5, 40)
    given["attn_mask"][:, :, 2] = value
    calls.check(case, given, weights_of="b1ij")


@pytest.mark.parametrize("score", (-105.0, 110.0, 3000.0))
def test_scores_far_from_zero_and_padded_tails(score):
    case = Case(batch=1, heads=1, length_q=33, length_k=65, scale=1.0)
    given = calls.operands(case)
    given["q"] *= 0.1
    given["k"] *= 0.1
    given["q"][..., 0], given["k"][..., 0] = 1.0, score
    saved = calls.forward("triton", case, given)
    rows = calls.delta("triton", case, given, saved)
    assert (saved["lse"].abs() > 64).all() and (rows["correction"] != 0).any()
    calls.check(case, given, weights_of="bhij")
    calls.check(case.but(high=32, rebuild=True), given)


def test_corrections_are_for_large_rows_alone():
    case = Case(rebuild=True)
    given = calls.operands(case)
    for rebuild in (False, True):
        saved = calls.forward("triton", case, given)
        assert (calls.delta("triton", case.but(rebuild=rebuild), given, saved)["correction"] == 0).all()


# Dropout and other implementers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 70, 65)), ids=str)
@pytest.mark.parametrize("seed", (0, -1, 2**62 + 12345))
def test_dropout_masks_are_those_of_cpp(shape, seed):
    batch, heads, length_q, length_k = shape
    case = Case(batch, heads, heads, length_q, length_k, 3, length_k, dropout_p=0.3, seed=seed)
    given = calls.operands(case)
    given["v"] = torch.eye(length_k).expand(batch, heads, -1, -1)
    masks = [calls.forward(backend, case, given)["out"] != 0 for backend in ("triton", "cpp")]
    assert torch.equal(*masks)
    later = case.but(head0=2, num_heads=heads + 5)
    masks = [calls.forward(backend, later, given)["out"] != 0 for backend in ("triton", "cpp")]
    assert torch.equal(*masks)


def test_dropout_numbers_elements_beyond_32_bits():
    case = Case(1, 1, 1, 40, 9, 3, 9, dropout_p=0.3, head0=2**26, num_heads=2**27)
    given = calls.operands(case)
    given["v"] = torch.eye(9).expand(1, 1, -1, -1)
    masks = [calls.forward(backend, case, given)["out"] != 0 for backend in ("triton", "cpp")]
    assert torch.equal(*masks)


@pytest.mark.parametrize("settings", SETTINGS)
def test_forward_and_backward_on_different_backends_agree(settings):
    case = SETTINGS[settings].but(batch=1, length_q=65)
    given = calls.operands(case)
    calls.check(case, given, forward_by="cpp")
    ours, mixed = calls.run("cpp", case, given), calls.run("cpp", case, given, forward_by="triton")
    for name, expected in ours.items():
        torch.testing.assert_close(mixed[name], expected, rtol=1e-4, atol=1e-5)


# Tensor descriptors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS)
def test_tensor_descriptors_load_what_pointers_do(settings):
    case = SETTINGS[settings].but(length_q=33, width=24, value_width=40)
    given = calls.operands(case)
    given["k"] = given["k"].transpose(1, 2).contiguous().transpose(1, 2)
    made = []
    for tma in (True, False):
        with calls.forced(Config(32, 32, tma=tma)), calls.launched() as kernels:
            made.append(calls.run("triton", case, given, weights_of="b1ij"))
        assert all(spec.tma == tma for spec in kernels)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.parametrize("name", ("odd rows", "odd start", "no stride", "reversed dims"))
def test_layouts_that_descriptors_cannot_describe_go_by_pointers(name):
    case = Case(width=16, value_width=16)
    given = calls.operands(case)
    given["k"] = {
        "odd rows": torch.randn(2, 1, 35, 17)[..., :16],
        "odd start": torch.randn(2, 1, 36, 16).flatten()[3 : 3 + 2 * 35 * 16].view(2, 1, 35, 16),
        "no stride": torch.randn(1, 1, 35, 16).expand(2, 1, 35, 16),
        "reversed dims": torch.randn(1, 35, 2, 16).permute(2, 0, 1, 3),
    }[name]
    with calls.forced(Config(32, 32, tma=True)), calls.launched() as kernels:
        calls.check(case, given)
    assert kernels and all(spec.tma == (name == "reversed dims") for spec in kernels)
