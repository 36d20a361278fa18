"""fused_remat.integrations.transformers: tiny random models through transformers' attention interface."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator

import pytest
import torch
from convert_cases import assert_same, randomize
from torch import Tensor, nn

from fused_remat.integrations import transformers as integration

transformers = pytest.importorskip("transformers")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

NAME = integration.DEFAULT_NAME
TAKES_BIAS = (
    "position_bias" in inspect.signature(sdpa_attention_forward).parameters
)  # where it does not, T5 computes attention on its own
OTHERS = ["eager", "sdpa"]

BATCH, LENGTH, VOCABULARY = 2, 9, 32
IDS = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(BATCH, 8, 32, generator=torch.Generator().manual_seed(1))  # [B, mel bins, frames]
LEFT_PADDED, RIGHT_PADDED = torch.ones(2, BATCH, LENGTH, dtype=torch.int64)
LEFT_PADDED[0, :3] = 0
RIGHT_PADDED[1, -4:] = 0

TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
COMMON = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.0}
WINDOW = 4  # shorter than the sequence
MODELS = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": WINDOW}),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED),
    "Gemma2": (
        "Gemma2ForCausalLM",
        GROUPED | {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "final_logit_softcapping": None},
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "Bert": ("BertModel", COMMON | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "T5": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0},
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8}
        | {"max_source_positions": 16, "max_target_positions": 32},
    ),
}
DECODERS = ["Llama", "Mistral", "Qwen3", "GPT2"]
SEQ2SEQ = ["T5", "Whisper"]
LAYERS = {"T5": 6, "Whisper": 6}  # attentions per forward, where not 2


@pytest.fixture(autouse=True)
def registered(one_thread) -> Iterator[None]:
    """Registers under the default name and leaves transformers as it was."""
    registries = integration._interfaces()
    before = [dict(registry._global_mapping) for registry in registries]
    integration.register()
    yield
    for registry, mapping in zip(registries, before, strict=True):
        registry._global_mapping.clear()
        registry._global_mapping.update(mapping)


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """(shape of k, mask, is_causal, dropout_p) of each call of `fused_remat.attention` through the interface."""
    seen: list[tuple] = []
    original = integration.attention

    def watched(q, k, v, *, attn_mask=None, is_causal=False, dropout_p=0.0, **kwargs):
        seen.append((tuple(k.shape), attn_mask, is_causal, dropout_p))
        return original(q, k, v, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(integration, "attention", watched)
    return seen


def build(name: str, **settings) -> nn.Module:
    class_name, config = MODELS[name]
    extra = {"decoder_start_token_id": 2} if name in SEQ2SEQ else {}
    made = getattr(transformers, f"{name}Config")(**(TOKENS | config | extra | settings))
    model = randomize(getattr(transformers, class_name)(made))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter *= 0.5  # flatter softmaxes, which round less
            if "norm" in parameter_name.lower() and parameter_name.endswith("weight"):
                parameter += 1.0  # else gradients die out where norms follow the residual sums
    return model


def run(model: nn.Module, implementation: str, padding: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients with a random incoming gradient that is zero at padding, whose rows mean nothing."""
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    name = model.config.model_type
    if name == "whisper":
        out = model(SOUND, decoder_input_ids=IDS, decoder_attention_mask=padding).logits
    elif name == "t5":
        out = model(IDS, attention_mask=padding, decoder_input_ids=IDS, decoder_attention_mask=padding).logits
    else:
        out = model(IDS, attention_mask=padding)[0]
    used = torch.ones(BATCH, LENGTH) if padding is None else padding.to(out.dtype)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)) * used.unsqueeze(-1)
    out.backward(dout)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for zero in [name for name in gradients if name.endswith("key.bias")]:
        assert gradients.pop(zero).abs().max() < 1e-5  # softmax does not see it: rounding noise, whoever computes it
    return {"output": out.detach() * used.unsqueeze(-1)} | gradients


