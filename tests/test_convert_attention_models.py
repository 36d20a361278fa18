"""fused_remat.convert on attentions of transformers: caches, weights, padding, implementations, compilation."""

from __future__ import annotations

import copy

import pytest
import torch
from convert_cases import fused_attentions, randomize, twins
from torch import nn

from benchmarks.model_families import FAMILIES
from fused_remat.convert import convert

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


def llama(**settings) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=0, eos_token_id=1, pad_token_id=2, **settings,
    )  # fmt: skip
    return randomize(transformers.LlamaModel._from_config(config))


TOKENS = torch.randint(3, 32, (2, 7), generator=torch.Generator().manual_seed(0))


def test_a_cache_in_training_is_filled_and_spoken_of():
    model, stock = twins(llama())
    assert convert(model).converted[0].name == "layers.0.self_attn"
    with pytest.warns(UserWarning, match="use_cache=False"), fused_attentions() as calls:
        ours = model(TOKENS, use_cache=True)
    theirs = stock(TOKENS, use_cache=True)
    assert calls == []
    torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state, rtol=1e-5, atol=1e-5)
    for layer in range(2):
        for part in ("keys", "values"):
            got, want = (getattr(out.past_key_values.layers[layer], part) for out in (ours, theirs))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with fused_attentions() as calls:
        model(TOKENS, use_cache=False)
    assert len(calls) == 2


def test_generation_with_a_cache_is_the_stock_one_and_silent():
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(llama().config).eval()
    stock = copy.deepcopy(model)
    convert(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2}
    assert torch.equal(model.generate(TOKENS, **options), stock.generate(TOKENS, **options))


def test_attention_weights_come_from_the_layers_own_code():
    model, stock = twins(llama(attn_implementation="eager", use_cache=False))
    convert(model)
    with fused_attentions() as calls:
        ours = model(TOKENS, output_attentions=True)
    assert calls == []
    for got, want in zip(ours.attentions, stock(TOKENS, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with fused_attentions() as calls:
        torch.testing.assert_close(model(TOKENS)[0], stock(TOKENS)[0], rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(implementation, side):
    model, stock = twins(llama(attn_implementation=implementation, use_cache=False))
    convert(model)
    real = torch.ones(2, 7, dtype=torch.int64)
    real[1, :3] = 0
    real = real.flip(1) if side == "right" else real
    with fused_attentions() as calls:
        ours = model(TOKENS, attention_mask=real).last_hidden_state
    assert len(calls) == 2
    theirs = stock(TOKENS, attention_mask=real).last_hidden_state
    torch.testing.assert_close(ours[real.bool()], theirs[real.bool()], rtol=1e-5, atol=1e-5)


def test_an_attention_function_that_no_fused_call_stands_for_runs():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def halved(module, *args, **kwargs):
        out, weights = sdpa_attention_forward(module, *args, **kwargs)
        return out / 2, weights

    AttentionInterface.register("halved", halved)
    AttentionMaskInterface.register("halved", sdpa_mask)
    model, stock = twins(llama(use_cache=False))
    convert(model)
    for changed in (model, stock):
        changed.set_attn_implementation("halved")
    with fused_attentions() as calls:
        torch.testing.assert_close(model(TOKENS)[0], stock(TOKENS)[0], rtol=1e-6, atol=1e-6)
    assert calls == []
    other = copy.deepcopy(stock)
    report = convert(other)
    assert {entry.reason for entry in report.skipped} == {
        "its attention function is 'halved'; fused calls can stand for sdpa, eager, fused_remat"
    }


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    model, stock = twins(llama(use_cache=False))
    convert(model)
    layer, twin = model.layers[0], stock.layers[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 7, 9):
        x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length))
        angles = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(length))
        rotary = (angles.cos(), angles.sin())
        ours = compiled(x, position_embeddings=rotary)
        torch.testing.assert_close(ours, twin(x, position_embeddings=rotary), rtol=1e-5, atol=1e-5)
    ours.sum().backward()
    twin(x, position_embeddings=rotary).sum().backward()
    for got, want in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4)


def test_weights_that_transformers_records_are_made():
    family = FAMILIES["GPT-2"]
    model = family.make().eval()
    model.set_attn_implementation("eager")
    stock = copy.deepcopy(model)
    convert(model)
    with fused_attentions() as calls:
        ours = model(**family.inputs(), output_attentions=True).attentions
    assert calls == []
    for got, want in zip(ours, stock(**family.inputs(), output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_gradient_checkpointing_that_is_enabled_later(name, reentrant):
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.make()
    convert(model)
    plain = family.run(model)
    plain.sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with fused_attentions() as calls:
        out = family.run(model.train())
        out.sum().backward()
    assert len(calls) >= family.attentions
    torch.testing.assert_close(out, plain)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[key], rtol=1e-4, atol=1e-5)


def test_position_embeddings_of_some_tokens_only():
    model, stock = twins(llama(use_cache=False))
    convert(model)
    x, angles = torch.randn(2, 7, 16), torch.randn(1, 7, 8)
    layer, twin = model.layers[0].self_attn, stock.layers[0].self_attn
    for length, fused in ((7, 1), (1, 0)):  # one row for all of them
        rotary = (angles[:, :length].cos(), angles[:, :length].sin())
        with fused_attentions() as calls:
            ours = layer(x, position_embeddings=rotary)[0]
        assert len(calls) == fused
        torch.testing.assert_close(ours, twin(x, position_embeddings=rotary)[0], rtol=1e-5, atol=1e-5)
