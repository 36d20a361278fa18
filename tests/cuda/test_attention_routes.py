"""Which kernels run attention on a GPU: every reason of the table, what they allocate, and who tells of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from attention_facts import (
    BACKWARD,
    BF16,
    BOTTOM_RIGHT,
    FORWARD,
    FP16,
    FP32,
    FP64,
    MIB,
    TOP_LEFT,
    TORCH,
    allocated,
    bytes_of_one,
    rows,
)
from cuda_routes import deterministic, without
from torch import Tensor

import fused_remat
from fused_remat import attention_routes, doctor

SOURCE = Path(__file__).parents[2] / "csrc/cuda/attention_routes.cpp"

# The table ------------------------------------------------------------------------------------------------------------


def test_rows_stand_in_the_order_of_preference():
    assert list(rows(FORWARD)) == ["cudnn", "flash", "efficient", "own", "aten"]
    assert not any(rows(FORWARD).values())
    with deterministic():
        backward = rows(BACKWARD)
    assert not any(backward[name] for name in ("flash", "efficient", "own", "aten"))


# (rows that are refused, the facts, words of the one reason)
AGAINST = {
    "nothing": (TORCH, FORWARD.sized(length_k=0), "there is nothing to compute"),
    "no query": (TORCH, FORWARD.sized(length_q=0), "there is nothing to compute"),
    "many samples": (TORCH, FORWARD.sized(batch=65536, length_q=1, length_k=2), "more than 65535 samples or heads"),
    "masks": (TORCH, FORWARD.but(masks=True), "a mask would have to be expanded"),
    "extra keys": (TORCH, FORWARD.but(causal=TOP_LEFT, extra_keys=1), "the band does not concern the extra keys"),
    "dropout": (TORCH, FORWARD.but(dropout_p=0.1), "its dropout masks come from another generator"),
    "softcap": (TORCH, FORWARD.but(softcap=30.0), "it has no softcap"),
    "unaligned": (TORCH, FORWARD.but(aligned=False), "do not begin on 16 bytes"),
    "empty rows": (("flash",), FORWARD.but(causal=BOTTOM_RIGHT).sized(length_q=130),
                   "rows with nothing to attend to are zeros here"),
    "dweights": (("efficient",), BACKWARD.but(dweights=True), "the weights have a gradient"),
    "dmasks": (("efficient",), BACKWARD.but(dmasks=True), "a mask has a gradient"),
    "no out": (("efficient",), BACKWARD.but(knows_out=False), "it makes delta from out, which is not at hand"),
    "cudnn elsewhere": (("cudnn",), FORWARD.but(arch=80), "compute capability 9.0 and 10.x only, this is 8"),
    "cudnn on 12.0": (("cudnn",), FORWARD.but(arch=120), "compute capability 9.0 and 10.x only, this is 12"),
    "no cudnn": (("cudnn",), FORWARD.but(cudnn=0), "cuDNN is not there"),
    "old cudnn": (("cudnn",), FORWARD.but(cudnn=91500), "before cuDNN 9.15.1 lengths"),
    "cudnn fp32": (("cudnn",), FORWARD.but(dtype=FP32), "it takes float16 and bfloat16"),
    "cudnn wide": (("cudnn",), FORWARD.sized(width=136), "head widths go up to 128, got 136 and 64"),
    "cudnn wide values": (("cudnn",), FORWARD.sized(value_width=136), "head widths go up to 128, got 64 and 136"),
    "cudnn one key": (("cudnn",), FORWARD.sized(length_k=1), "it does not take a single key"),
    "cudnn window": (("cudnn",), FORWARD.but(window=(3, 0)), "of bands it has the causal mask that is aligned to the"),
    "cudnn corner": (("cudnn",), FORWARD.but(causal=BOTTOM_RIGHT).sized(length_k=130), "of bands it has the causal"),
    "cudnn backward": (("cudnn",), BACKWARD, "its backward adds dq in no fixed order"),
    "odd width": (TORCH, FORWARD.sized(width=20, value_width=20), "head widths must be multiples of 8, got 20 and 20"),
    "flash arch": (("flash",), FORWARD.but(arch=75, dtype=FP16), "runs on compute capability 8.0 to 12.1, this is 7.5"),
    "flash newer": (("flash",), FORWARD.but(arch=130), "it runs on compute capability 8.0 to 12.1, this is 13"),
    "flash fp32": (("flash",), FORWARD.but(dtype=FP32), "it takes float16 and bfloat16"),
    "flash widths": (("flash",), FORWARD.sized(value_width=32), "q and v must be equally wide, got 64 and 32"),
    "flash wide": (("flash",), FORWARD.sized(width=264, value_width=264), "head widths go up to 256, got 264 and 264"),
    "flash corner": (("flash",), FORWARD.but(causal=TOP_LEFT).sized(length_k=130), "aligned to the bottom right"),
    "flash far right": (("flash",), FORWARD.but(window=(-1, 99)).sized(length_k=101), "cut off on the right"),
    "flash left alone": (("flash",), FORWARD.but(window=(30, -1)).sized(length_k=101), "cut off on the right"),
    "flash backward": (("flash",), BACKWARD, "its backward adds dq by atomics"),
    "efficient arch": (("efficient",), FORWARD.but(arch=75, dtype=FP16), "trusted on compute capability 8.0 to 12.1"),
    "efficient newer": (("efficient",), FORWARD.but(arch=130), "trusted on compute capability 8.0 to 12.1"),
    "efficient fp64": (("efficient",), FORWARD.but(dtype=FP64), "it takes float16, bfloat16 and float32"),
    "efficient fp32 width": (("efficient",), FORWARD.but(dtype=FP32).sized(width=6), "multiples of 4, got 6 and 64"),
    "efficient wide": (("efficient",), FORWARD.sized(value_width=264), "head widths go up to 256, got 64 and 264"),
    "efficient window": (("efficient",), FORWARD.but(window=(3, 0)), "of bands it has the two causal masks"),
    "efficient few heads": (("efficient",), BACKWARD.sized(batch=15), "one block per head, 120 of them"),
    "efficient few kv heads": (("efficient",), BACKWARD.sized(kv_heads=4), "one block per head, 64 of them"),
}  # fmt: skip
# Others say the same words of themselves.
ALIKE = ("empty rows", "dweights", "dmasks", "no out", "cudnn fp32", "flash fp32", "flash wide", "efficient wide")
SET_BY_TORCH = {
    "cudnn": "torch.backends.cuda.enable_cudnn_sdp(False) is set",
    "flash": "torch.backends.cuda.enable_flash_sdp(False) is set",
    "efficient": "torch.backends.cuda.enable_mem_efficient_sdp(False) is set",
}


@pytest.mark.parametrize("name", AGAINST)
def test_each_reason(name):
    refused, facts, words = AGAINST[name]
    found = rows(facts)
    for row in refused:
        assert sum(words in reason for reason in found[row]) == 1, found
    unlike = set() if name in ALIKE else set(TORCH) - set(refused)
    assert not any(words in reason for row in unlike for reason in found[row]), found
    assert found["aten"] == []


@pytest.mark.parametrize("name", (
    "masks", "dropout", "softcap", "unaligned", "no cudnn", "old cudnn", "cudnn elsewhere", "cudnn one key",
    "cudnn wide values", "flash corner", "flash newer", "efficient window", "efficient few heads", "no out",
))  # fmt: skip
def test_one_reason_is_enough(name):
    refused, facts, words = AGAINST[name]
    (row, *_) = refused
    assert len(rows(facts)[row]) == 1 and words in rows(facts)[row][0]


@pytest.mark.parametrize("name", SET_BY_TORCH)
def test_switches_of_torch_are_heeded(name):
    with without(name):
        found = rows(FORWARD)
    assert found[name] == [SET_BY_TORCH[name]]
    assert [row for row in found if found[row]] == [name]


def test_what_deterministic_algorithms_change():
    with deterministic():
        assert rows(FORWARD)["cudnn"] == ["torch counts it among what is not deterministic"]
        assert rows(BACKWARD)["flash"] == []
    torch.use_deterministic_algorithms(True, warn_only=True)  # flash then adds by atomics all the same
    try:
        assert rows(FORWARD)["cudnn"] == []
        assert "its backward adds dq by atomics" in rows(BACKWARD)["flash"][0]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("arch", "width", "refused"), [
    (86, 200, True), (89, 224, True), (120, 208, True), (86, 192, False), (86, 232, False), (80, 208, False),
    (90, 208, False), (100, 208, False),
])  # fmt: skip
def test_widths_that_flash_cannot_differentiate(arch, width, refused):
    with deterministic():
        found = rows(BACKWARD.but(arch=arch).sized(width=width, value_width=width))["flash"]
    assert any("its backward lacks heads of 200 to 224" in reason for reason in found) == refused


@pytest.mark.parametrize(("facts", "free"), [
    (FORWARD.but(causal=TOP_LEFT), TORCH),
    (FORWARD.but(causal=BOTTOM_RIGHT), TORCH),  # one corner, as lengths are equal
    (FORWARD.but(causal=TOP_LEFT).sized(length_k=100), TORCH),  # flash: a window
    (FORWARD.but(causal=TOP_LEFT).sized(length_k=130), ("cudnn", "efficient")),
    (FORWARD.but(causal=BOTTOM_RIGHT).sized(length_k=130), ("flash", "efficient")),
    (FORWARD.but(window=(3, 0)), ("flash",)),
    (FORWARD.but(window=(3, 2)).sized(length_k=126), ("flash",)),
    (FORWARD.but(window=(127, 127)), TORCH),  # beyond what any query could see
    (FORWARD.but(extra_keys=2), TORCH),  # ordinary keys without a band
    (FORWARD.but(window=(-1, 3)).sized(length_q=132), ("flash",)),
    (FORWARD.but(window=(0, -1)).sized(length_q=129), ()),  # its last row sees no key
    (FORWARD.but(window=(1, -1)).sized(length_q=129), ("flash",)),
])  # fmt: skip
def test_bands(facts, free):
    found = rows(facts)
    assert tuple(name for name in TORCH if not found[name]) == free, found


def test_every_reason_has_a_test():
    """By the first words of each in the source."""
    source = SOURCE.read_text()
    texts = set(re.findall(r'add\(\s*(?:[^"]*?),\s*"([^"]+)"', source, re.DOTALL))
    assert len(texts) > 30
    tested = [words for _, _, words in AGAINST.values()] + list(SET_BY_TORCH.values())
    tested += [
        "torch counts it among what is not deterministic",
        "its backward lacks heads of 200 to 224 on compute capability 8.6, 8.9 and 12.x", "it allocates ",
    ]  # fmt: skip
    seen = " | ".join(reason for _, facts, _ in AGAINST.values() for found in rows(facts).values() for reason in found)
    seen += " | ".join(tested)
    missing = [text for text in texts if text.strip() not in seen]
    assert not missing


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_bytes_of_forward():
    facts = FORWARD.sized(kv_heads=4, length_q=100, width=72, value_width=72)  # two query heads a piece
    out, lse = allocated(2 * 100 * 72 * 2), allocated(2 * 100 * 4)
    assert bytes_of_one(facts, "cudnn") == out + lse
    # Four blocks of rows for 264 places: flash cuts the one block of 128 keys no further.
    assert bytes_of_one(facts, "flash") == out + lse
    one = allocated(100 * 72 * 2) + allocated(128 * 4)  # the heads take turns, lse is padded to 32
    assert bytes_of_one(facts, "efficient") == one
    wide = facts.sized(width=136, value_width=136)  # the sums of out leave registers
    assert bytes_of_one(wide, "efficient") == allocated(100 * 136 * 2) + allocated(128 * 4) + allocated(100 * 136 * 4)


def test_bytes_of_flash_with_keys_in_pieces():
    """One head of 256 rows is 4 blocks for 264 places: 16 blocks of keys make 16 partial results."""
    facts = FORWARD.sized(batch=1, heads=1, kv_heads=1, length_q=256, length_k=2048, width=128, value_width=128)
    partial = 16 * 256
    expected = allocated(256 * 128 * 2) + allocated(256 * 4) + allocated(partial * 128 * 4) + allocated(partial * 4)
    assert bytes_of_one(facts, "flash") == expected
    assert bytes_of_one(facts.sized(length_k=128), "flash") == allocated(256 * 128 * 2) + allocated(256 * 4)


def test_bytes_of_backward():
    facts = BACKWARD.sized(kv_heads=4, length_q=100, length_k=50, width=72, value_width=72)
    q, k, rows_ = allocated(2 * 100 * 72 * 2), allocated(50 * 72 * 2), allocated(2 * 100 * 4)
    with deterministic():
        found = bytes_of_one(facts, "flash")
    sums = allocated(2 * 128 * 4) + allocated(66 * 2 * 128 * 96 * 4)  # 132 / 2 copies of dq, padded
    assert found == 2 * q + rows_ + q + 2 * k + sums + 4 * k
    one = allocated(100 * 72 * 2)
    tiles = 128 * 128 * 4 + 2 * 2 * 16  # of dq
    workspace = allocated(tiles + 64 * (128 + 128) * 4)
    expected = 2 * one + allocated(128 * 4) + allocated(100 * 4) + one + 2 * k + workspace
    assert bytes_of_one(facts, "efficient") == expected
    wide = facts.but(dtype=FP32)
    one, k = allocated(100 * 72 * 4), allocated(50 * 72 * 4)
    expected = 2 * one + allocated(128 * 4) + allocated(100 * 4) + one + 2 * k + one + allocated(100 * 4)
    expected += allocated(tiles)
    assert bytes_of_one(wide, "efficient") == expected


# In words -------------------------------------------------------------------------------------------------------------


def test_the_doctor_prints_the_table(monkeypatch):
    monkeypatch.setattr(doctor, "_arch", lambda gpus: 90)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    facts = doctor.examine()
    lines = dict(doctor.describe(facts))
    assert lines["attention in CUDA C++, bf16, causal, forward"] == "cudnn"
    backward = lines["attention in CUDA C++, bf16, causal, backward"]
    assert backward.startswith(
        "own (not cudnn: its backward adds dq in no fixed order; not flash: its backward adds dq by"
    )
    assert lines["attention in CUDA C++, bf16, many short samples, backward"].startswith("efficient (not cudnn: ")
    assert lines["attention in CUDA C++, bf16, mask, forward"].startswith("own (not cudnn, flash, efficient: a mask ")
    assert len([label for label in lines if label.startswith("attention in CUDA C++")]) == 2 * len(
        attention_routes.TYPICAL
    )


def test_the_doctor_says_why_there_is_no_table(monkeypatch):
    monkeypatch.setattr(doctor, "_arch", lambda gpus: None)
    reason = "no GPU is here whose compute capability would decide"
    facts = doctor.examine()
    assert facts["attention_kernels"] is None and facts["attention_kernels_error"] == reason
    assert dict(doctor.describe(facts))["attention in CUDA C++"] == f"unknown: {reason}"
    monkeypatch.setattr(attention_routes, "why_unknown", lambda: "it is cold")
    assert doctor.examine()["attention_kernels_error"] == "it is cold"


def test_explain_names_the_kernels(monkeypatch):
    monkeypatch.setattr(sys.modules["fused_remat.functional.attention"], "arch_of", lambda device: 90)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    q, k, v = (torch.empty(2, 4, 64, 32, dtype=BF16) for _ in range(3))

    def plans(q: Tensor = q, **how):
        with fused_remat.backend("cuda"):
            told = fused_remat.explain(fused_remat.attention, q, k, v, workspace=64 * MIB, **how)
        return told.forward, told.backward

    forward_, backward_ = plans(is_causal=True)
    assert (forward_.kernels, backward_.kernels) == ("cudnn", "own")
    assert list(backward_.why_not) == ["cudnn", "flash", "efficient"]
    assert str(forward_) == "scores in tiles by 'cudnn' kernels"
    assert "not efficient: in a fixed order its backward runs one block per head, 8 of them" in str(backward_)
    unaligned = torch.empty(2 * 4 * 64 * 32 + 1, dtype=BF16)[1:].view(2, 4, 64, 32)
    for changes in ({"q": unaligned}, {"window": (3, 3), "softcap": 1.0}, {"attn_mask": torch.ones(64, 64).bool()}):
        assert plans(**changes)[0].kernels == "own", changes
    assert plans(window=(3, 3))[0].kernels == "flash"
    forward_, backward_ = plans(attn_mask=torch.zeros(64, 64, requires_grad=True))
    assert "a mask has a gradient" in backward_.why_not["flash"]
    assert "a mask has a gradient" not in forward_.why_not["flash"]
    tight = fused_remat.explain
    with fused_remat.backend("cuda"):
        told = tight(fused_remat.attention, q, k, v, workspace=8)
    assert any("the workspace has 1 for it" in reason for reason in told.forward.why_not["flash"])
