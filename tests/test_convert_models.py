"""fused_remat.convert on real models from timm, torchvision and transformers, tiny and with random weights."""

from __future__ import annotations

import copy
import functools
import io
import re

import pytest
import torch
from convert_cases import assert_same, fused_calls, randomize, step
from torch import nn

from fused_remat.convert import Report, convert, revert

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(0))


def timm_vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.models.VisionTransformer(
        img_size=16,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=5,
        class_token=False,
        global_pool="avg",
    )


def timm_model(cls: str, mlp: str = "", **settings) -> nn.Module:
    timm = pytest.importorskip("timm")
    small = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    if mlp:
        settings["mlp_layer"] = getattr(timm.layers, mlp)
    return getattr(timm.models, cls)(**(small | settings))


def timm_swin() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.models.SwinTransformer(
        img_size=16,
        patch_size=4,
        embed_dim=16,
        depths=(2,),
        num_heads=(2,),
        window_size=2,
        num_classes=5,
        drop_path_rate=0.0,
    )


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5
    )


def torchvision_swin() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.SwinTransformer([4, 4], 16, [2], [2], [4, 4], stochastic_depth_prob=0.0, num_classes=5)


def transformer(name: str, **settings) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}
    config = getattr(transformers, f"{name}Config")(**(small | settings))
    return getattr(transformers, f"{name}Model")._from_config(config)


COMMON = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA_LIKE = COMMON | {"num_key_value_heads": 1, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
VISION = COMMON | {"image_size": 16, "patch_size": 8, "num_channels": 3}
MODERN_BERT = {"cls_token_id": 0, "sep_token_id": 1, "attention_dropout": 0.0, "mlp_dropout": 0.0}
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}

MODELS = {
    "timm ViT": (timm_vit, IMAGES, ["gelu"] * 2),
    "timm DeiT": (lambda: timm_model("VisionTransformerDistilled"), IMAGES, ["gelu"]),
    "timm EVA": (lambda: timm_model("Eva"), IMAGES, ["gelu"]),
    "timm EVA SwiGLU": (lambda: timm_model("Eva", swiglu_mlp=True, swiglu_align_to=8), IMAGES, ["silu"]),
    "timm EVA SwiGLUPacked": (lambda: timm_model("Eva", swiglu_mlp=True), IMAGES, ["silu"]),
    "timm Swin": (timm_swin, IMAGES, ["gelu"] * 2),
    # The block passes its own activation, gelu.
    "timm SwiGLU": (lambda: timm_model("VisionTransformer", "SwiGLU"), IMAGES, ["gelu"]),
    "timm GluMlp": (lambda: timm_model("VisionTransformer", "GluMlp"), IMAGES, ["gelu"]),
    "timm SwiGLUPacked": (lambda: timm_model("VisionTransformer", "SwiGLUPacked"), IMAGES, ["gelu"]),
    "torchvision Swin": (torchvision_swin, IMAGES, ["gelu"] * 2),
    "torchvision ViT": (torchvision_vit, IMAGES, ["gelu"] * 2),
    "Llama": (lambda: transformer("Llama", **LLAMA_LIKE), TOKENS, ["silu"] * 2),
    "Llama with bias": (lambda: transformer("Llama", **LLAMA_LIKE, mlp_bias=True), TOKENS, ["silu"] * 2),
    "Mistral": (lambda: transformer("Mistral", **LLAMA_LIKE), TOKENS, ["silu"] * 2),
    "Qwen2": (lambda: transformer("Qwen2", **LLAMA_LIKE), TOKENS, ["silu"] * 2),
    "Qwen3": (lambda: transformer("Qwen3", **LLAMA_LIKE), TOKENS, ["silu"] * 2),
    "Phi-3": (lambda: transformer("Phi3", **LLAMA_LIKE), TOKENS, ["silu"] * 2),
    "GLM-4": (lambda: transformer("Glm4", **LLAMA_LIKE), TOKENS, ["silu"] * 2),
    "Gemma": (lambda: transformer("Gemma", **LLAMA_LIKE), TOKENS, ["gelu_tanh"] * 2),
    "Gemma 2": (lambda: transformer("Gemma2", **LLAMA_LIKE), TOKENS, ["gelu_tanh"] * 2),
    "Gemma 3": (lambda: transformer("Gemma3Text", **LLAMA_LIKE), TOKENS, ["gelu_tanh"] * 2),
    "GPT-NeoX": (lambda: transformer("GPTNeoX", **COMMON), TOKENS, ["gelu"] * 2),
    "GPT-2": (lambda: transformer("GPT2", **GPT2), TOKENS, ["gelu_tanh"] * 2),
    "BERT": (lambda: transformer("Bert", **COMMON, **NO_DROPOUT), TOKENS, ["gelu"] * 2),
    "RoBERTa": (lambda: transformer("Roberta", **COMMON, **NO_DROPOUT), TOKENS, ["gelu"] * 2),
    "ModernBERT": (lambda: transformer("ModernBert", **COMMON, **MODERN_BERT), TOKENS, ["gelu"] * 2),
    "ALBERT": (lambda: transformer("Albert", **COMMON, **NO_DROPOUT, embedding_size=8), TOKENS, ["gelu_tanh"] * 2),
    "Longformer": (
        lambda: transformer("Longformer", **COMMON, **NO_DROPOUT, attention_window=4),
        TOKENS,
        ["gelu"] * 2,
    ),
    "ViT": (lambda: transformer("ViT", **VISION, **NO_DROPOUT), IMAGES, ["gelu"] * 2),
    "CLIP": (lambda: transformer("CLIPVision", **VISION), IMAGES, ["quick_gelu"] * 2),
    "DINOv2 SwiGLU": (lambda: transformer("Dinov2", **VISION, **NO_DROPOUT, use_swiglu_ffn=True), IMAGES, ["silu"] * 2),
    "chunked BERT": (
        lambda: transformer("Bert", **COMMON, **NO_DROPOUT, chunk_size_feed_forward=1),
        TOKENS,
        ["gelu"] * 14,
    ),
    "T5 encoder, not gated": (lambda: transformer("T5", **T5).encoder, TOKENS, ["relu"] * 2),
    "T5 encoder": (lambda: transformer("T5", **T5, feed_forward_proj="gated-gelu").encoder, TOKENS, ["gelu_tanh"] * 2),
}


