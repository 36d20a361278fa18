"""Layers that run their own code are told, with the reason."""

from __future__ import annotations

import re

import mlp_cases
import pytest
import torch
from audit_cases import B, D, F, H, L, encoder, step, verdicts, x
from test_convert_inline import Block
from torch import nn

import fused_remat
from fused_remat.audit import audit, auditing

pytestmark = pytest.mark.skipif(mlp_cases.needs_extension is not None, reason=str(mlp_cases.needs_extension))


def scaled(module, args, output):
    return output * 2


def hook(model):
    model.layers[0].linear1.register_forward_hook(scaled)


def drop_everything(model):
    model.layers[0].dropout.p = 1.0


def change_activation(model):
    model.layers[0].activation = torch.tanh


def parametrise(model):
    torch.nn.utils.parametrizations.weight_norm(model.layers[0].linear1)


@pytest.mark.parametrize(
    "change, reason",
    [
        (hook, "linear1 has forward hooks"),
        (drop_everything, "everything is dropped"),
        (parametrise, "linear1 is a .*ParametrizedLinear"),
        (change_activation, "activation is no longer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_layer_that_runs_its_own_code_says_why(change, reason):
    model = encoder()
    change(model)
    found = audit(model, step=lambda: step(model))
    row = found["layers.0"]
    assert row.verdict == "more" and not found.ok
    assert row.sentence.startswith("it ran its own code: ")
    assert re.search(reason, row.sentence), row.sentence
    assert row.expected_bytes is None
    assert row.observed_bytes >= B * L * F * 4  # at least one of the hidden activations
    assert "MORE" in str(found) and "unknown" in str(found)
    assert verdicts(found)["layers.1"] == "ok"
    noted = audit(model)["layers.0"]
    assert (noted.verdict, noted.sentence) == ("more", row.sentence)


def test_a_norm_that_somebody_else_reads_is_kept():
    model = encoder()
    hook(model)
    found = audit(model, step=lambda: step(model))
    assert found["layers.0.norm2"].verdict == "more"
    assert "something besides the fused layers reads its result" in found["layers.0.norm2"].sentence


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda a: a.out_proj.register_forward_hook(scaled), "out_proj has forward hooks"),
        (lambda a: setattr(a, "dropout", 1.0), "every probability is dropped"),
        (lambda a: a.out_proj.double(), "the weights have different dtypes"),
    ],
    ids=["hook", "dropout", "dtype"],
)
def test_an_attention_that_runs_its_own_code_says_why(change, reason):
    model = nn.MultiheadAttention(D, H, batch_first=True)
    fused_remat.convert(model)
    change(model)
    given = x()
    with auditing(model) as found:
        try:
            model(given, given, given)[0].sum().backward()
        except RuntimeError:
            assert "dtypes" in reason  # stock cannot run this one either
    assert found[""].verdict == "more" and reason in found[""].sentence


def test_a_hook_on_all_modules_shows():
    model = encoder()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        found = audit(model, step=lambda: step(model))
    finally:
        handle.remove()
    assert "a hook is registered on all modules" in found["layers.0"].sentence


def test_a_method_that_was_replaced_on_the_class_shows(monkeypatch):
    model = encoder()
    original = nn.TransformerEncoderLayer._ff_block
    monkeypatch.setattr(nn.TransformerEncoderLayer, "_ff_block", lambda self, given: original(self, given))
    found = audit(model, step=lambda: step(model))
    assert "_ff_block of its class was replaced after the conversion" in found["layers.0"].sentence
    assert found["layers.0"].verdict == "more"


def test_a_forward_of_its_own_on_the_instance_shows():
    model = nn.MultiheadAttention(D, H, batch_first=True)
    fused_remat.convert(model)
    model.forward = lambda *args: nn.MultiheadAttention.forward(model, *args)
    given = x()
    found = audit(model, step=lambda: model(given, given, given)[0].sum().backward())
    assert found[""].verdict == "did not run" and "forward of its own on the instance" in found[""].sentence
    assert not found.ok


def test_our_modules_say_why_they_ran_unfused():
    model = nn.Sequential(fused_remat.MLP(D, F), fused_remat.GatedMLP(D, F))
    model[0].fc1.register_forward_hook(scaled)
    model[1].up_proj.register_forward_hook(scaled)
    found = audit(model, step=lambda: step(model))
    assert [row.verdict for row in found.rows] == ["more", "more"]
    assert all("has forward hooks" in row.sentence for row in found.rows)
    strict = fused_remat.MultiheadAttention(D, H, batch_first=True, strict=True)
    given = x()
    found = audit(
        strict,
        step=lambda: strict(given, given, given, attn_mask=torch.ones(L, L, dtype=torch.bool))[0].sum().backward(),
    )
    assert "strict=True" in found[""].sentence


def test_an_mlp_written_in_its_block_is_told_apart_from_its_block():
    model = nn.Sequential(Block(), Block())
    report = fused_remat.convert(model)
    assert report.count("mlp") == 2
    given = torch.randn(4, 5, 6)
    found = audit(model, step=lambda: step(model, given))
    assert found.ok, str(found)
    row = found["1"]
    assert row.expected_bytes in (0, 4 * 5 * 6 * 4) and "other modules in its forward keep" in row.sentence
    model[0].fc1.register_forward_hook(scaled)
    found = audit(model, step=lambda: step(model, given))
    assert found["0"].verdict == "more" and "its own code" in found["0"].sentence
