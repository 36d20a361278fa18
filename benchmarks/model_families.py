"""Small random models of the families that people train: what conversion is tested and measured on.

Each is made offline from a configuration. Widths are small, but more than one head, group and block everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, HEADS, LENGTH, BATCH = 64, 160, 4, 24, 2
_TEXT = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}
_COMMON = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
}  # fmt: skip
_GROUPED = _COMMON | {"num_key_value_heads": 2, "head_dim": 16}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _tokens(below: int = 96) -> Tensor:
    return torch.randint(3, below, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def _images(size: int) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Family:
    """How to make a model, what to feed it, and what conversion does with a training step of it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any] | Tensor]  # of forward, by name or the only one
    block: str  # path of a block, for bytes
    attentions: int  # fused calls of a step
    mlps: int
    folded: int  # attentions that apply their norm themselves
    left_alone: tuple[str, ...] = ()  # names in the report
    options: dict[str, Any] = field(default_factory=dict)  # of forward, besides tensors

    def run(self, model: nn.Module) -> Tensor:
        """The first tensor of what `model`, one of this family, returns for the inputs."""
        inputs = self.inputs()
        result = model(inputs) if isinstance(inputs, Tensor) else model(**inputs, **self.options)
        return output_of(result)


def output_of(result: Any) -> Tensor:
    """The first tensor of whatever a module returns."""
    return result if isinstance(result, Tensor) else result[0]


def _transformers(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**settings)
        return getattr(transformers, name)._from_config(config)

    return make


def _text(name: str, block: str = "layers.0", folded: int = 2, **settings: Any) -> Family:
    make = _transformers(f"{name}Model", **(_TEXT | settings))
    return Family(make, lambda: {"input_ids": _tokens()}, block, attentions=2, mlps=2, folded=folded)


def _encoder_decoder(make: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]], **rest: Any) -> Family:
    return Family(make, inputs, options={"use_cache": False}, **rest)


def _timm(cls: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        kinds = {"mlp_layer": getattr(timm.layers, settings["mlp_layer"])} if "mlp_layer" in settings else {}
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "num_classes": 5}
        module, _, name = cls.rpartition(".")
        return getattr(getattr(timm.models, module), name)(**(sizes | settings | kinds))

    return make


def _vision(
    make: Callable[[], nn.Module],
    block: str,
    attentions: int,
    folded: int,
    mlps: int = 2,
    left_alone: tuple[str, ...] = (),
) -> Family:
    return Family(
        make, lambda: _images(32), block, attentions=attentions, mlps=mlps, folded=folded, left_alone=left_alone
    )


def _torchvision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=5, **settings)

    return make


def _transformer(norm_first: bool) -> Callable[[], nn.Module]:
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}

    def make() -> nn.Module:
        encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **settings)
        decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, **settings)
        return nn.Transformer(
            WIDTH, HEADS, batch_first=True,
            custom_encoder=nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder, 2),
        )  # fmt: skip

    return make


def _sequences() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for name in ("src", "tgt")}


_VIT = {"depth": 2, "num_heads": HEADS, "mlp_ratio": 2.5}
_T5 = {"d_model": WIDTH, "d_ff": HIDDEN, "d_kv": 16, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0}
_SPEECH = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "num_mel_bins": 8,
    "max_source_positions": LENGTH, "max_target_positions": LENGTH, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_inner": HIDDEN}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_NEOX = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "rotary_pct": 0.5}
_VIT_OF_TRANSFORMERS = _COMMON | _NO_DROPOUT | {"image_size": 32, "patch_size": 8}


def _both() -> dict[str, Any]:
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens()}


def _speech() -> dict[str, Any]:
    features = torch.randn(BATCH, 8, 2 * LENGTH, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "decoder_input_ids": _tokens()}


