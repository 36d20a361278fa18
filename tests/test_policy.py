"""Policies by name: what each promises, counted on blocks and models."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from convert_cases import assert_same
from policy_cases import (
    LSE,
    STREAM,
    AttentionBlock,
    attention_chain,
    conv_chain,
    image,
    llama,
    measured,
    mlp_chain,
    rows,
    seeded,
    state_of,
    stepped,
    tokens,
    vit,
)
from torch import nn

import fused_remat
from fused_remat import convert, policies, revert
from fused_remat.convert.rebind import records_of

MODELS = {
    "mlp": (mlp_chain, rows),
    "attention": (attention_chain, rows),
    "vit": (vit, image),
    "llama": (llama, tokens),
}


@pytest.fixture(params=MODELS)
def case(request):
    pytest.importorskip({"vit": "timm", "llama": "transformers"}.get(request.param, "torch"))
    make, inputs = MODELS[request.param]
    return make, inputs()


def test_every_policy_computes_what_stock_does_and_keeps_less(case):
    make, x = case
    stock = make()
    expected, least = stepped(stock, x), measured(stock, x)
    kept = {}
    for name in policies():
        model = make()
        before = state_of(model)
        report = convert(model, policy=name)
        found = measured(model, x)
        kept[name] = found.kept_bytes
        # FLOP and not their number: a fused attention splits one product in groups of heads.
        assert (found.gemm_flop > least.gemm_flop) == (name in ("full", "sqrt"))
        assert_same(stepped(model, x), expected, 2e-5)
        assert bool(report.revert()) == (name != "everything")
        assert state_of(model) == before
    assert least.kept_bytes == kept["everything"] > kept["selective"] > kept["full"] >= kept["sqrt"]


def test_full_keeps_the_residual_streams():
    """Of four blocks: the inputs of three, as the caller has the first; an attention, its row sums, too."""
    for make, extra in ((mlp_chain, 0), (attention_chain, 4 * LSE)):
        model = make()
        convert(model, policy="full")
        assert measured(model, rows()).kept_bytes == 3 * STREAM + extra


def test_selective_keeps_what_the_products_made():
    """Of an MLP its input and `up`, four times as wide; of an attention its input, q, k, v, the output and row sums."""
    for make, streams, extra in ((mlp_chain, 3 + 4 * 4, 0), (attention_chain, 3 + 4 * 4, 4 * LSE)):
        model = make()
        convert(model, policy="selective")
        assert measured(model, rows()).kept_bytes == streams * STREAM + extra


def test_every_second_block_keeps_the_mean(case):
    make, x = case
    kept = {}
    for every in (None, 1, 2):
        model = make()
        if every is not None:
            convert(model, policy="full", every=every)
        kept[every] = measured(model, x).kept_bytes
    assert kept[2] == (kept[None] + kept[1]) / 2


def test_every_counts_from_the_first_block():
    report = convert(mlp_chain(), policy="full", every=3, dry_run=True)
    assert [entry.name for entry in report.converted if entry.kind == "mlp"] == ["0.mlp", "3.mlp"]


def test_full_recomputes_blocks_that_hold_no_fused_layer():
    model, stock, x = conv_chain(), conv_chain(), image()[:, :, :16, :16]
    report = convert(model, policy="full")
    assert [(entry.name, entry.kind) for entry in report.converted] == [(str(i), "region") for i in range(1, 5)]
    assert "keeps what it is called with" in report.converted[0].became and report.count("region") == 4
    assert_same(stepped(model, x), stepped(stock, x), 0.0)  # running statistics, too: they moved once
    # The inputs of the blocks; the image's convolution keeps nothing but the image.
    assert measured(model, x).kept_bytes == 4 * 2 * 8 * 16 * 16 * 4


class Clamped(nn.Module):
    """Looks like an MLP, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(32, 64), nn.Linear(64, 32), nn.GELU()

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)).clamp(max=1.0))


class Mixed(AttentionBlock):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Clamped()

    def forward(self, x):
        x = super().forward(x)
        return x + self.mlp(x)