def mlps(report: Report) -> list[str]:
    """Names of the MLPs that were converted."""
    return [entry.name for entry in report.converted if "mlp" in entry.kind]


def stock_attentions(name: str, module: nn.Module) -> bool:
    """Attentions whose conversion is not part of these tests."""
    return type(module).__name__ in ("Gemma2Attention", "GPTNeoXAttention")


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def case(request):
    make, inputs, activations = MODELS[request.param]
    return randomize(make()).requires_grad_(True), inputs, activations


def test_equal_to_stock_in_training_and_evaluation(case):
    model, inputs, activations = case
    stock = copy.deepcopy(model)
    names, keys = [name for name, _ in model.named_modules()], list(model.state_dict())
    report = convert(model, exclude=stock_attentions)
    assert [entry for entry in report.skipped if "Attention" not in entry.class_name] == []
    assert [name for name, _ in model.named_modules()] == names and list(model.state_dict()) == keys
    for mode in (True, False):
        with fused_calls() as calls:
            actual = step(model.train(mode), inputs)
        assert calls == activations
        expected = step(stock.train(mode), inputs)
        assert_same({"output": actual["output"]}, {"output": expected["output"]}, 1e-5)
    # Gradients in float64: in float32 attention amplifies rounding. The norms of transformers stay in float32.
    images = inputs.double() if inputs.is_floating_point() else inputs
    assert_same(step(model.double(), images), step(stock.double(), images), 1e-6)
    stock.load_state_dict(model.state_dict(), strict=True)
    revert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]


def test_copies_and_pickles(case):
    model, inputs, activations = case
    convert(model, exclude=stock_attentions)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = step(model.eval(), inputs)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False).eval()):
        with fused_calls() as calls:
            actual = step(copied, inputs)
        assert calls == activations
        assert_same(actual, expected, 1e-6)


@pytest.mark.parametrize("name", ["timm ViT", "torchvision ViT", "Llama", "GPT-2", "BERT"])
def test_layers_compile_without_a_graph_break(name):
    make, _, _ = MODELS[name]
    model = randomize(make())
    stock = copy.deepcopy(model)
    path = mlps(convert(model))[0]
    layer = model.get_submodule(path)
    stock_layer = stock.get_submodule(path)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2))
    if name == "BERT":
        compiled = torch.compile(layer.feed_forward_chunk, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), stock_layer.feed_forward_chunk(x), rtol=1e-5, atol=1e-5)
        return
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    actual = {key.replace("_orig_mod.", ""): value for key, value in step(compiled, x).items()}
    assert_same(actual, step(stock_layer, x), 1e-5)


