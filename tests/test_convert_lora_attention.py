"""PEFT's LoRA on the linears of converted attentions: one fused call, or the layer's own code with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from convert_cases import assert_same, fused_attentions, fused_calls, kept_bytes, twins
from torch import Tensor, nn

from benchmarks.model_families import FAMILIES, Family
from fused_remat import ops
from fused_remat.convert import convert
from fused_remat.convert.attention_layer import FusedAttentionLayer
from fused_remat.convert.fused import why_changed
from fused_remat.convert.rebind import records_of

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft and transformers about each other.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*lora_bias=True"),
]

# Which linears people adapt, where q, k and v have linears of their own, share one by blocks, or by heads.
TARGETS = {
    "Llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "Qwen3": ["q_proj", "v_proj"],
    "Phi-3": ["qkv_proj", "o_proj"],
    "GPT-2": ["c_attn"],
    "GPT-NeoX": ["query_key_value", "attention.dense"],
    "BERT": ["query", "value", "attention.output.dense"],
    "ViT": ["k_proj", "o_proj"],
    "T5": ["q", "v"],
    "Whisper": ["q_proj", "out_proj"],
}


def adapted(family: Family, targets: list[str], **settings) -> nn.Module:
    """A model of the family with adapters that change what it computes."""
    torch.manual_seed(0)
    model = family.make()
    conv1d = {"fan_in_fan_out": True} if "c_attn" in targets else {}
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, **conv1d, **settings)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def step(family: Family, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    out = family.run(model.base_model.model)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach()} | gradients


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", TARGETS)
def test_adapters_run_inside_the_fused_call(name, when):
    family = FAMILIES[name]
    stock = adapted(family, TARGETS[name])
    if when == "before":  # the adapters are there when the model is converted
        model = copy.deepcopy(stock)
        convert(model)
    else:
        torch.manual_seed(0)
        plain = family.make()
        convert(plain)
        conv1d = {"fan_in_fan_out": True} if "c_attn" in TARGETS[name] else {}
        model = peft.get_peft_model(plain, peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS[name], **conv1d))
        model.load_state_dict(stock.state_dict())
    with fused_attentions() as attentions, fused_calls() as mlps:
        actual = step(family, model)
    assert (len(attentions), len(mlps)) == (family.attentions, family.mlps)
    expected = step(family, stock)
    assert sum("lora_" in key for key in expected) >= 4 and all("lora_" in key or key == "output" for key in expected)
    assert all(expected[key].abs().max() > 0 for key in expected)
    assert_same(actual, expected, 1e-5)


def attention_of(model: nn.Module) -> tuple[nn.Module, FusedAttentionLayer]:
    found = ((m, records_of(m).get("forward")) for m in model.modules())
    return next((m, record) for m, record in found if isinstance(record, FusedAttentionLayer))


OTHERS = {
    "DoRA": ({"use_dora": True}, "another kind than LoRA"),
    "dropout": ({"lora_dropout": 0.5}, "drops 0.5"),
    "bias": ({"lora_bias": True}, "with a bias"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_adapters_run_their_own_code(how):
    family, (settings, reason) = FAMILIES["Llama"], OTHERS[how]
    model, stock = twins(adapted(family, TARGETS["Llama"], **settings))
    model.eval()
    convert(model)
    model.train(), stock.train()
    if how == "dropout":
        layer, record = attention_of(model)
        assert reason in why_changed(layer, record)
    torch.manual_seed(5)
    with fused_attentions() as attentions:
        actual = step(family, model)
    torch.manual_seed(5)
    assert attentions == []
    assert_same(actual, step(family, stock), 1e-5)


def test_merged_disabled_and_unloaded_adapters():
    family = FAMILIES["Llama"]
    model, stock = twins(adapted(family, TARGETS["Llama"]).eval())
    convert(model)
    expected = family.run(stock)
    for change, fused in (("merge_adapter", 0), ("unmerge_adapter", 2)):
        getattr(model, change)()
        with fused_attentions() as attentions:
            torch.testing.assert_close(family.run(model), expected, rtol=1e-4, atol=1e-5)
        assert len(attentions) == fused
    with model.disable_adapter(), stock.disable_adapter(), fused_attentions() as attentions:
        torch.testing.assert_close(family.run(model), family.run(stock), rtol=1e-5, atol=1e-5)
    assert attentions == []
    merged = model.merge_and_unload()
    with fused_attentions() as attentions:
        torch.testing.assert_close(family.run(merged), expected, rtol=1e-4, atol=1e-5)
    assert len(attentions) == 2


@pytest.mark.skipif(ops.ready() is not None, reason="only compiled operators save memory")
def test_adapters_keep_nothing_of_their_own():
    family = FAMILIES["Llama"]
    model = adapted(family, TARGETS["Llama"])
    block, twin = model.base_model.model.layers[0], family.make().layers[0]
    convert(model), convert(twin)
    x = torch.randn(2, 24, 64)
    rotary = (torch.randn(1, 24, 16).cos(), torch.randn(1, 24, 16).sin())
    kept = [
        kept_bytes(block, x.clone().requires_grad_(), owner=model, position_embeddings=rotary),
        kept_bytes(twin, x.clone().requires_grad_(), position_embeddings=rotary),
    ]
    assert kept[0] == kept[1]


def test_bfloat16_weights_beside_float32_adapters():
    family = FAMILIES["Llama"]
    truth = adapted(family, TARGETS["Llama"])
    expected = step(family, truth)
    stock = copy.deepcopy(truth)
    for name, parameter in stock.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    model = copy.deepcopy(stock)
    convert(model)
    with fused_attentions() as attentions:
        ours = step(family, model)
    assert len(attentions) == 2
    theirs = step(family, stock)
    for key, want in expected.items():
        assert ours[key].dtype == theirs[key].dtype
        ours_off, theirs_off = ((got[key].float() - want).norm() for got in (ours, theirs))
        assert ours_off <= 2 * theirs_off + 1e-2 * want.norm(), key