def test_a_layer_that_cannot_be_fused_becomes_a_region_beside_those_that_can():
    model = seeded(lambda: nn.Sequential(Mixed(), Mixed()))
    stock = copy.deepcopy(model)
    report = convert(model, policy="full")
    found = [(entry.name, entry.kind) for entry in report.converted if entry.kind != "norm"]
    assert found == [
        ("0.attention", "attention"),
        ("1.attention", "attention"),
        ("0.mlp", "region"),
        ("1.mlp", "region"),
    ]
    assert not report.skipped  # named once, with the reason beside what became of it
    assert all("not fused: " in e.note and "outputs differ" in e.note for e in report.converted if e.kind == "region")
    assert_same(stepped(model, rows()), stepped(stock, rows()), 2e-5)
    with pytest.raises(ValueError, match="strict=True"):
        convert(stock, policy="full", strict=True)
    assert not convert(stock, policy="everything", strict=True).converted


def test_a_policy_decides_anew_for_a_converted_model():
    model, stock = mlp_chain(), mlp_chain()
    before = state_of(model)
    convert(model, keep=("up",))
    converted = state_of(model)
    report = convert(model, policy="full", exclude="0")
    assert [e.note for e in report.converted] == ["was mlp, gelu, keep=('up',)"] * 3
    assert [e.reason for e in report.skipped] == [
        "already converted: layer_norm, applied by the fused layers that read it"
    ] * 3
    assert records_of(model[0].mlp)["forward"].keep == ("up",) and records_of(model[1].mlp)["forward"].keep == ()
    again = convert(model, policy="full", exclude="0")
    assert not again.converted and "already converted: mlp, gelu, keep=()" in [e.reason for e in again.skipped]
    assert again.revert() == [] and report.revert() == ["1.mlp", "2.mlp", "3.mlp"] and state_of(model) == converted
    plain = convert(model, policy="everything")
    assert not plain.converted and {e.reason for e in plain.skipped} == {"runs its own code again"}
    assert state_of(model) == before and plain.revert() and state_of(model) == converted
    assert revert(model) and state_of(model) == before
    torch.testing.assert_close(model(rows()), stock(rows()), rtol=0, atol=0)


def test_regions_are_among_what_converting_twice_says():
    model = conv_chain()
    convert(model, policy="full")
    again = convert(model, policy="full")
    assert not again.converted and len(again.skipped) == 4
    assert again.skipped[0].reason.startswith("already a recomputed region")
    assert revert(model) == ["1", "2", "3", "4"]


def test_dry_run_changes_nothing_and_the_report_is_json():
    model = mlp_chain()
    before = state_of(model)
    report = convert(model, policy="full", dry_run=True)
    assert state_of(model) == before and report.dry_run and len(report.converted) == 8
    assert "8 would be converted" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["converted"][0]["became"] == report.converted[0].became


def test_weights_of_attention_can_be_left_out():
    model = attention_chain()
    convert(model, policy="full", need_weights=False)
    assert model[0].attention(rows(), rows(), rows())[1] is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(policy="ful"), ValueError, "'everything', 'selective', 'full', 'sqrt'; got 'ful'"),
        (dict(policy=3), TypeError, "'everything', 'selective', 'full', 'sqrt', a mapping"),
        (dict(policy="full", keep=()), ValueError, "keep and policy exclude each other"),
        (dict(policy="full", every=0), ValueError, "every must be an int of at least 1, got 0"),
        (dict(policy="full", every=1.5), TypeError, "every must be an int of at least 1, got 1.5"),
        (dict(every=2), ValueError, "every=2 goes with a policy"),
        (dict(verify="once"), ValueError, "verify='once' compares what regions rebuild, and without a policy"),
        (dict(keep=(), verify="off"), ValueError, "give policy=, or leave verify out"),
        (dict(policy="full", verify="twice"), ValueError, "verify must be one of 'off', 'once', 'always'; got 'twice'"),
        (dict(policy="sqrt", every=2), ValueError, "every=2 goes with what is decided block by block"),
    ],
)
def test_mistakes_are_named_before_anything_changes(options, error, message):
    model = mlp_chain()
    before = state_of(model)
    with pytest.raises(error, match=message):
        convert(model, **options)
    assert state_of(model) == before


def test_the_names_are_listed():
    assert list(fused_remat.policies()) == ["everything", "selective", "full", "sqrt"]
    assert all(sentence and name in fused_remat.policies.__doc__ for name, sentence in policies().items())