def test_gpt2_gradients_arrive_in_the_layout_of_the_parameters():
    model = randomize(transformer("GPT2", **GPT2))
    convert(model)
    step(model, TOKENS)
    mlp = model.h[0].mlp
    assert mlp.c_fc.weight.shape == mlp.c_fc.weight.grad.shape == (16, 64)
    assert mlp.c_proj.weight.shape == mlp.c_proj.weight.grad.shape == (64, 16)


@pytest.mark.parametrize("part", ["intermediate", "output", "intermediate.dense", "intermediate.intermediate_act_fn"])
def test_hooks_inside_bert_run_the_stock_code(part):
    model = randomize(transformer("Bert", **COMMON, **NO_DROPOUT))
    layer, seen = model.encoder.layer[0], []
    convert(model)
    handle = layer.get_submodule(part).register_forward_hook(lambda module, args, output: seen.append(part))
    with fused_calls() as calls:
        step(model, TOKENS)
    assert seen == [part] and len(calls) == 1
    revert(model)
    report = convert(model)
    assert mlps(report) == ["encoder.layer.1"]
    assert report.skipped[0].reason == f"{part} has forward hooks"
    handle.remove()


def test_bert_norm_and_dropout_are_called_outside_the_op():
    model, seen = randomize(transformer("Bert", **COMMON)), []
    convert(model)
    layer = model.encoder.layer[0]
    layer.output.LayerNorm.register_forward_hook(lambda module, args, output: seen.append("norm"))
    layer.output.dropout.register_forward_hook(lambda module, args, output: seen.append("dropout"))
    with fused_calls() as calls:
        model(TOKENS)
    assert seen == ["dropout", "norm"] and len(calls) == 2


def test_bert_like_layers_with_a_scale_of_their_own_are_left_alone():
    modeling = pytest.importorskip("transformers.models.bert.modeling_bert")

    class ScaledOutput(modeling.BertOutput):
        def forward(self, hidden_states, input_tensor):
            hidden_states = self.dropout(self.dense(hidden_states) * self.scale)
            return self.LayerNorm(hidden_states + input_tensor)

    model = transformer("Bert", **COMMON, **NO_DROPOUT)
    model.encoder.layer[0].output.__class__ = ScaledOutput
    model.encoder.layer[0].output.scale = nn.Parameter(torch.ones(()))  # changes nothing until it is trained
    report = convert(model)
    assert mlps(report) == ["encoder.layer.1"]
    assert "no attribute 'scale'" in report.skipped[0].reason


def test_transformers_gradient_checkpointing_is_untouched():
    model = randomize(transformer("Llama", **LLAMA_LIKE)).train()
    stock = copy.deepcopy(model)
    # The method has a new name since transformers 5.24.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    flags = [getattr(module, "gradient_checkpointing", None) for module in model.modules()]
    convert(model, strict=True)
    assert [getattr(module, "gradient_checkpointing", None) for module in model.modules()] == flags and True in flags
    assert_same(step(model, TOKENS), step(stock, TOKENS), 1e-5)


def test_frozen_embedding_and_frozen_mlp():
    model = randomize(transformer("Llama", **LLAMA_LIKE))
    model.embed_tokens.requires_grad_(False)
    model.layers[0].mlp.gate_proj.requires_grad_(False)
    stock = copy.deepcopy(model)
    convert(model, strict=True)
    actual = step(model, TOKENS)
    assert "dembed_tokens.weight" not in actual and "dlayers.0.mlp.gate_proj.weight" not in actual
    assert "dlayers.0.mlp.up_proj.weight" in actual
    assert_same(actual, step(stock, TOKENS), 1e-5)