@pytest.mark.parametrize("padding", [None, LEFT_PADDED, RIGHT_PADDED], ids=["whole", "left", "right"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_model_equals_eager_and_sdpa(name, training, padding, calls):
    if name in ("T5", "Whisper") and padding is LEFT_PADDED:
        pytest.skip("decoders of these start at the left")
    if name == "T5" and not TAKES_BIAS:
        pytest.skip("T5 of this transformers computes attention on its own")
    model = build(name).train(training)
    actual = run(model, NAME, padding)
    assert len(calls) == LAYERS.get(name, 2)
    for other in OTHERS if name != "Gemma2" else ["eager"]:  # transformers' sdpa has no softcap
        assert_same(actual, run(model, other, padding), 1e-5)
    assert len(calls) == LAYERS.get(name, 2)


def test_key_value_heads_are_not_repeated(calls):
    run(build("Llama"), NAME)
    assert [shape for shape, *_ in calls] == [(BATCH, 2, LENGTH, 8)] * 2


def test_whole_sequences_are_causal_without_a_mask(calls):
    run(build("Llama"), NAME)
    assert all(mask is None and causal for _, mask, causal, _ in calls)
    calls.clear()
    run(build("Bert"), NAME)
    assert all(mask is None and not causal for _, mask, causal, _ in calls)


@pytest.mark.parametrize("name", ["Mistral", "Llama"])
def test_masks_need_the_mask_interface(name):
    """Were only the attention registered, transformers would make no masks: a window or padding would be lost."""
    model, padding = build(name).eval(), LEFT_PADDED if name == "Llama" else None
    expected = run(model, "eager", padding)["output"]
    assert_same({"output": run(model, NAME, padding)["output"]}, {"output": expected}, 1e-5)
    _, masks = integration._interfaces()
    del masks._global_mapping[NAME]
    if name == "Mistral":
        with pytest.raises(ValueError, match=r"sliding_window=4 with 9 keys came without a mask.*register\(\)"):
            run(model, NAME)
    else:
        assert (run(model, NAME, padding)["output"] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache_is_equal(name, padded, cache, calls):
    model = build(name).eval()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "cache_implementation": cache, "disable_compile": True}
    options |= {"attention_mask": LEFT_PADDED if padded else torch.ones_like(IDS)}
    made = {}
    for implementation in (NAME, *OTHERS):
        model.set_attn_implementation(implementation)
        made[implementation] = model.generate(IDS, **options)
    assert len(calls) == 2 * 5
    for other in OTHERS:
        assert torch.equal(made[NAME].sequences, made[other].sequences)
        for ours, theirs in zip(made[NAME].logits, made[other].logits, strict=True):
            assert_same({"logits": ours}, {"logits": theirs}, 1e-5)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_generation_with_cross_attention_is_equal(name):
    model = build(name).eval()
    inputs = SOUND if name == "Whisper" else IDS
    made = {}
    for implementation in (NAME, *OTHERS):
        model.set_attn_implementation(implementation)
        made[implementation] = model.generate(inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert made[NAME].shape[0] == BATCH and made[NAME].shape[1] >= 5
    assert all(torch.equal(made[NAME], made[other]) for other in OTHERS)


def test_prefill_in_pieces_with_a_cache_is_equal():
    """More than one query and more keys than queries: the mask has the corner."""
    model = build("Llama").eval()
    model.set_attn_implementation(NAME)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {keyword: transformers.DynamicCache(config=model.config)}
    with torch.no_grad():
        whole = model(IDS).logits
        pieces = [model(piece, use_cache=True, **cache).logits for piece in IDS.split([4, 5], dim=1)]
    assert_same({"out": torch.cat(pieces, dim=1)}, {"out": whole}, 1e-5)


def test_position_bias_of_t5_has_a_gradient():
    model = build("T5")
    gradients = run(model, NAME, RIGHT_PADDED)
    biases = [name for name in gradients if "relative_attention_bias" in name]
    assert len(biases) == 2 and all(gradients[name].abs().max() > 1e-3 for name in biases)


def test_dropout_applies_in_training_only(calls):
    model = build("Llama", attention_dropout=0.5)
    run(model.train(), NAME)
    run(model.eval(), NAME)
    assert [p for *_, p in calls] == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.slow
def test_compiled_model_is_equal():
    model = build("Mistral", num_hidden_layers=1).eval()
    expected = run(model, "eager")["output"]
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_same({"output": compiled(IDS).logits}, {"output": expected}, 1e-5)


def test_model_survives_a_deep_copy_and_switching_back():
    model = build("Llama").eval()
    expected = run(model, "sdpa")["output"]
    twin = copy.deepcopy(model)
    assert_same({"output": run(twin, NAME)["output"]}, {"output": expected}, 1e-5)
    assert torch.equal(run(twin, "sdpa")["output"], expected)


def test_sinks_of_a_model_are_refused():
    config = transformers.GptOssConfig(**TOKENS, **GROUPED, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.GptOssForCausalLM(config)
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="s_aux is not an argument"):
        model(IDS)


def test_ignored_argument_passes():
    integration.register("lenient", ignore=["my_flag"])
    model = build("Llama")
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="my_flag is not an argument"):
        model(IDS, my_flag=torch.ones(1))
    expected = model(IDS).logits
    model.set_attn_implementation("lenient")
    assert torch.equal(model(IDS, my_flag=torch.ones(1)).logits, expected)
    with pytest.raises(ValueError, match="other_flag is not an argument"):
        model(IDS, other_flag=torch.ones(1))