FAMILIES: dict[str, Family] = {
    "nn.Transformer, pre-norm": Family(_transformer(True), _sequences, "encoder.layers.0", 6, 4, 6),
    "nn.Transformer, post-norm": Family(_transformer(False), _sequences, "encoder.layers.0", 6, 4, 4),
    "torchvision ViT": _vision(
        _torchvision(
            "VisionTransformer", image_size=32, patch_size=8, num_layers=2, num_heads=HEADS, hidden_dim=WIDTH,
            mlp_dim=HIDDEN,
        ),
        "encoder.layers.encoder_layer_0", attentions=2, folded=2,
    ),
    "torchvision Swin": _vision(
        _torchvision(
            "SwinTransformer", patch_size=[4, 4], embed_dim=32, depths=[2], num_heads=[2], window_size=[4, 4],
            stochastic_depth_prob=0.0,
        ),
        "features.1.0", attentions=0, folded=0, left_alone=("features.1.0.attn", "features.1.1.attn"),
    ),
    "timm ViT": _vision(_timm("vision_transformer.VisionTransformer", **_VIT), "blocks.0", 2, 2),
    "timm ViT, SwiGLU": _vision(
        _timm("vision_transformer.VisionTransformer", mlp_layer="SwiGLU", **_VIT), "blocks.0", 2, 2
    ),
    "timm ViT, packed SwiGLU": _vision(
        _timm("vision_transformer.VisionTransformer", mlp_layer="SwiGLUPacked", **_VIT), "blocks.0", 2, 2
    ),
    "timm DeiT": _vision(_timm("deit.VisionTransformerDistilled", **_VIT), "blocks.0", 2, 2),
    "timm EVA": _vision(
        _timm("eva.Eva", use_rot_pos_emb=True, swiglu_mlp=True, ref_feat_shape=(4, 4), **_VIT), "blocks.0", 2, 2
    ),
    "timm Swin": _vision(
        _timm(
            "swin_transformer.SwinTransformer", patch_size=4, depths=(2,), num_heads=(HEADS,), window_size=4,
            drop_path_rate=0.0,
        ),
        "layers.0.blocks.0", attentions=2, folded=0,
    ),
    "Llama": _text("Llama", **_GROUPED),
    "Mistral": _text("Mistral", **_GROUPED, sliding_window=8),
    "Qwen2": _text("Qwen2", **_GROUPED),
    "Qwen3": _text("Qwen3", **_GROUPED),
    "Gemma": _text("Gemma", **_GROUPED),
    "Gemma 2": _text("Gemma2", **_GROUPED, sliding_window=8),
    "Gemma 3": _text("Gemma3Text", **_GROUPED, sliding_window=8),
    "Phi-3": _text("Phi3", **_COMMON),
    "GPT-2": _text("GPT2", block="h.0", **_GPT2),
    "GPT-NeoX": _text("GPTNeoX", **_COMMON, **_NEOX),
    "BERT": _text("Bert", block="encoder.layer.0", folded=0, **_COMMON, **_NO_DROPOUT),
    "RoBERTa": _text("Roberta", block="encoder.layer.0", folded=0, **_COMMON, **_NO_DROPOUT),
    "ViT": Family(
        _transformers("ViTModel", **_VIT_OF_TRANSFORMERS), lambda: {"pixel_values": _images(32)}, "layers.0", 2, 2, 2
    ),
    "CLIP text": Family(
        _transformers("CLIPTextModel", **(_TEXT | _COMMON | {"max_position_embeddings": LENGTH})),
        lambda: {"input_ids": _tokens()}, "encoder.layers.0", 2, 2, 2,
    ),
    "CLIP vision": Family(
        _transformers("CLIPVisionModel", **_COMMON, image_size=32, patch_size=8),
        lambda: {"pixel_values": _images(32)}, "encoder.layers.0", 2, 2, 2,
    ),
    "T5": _encoder_decoder(
        _transformers("T5Model", **(_TEXT | _T5)), _both, block="encoder.block.0", attentions=6, mlps=4, folded=6
    ),
    "T5, gated": _encoder_decoder(
        _transformers("T5Model", **(_TEXT | _T5), feed_forward_proj="gated-gelu"), _both, block="encoder.block.0",
        attentions=6, mlps=4, folded=6,
    ),
    "Whisper": _encoder_decoder(
        _transformers("WhisperModel", **(_TEXT | _SPEECH)), _speech, block="encoder.layers.0", attentions=6, mlps=4,
        folded=6,
    ),
}  # fmt: skip