def test_llama_variants_that_compute_something_else_are_left_alone():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

    class TwoWaySplit(modeling.LlamaMLP):
        """As with `pretraining_tp`, but scaled: the names promise a gated MLP, the code does more."""

        def forward(self, x):
            pieces = self.gate_proj.weight.chunk(2), self.up_proj.weight.chunk(2), self.down_proj.weight.chunk(2, 1)
            return 2 * sum(
                nn.functional.linear(self.act_fn(nn.functional.linear(x, g)) * nn.functional.linear(x, u), d)
                for g, u, d in zip(*pieces, strict=True)
            )

    model = transformer("Llama", **LLAMA_LIKE)
    model.layers[0].mlp.__class__ = TwoWaySplit
    report = convert(model)
    assert mlps(report) == ["layers.1.mlp"]
    assert report.skipped[0].name == "layers.0.mlp" and "outputs differ" in report.skipped[0].reason


def test_timm_variants():
    layers = pytest.importorskip("timm.layers")
    model = nn.ModuleDict(
        {
            "tanh": layers.Mlp(6, 10, act_layer=lambda: nn.GELU(approximate="tanh"), drop=(0.1, 0.2)),
            "norm": layers.Mlp(6, 10, norm_layer=nn.LayerNorm),
            "glu": layers.GluMlp(6, 20),
        }
    )
    report = convert(model)
    assert [(entry.name, entry.became) for entry in report.converted] == [
        ("tanh", "mlp, gelu_tanh, keep=()"),
        ("glu", "gated mlp, sigmoid, keep=()"),
    ]
    reasons = {entry.name: entry.reason for entry in report.skipped}
    assert reasons["norm"] == "it has norm (nn.LayerNorm), which is no part of a fused MLP"


BART_LIKE = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}


def spatial_gate(**settings):
    return functools.partial(pytest.importorskip("timm.models.mlp_mixer").SpatialGatingUnit, **settings)


SPREAD = "its forward calls intermediate and output between other steps"
STACKED = r"its weights \(gate_up_proj, down_proj\) are stacks of 2 matrices, one per expert"
LEFT = {  # every MLP that is not converted has a line
    "DeBERTa": (lambda: transformer("DebertaV2", **COMMON), [SPREAD] * 2),
    "ESM": (lambda: transformer("Esm", **COMMON), [SPREAD] * 2),
    "Mixtral": (lambda: transformer("Mixtral", **LLAMA_LIKE, num_local_experts=2), [STACKED] * 2),
    "GPT-OSS": (lambda: transformer("GptOss", **LLAMA_LIKE, num_local_experts=2), [STACKED] * 2),
    "MPT": (lambda: transformer("Mpt", d_model=16, n_layers=1, n_heads=2), ["missing 1 required .* 'residual'"]),
    "Bloom": (lambda: transformer("Bloom", hidden_size=16, n_layer=1, n_head=2), ["activation .*BloomGelu is not one"]),
    "timm scaled SwiGLU": (
        lambda: timm_model("Eva", swiglu_mlp=True, scale_mlp=True),
        [r"it has norm \(timm.layers.norm.LayerNorm\)"],
    ),
    "timm ConvMlp": (
        lambda: pytest.importorskip("timm.layers").ConvMlp(6, 10),
        ["fc1 and fc2 are convolutions; only an MLP of nn.Linear is converted"],
    ),
    "timm GluMlp of convolutions": (
        lambda: pytest.importorskip("timm.layers").GluMlp(6, 20, use_conv=True),
        ["fc1 and fc2 are convolutions"],
    ),
    "timm gMLP": (
        lambda: pytest.importorskip("timm.layers").GatedMlp(6, 20, gate_layer=spatial_gate(seq_len=3)),
        ["its linears do not chain"],
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_every_mlp_that_is_left_alone_has_a_reason(name):
    make, reasons = LEFT[name]
    report = convert(make())
    skipped = [entry for entry in report.skipped if "Attention" not in entry.class_name]
    assert mlps(report) == [] and len(skipped) == len(reasons)
    for entry, reason in zip(skipped, reasons, strict=True):
        assert re.search(reason, entry.reason), entry.reason


def test_q_former():
    report = convert(transformer("Blip2QFormer", **COMMON, **NO_DROPOUT, encoder_hidden_size=16))
    assert mlps(report) == ["encoder.layer.0", "encoder.layer.1"]
    assert {entry.became for entry in report.converted if entry.kind == "mlp"} == {"mlp, gelu, keep=()"}


def test_meta_model_converts_and_then_loads():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=4096, intermediate_size=11008, num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.LlamaModel(config)
    report = convert(model, strict=True)
    assert mlps(report) == ["layers.0.mlp", "layers.1.mlp"]
    assert all(parameter.is_meta for parameter in model.parameters())
