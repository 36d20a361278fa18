"""fused_remat.convert on blocks that normalise first: nn.Transformer's layers and torchvision's ViT."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from convert_cases import assert_same, fused_attentions, fused_calls, kept_bytes, randomize, step, twins
from torch import nn
from torch.nn.utils import parametrizations

from fused_remat import ops
from fused_remat.convert import convert, revert

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

SETTINGS = {"dropout": 0.0, "batch_first": True, "norm_first": True}


def encoder_layer(**settings) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, **(SETTINGS | settings))


def decoder_layer(**settings) -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 16, **(SETTINGS | settings))


def vision_block() -> nn.Module:
    models = pytest.importorskip("torchvision.models.vision_transformer")
    return models.EncoderBlock(2, 8, 16, 0.0, 0.0)


BLOCKS = {"encoder layer": (encoder_layer, 1), "decoder layer": (decoder_layer, 2), "vision block": (vision_block, 1)}


def tensors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(3, 5, 8, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.fixture(params=BLOCKS, ids=lambda name: name.replace(" ", "-"))
def case(request):
    """(converted block in float64, stock twin, its inputs)."""
    make, inputs = BLOCKS[request.param]
    model, stock = twins(randomize(make()).double())
    convert(model, strict=True)
    return model, stock, tensors(inputs)


def attentions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_children() if isinstance(module, nn.MultiheadAttention)]


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.children() if isinstance(module, nn.LayerNorm)]


def test_norms_are_folded_and_nothing_changes(case):
    model, stock, inputs = case
    for mode in (True, False):
        with fused_attentions() as folded, fused_calls() as mlps:
            actual = step(model.train(mode), *inputs)
        assert folded == ["layer_norm"] * len(attentions(model)) and len(mlps) == 1
        assert_same(actual, step(stock.train(mode), *inputs), 1e-9)
        with torch.no_grad():
            torch.testing.assert_close(model(*inputs), stock(*inputs), rtol=1e-9, atol=1e-9)


def test_reports_say_what_was_folded(case):
    model, _, _ = case
    revert(model)
    report = convert(model)
    folded = [entry for entry in report.converted if entry.kind == "norm"]
    assert {entry.became for entry in folded} == {"layer_norm, applied by the fused layers that read it"}
    assert report.count("attention") == len(attentions(model)) and report.count("mlp") == 1
    assert len(folded) == report.count("norm") == len(norms(model))
    assert "layer_norm, applied by" in repr(model)
    assert convert(model).converted == []
    assert sorted(report.revert()) == sorted(dict.fromkeys(entry.name for entry in report.converted))
    assert all("_fused_remat" not in vars(module) for module in model.modules()) and "fused" not in repr(model)


def test_masks_go_where_they_belong():
    model, stock = twins(randomize(decoder_layer()).double())
    convert(model)
    x, memory = tensors(2)
    generator = torch.Generator().manual_seed(0)
    masks = {
        "tgt_mask": torch.rand(5, 5, generator=generator) < 0.3,
        "memory_mask": torch.rand(5, 5, generator=generator) < 0.3,
        "tgt_key_padding_mask": torch.arange(5).expand(3, 5) > 3,
        "memory_key_padding_mask": torch.arange(5).expand(3, 5) > 2,
    }
    for mask in ("tgt_mask", "memory_mask"):
        masks[mask][:, 0] = False
    for names in [(name,) for name in masks] + [tuple(masks)]:
        options = {name: masks[name] for name in names}
        torch.testing.assert_close(model(x, memory, **options), stock(x, memory, **options), rtol=1e-9, atol=1e-9)
    encoder, stock = twins(randomize(encoder_layer()).double())
    convert(encoder)
    args = masks["tgt_mask"], masks["tgt_key_padding_mask"]
    torch.testing.assert_close(encoder(x, *args), stock(x, *args), rtol=1e-9, atol=1e-9)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with fused_attentions() as folded:
        torch.testing.assert_close(encoder(x, causal, is_causal=True), stock(x, causal, is_causal=True))
    assert folded == ["layer_norm"]
    torch.testing.assert_close(encoder(src=x), stock(src=x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_and_norms_without_weights(affine):
    for make, kind in (
        (lambda: nn.RMSNorm(8, elementwise_affine=affine), "rms_norm"),
        (lambda: nn.RMSNorm(8, eps=0.1, elementwise_affine=affine), "rms_norm"),
        (lambda: nn.LayerNorm(8, eps=0.1, elementwise_affine=affine), "layer_norm"),
        (lambda: nn.LayerNorm(8, elementwise_affine=affine, bias=False), "layer_norm"),
    ):
        block = encoder_layer()
        block.norm1 = make()
        model, stock = twins(randomize(block).double())
        convert(model)
        with fused_attentions() as folded:
            actual = step(model, *tensors(1))
        assert folded == [kind]
        assert_same(actual, step(stock, *tensors(1)), 1e-9)


class Shifted(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def replaced_norm(model: nn.Module) -> None:
    name = next(name for name, module in model.named_children() if isinstance(module, nn.LayerNorm))
    setattr(model, name, randomize(Shifted(8, dtype=torch.float64), seed=6))


CHANGES = {
    "hook on the norm": lambda m: norms(m)[0].register_forward_hook(lambda m, args, out: out * 2),
    "pre-hook on the norm": lambda m: norms(m)[0].register_forward_pre_hook(lambda m, args: (args[0] * 2 + 1,)),
    "own forward of the norm": lambda m: setattr(norms(m)[0], "forward", lambda x: x * 2),
    "another norm": replaced_norm,
    "parametrized norm": lambda m: parametrizations.weight_norm(norms(m)[0], dim=None),
    "hook on the attention": lambda m: m.get_submodule(attentions(m)[0]).register_forward_hook(
        lambda m, args, out: (out[0] * 2, None)
    ),
    "pre-hook on the attention": lambda m: m.get_submodule(attentions(m)[0]).register_forward_pre_hook(
        lambda m, args: (args[0] * 2, *args[1:])
    ),
    "own forward of the attention": lambda m: setattr(
        m.get_submodule(attentions(m)[0]), "forward", lambda q, k, v, **options: (q * 2, None)
    ),
}


# What the norm reads may change, and who watches the attention: neither stands between the two.
STILL_FOLDED = ("pre-hook on the norm", "hook on the attention")


@pytest.mark.parametrize("how", CHANGES)
def test_what_is_no_longer_plain_is_called(case, how):
    model, stock, inputs = case
    for changed in (model, stock):
        CHANGES[how](changed)
    with fused_attentions() as folded:
        actual = step(model, *inputs)
    assert folded.count("layer_norm") == len(attentions(model)) - (how not in STILL_FOLDED)
    assert_same(actual, step(stock, *inputs), 1e-9)


def test_out_proj_that_is_not_plain_runs_stock_code(case):
    model, stock, inputs = case
    for changed in (model, stock):
        parametrizations.weight_norm(changed.get_submodule(attentions(changed)[-1]).out_proj)
    with fused_attentions() as folded:
        actual = step(model, *inputs)
    assert len(folded) == len(attentions(model)) - 1
    assert_same(actual, step(stock, *inputs), 1e-9)


def test_hooks_on_dropouts_linears_and_the_block_fire(case):
    model, _, inputs = case
    fired = []
    hooked = [module for module in model.modules() if isinstance(module, (nn.Dropout, nn.Linear)) or module is model]
    hooked = [module for module in hooked if type(module).__name__ != "NonDynamicallyQuantizableLinear"]
    for module in hooked:
        module.register_forward_hook(lambda module, args, out: fired.append(module))
    model(*inputs)
    assert sorted(map(id, fired)) == sorted(map(id, hooked))


def test_hook_on_all_modules_sees_what_stock_would_call(case):
    model, stock, inputs = case
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module).__name__)
    )
    try:
        stock(*inputs)
        expected = seen[:]
        seen.clear()
        model(*inputs)
    finally:
        handle.remove()
    assert seen == expected


def test_settings_changed_later_are_followed():
    model, stock = twins(randomize(encoder_layer()).double())
    convert(model)
    x = tensors(1)
    for changed in (model, stock):
        changed.norm_first = False
    assert_same(step(model, *x), step(stock, *x), 1e-9)
    for changed in (model, stock):
        changed.norm_first = True
        changed._sa_block = lambda x, *args, **options: x * 3
    assert_same(step(model, *x), step(stock, *x), 1e-9)


def test_patched_class_runs_the_patch(monkeypatch):
    model = randomize(encoder_layer())
    convert(model)
    monkeypatch.setattr(nn.TransformerEncoderLayer, "forward", lambda self, src: src * 2)
    x = torch.randn(3, 5, 8)
    assert torch.equal(model(x), 2 * x)


@pytest.mark.parametrize(
    ("cls", "name", "patch"),
    [
        (nn.TransformerEncoderLayer, "_sa_block", lambda self, x, *args, **options: x * 2),
        (nn.TransformerEncoderLayer, "_ff_block", lambda self, x: x * 2),
        (nn.MultiheadAttention, "forward", lambda self, query, key, value, **options: (query * 2, None)),
        (nn.LayerNorm, "forward", lambda self, x: x * 2),
    ],
)
def test_patched_parts_of_the_class_run_the_patch(cls, name, patch, monkeypatch):
    model, stock = twins(randomize(encoder_layer()).double())
    convert(model)
    monkeypatch.setattr(cls, name, patch)
    assert_same(step(model, *tensors(1)), step(stock, *tensors(1)), 1e-9)


def test_selection_applies_to_norms_too():
    for options, kinds in (
        ({"exclude": "self_attn"}, {"mlp", "norm"}),
        ({"include": "self_attn"}, {"attention"}),
        ({"exclude": nn.LayerNorm}, {"attention", "mlp"}),
        ({}, {"norm", "mlp", "attention"}),
    ):
        report = convert(encoder_layer(), **options)
        assert {entry.kind for entry in report.converted} == kinds


def test_copies_pickles_and_compiled_blocks(case):
    model, stock, inputs = case
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with fused_attentions() as folded:
            actual = step(copied, *inputs)
        assert folded == ["layer_norm"] * len(attentions(model))
        assert_same(actual, step(stock, *inputs), 1e-9)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = {key.replace("_orig_mod.", ""): value for key, value in step(compiled, *inputs).items()}
    assert_same(actual, step(stock, *inputs), 1e-9)


@pytest.mark.parametrize("norm_first", [True, False])
def test_whole_transformer(norm_first):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        model = nn.Transformer(8, 2, 2, 2, 16, **(SETTINGS | {"norm_first": norm_first}))
    model, stock = twins(randomize(model).double())
    report = convert(model, strict=True)
    assert (report.count("attention"), report.count("mlp")) == (6, 4)
    x, y = tensors(2)
    for mode in (True, False):
        assert_same(step(model.train(mode), x, y), step(stock.train(mode), x, y), 1e-9)
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[1, 3:] = True
        options = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        with torch.no_grad():
            torch.testing.assert_close(model(x, y, **options), stock(x, y, **options), rtol=1e-9, atol=1e-9)
    padding[2] = True
    with torch.no_grad():
        assert model(x, y, **options).isfinite().all()
    revert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in stock.modules()]


def test_whole_vision_transformer():
    models = pytest.importorskip("torchvision.models")
    model = models.VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5
    )
    model, stock = twins(randomize(model).double())
    report = convert(model, strict=True)
    assert (report.count("attention"), report.count("mlp"), report.count("norm")) == (2, 2, 4)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mode in (True, False):
        with fused_attentions() as folded:
            actual = step(model.train(mode), images)
        assert folded == ["layer_norm"] * 2
        assert_same(actual, step(stock.train(mode), images), 1e-9)


def test_autocast():
    model, stock = twins(randomize(encoder_layer()))
    convert(model)
    x = tensors(1)[0].float()

    def results(module, enabled):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = module(leaf)
        assert y.dtype == torch.float32
        y.square().mean().backward()
        return [y, leaf.grad, *(p.grad for p in module.parameters())]

    with fused_attentions() as folded:
        ours = results(model, True)
    assert folded == ["layer_norm"]
    for got, want, truth in zip(ours, results(stock, True), results(stock, False), strict=True):
        assert (got - truth).norm() <= 2 * (want - truth).norm() + 5e-3 * truth.norm()


@pytest.mark.skipif(ops.ready() is not None, reason="only compiled operators save memory")
@pytest.mark.parametrize("mode", [True, False])
def test_the_residual_stream_alone_is_kept(mode):
    x, u, lse = torch.randn(4, 128, 64), 4 * 128 * 64 * 4, 4 * 4 * 128 * 4
    model = nn.TransformerEncoderLayer(64, 4, 256, 0.0, nn.GELU(), batch_first=True, norm_first=True).train(mode)
    before = kept_bytes(model, x)
    convert(model)
    # The two residual streams, the attention's output, lse.
    assert kept_bytes(model, x) <= 3 * u + lse
    assert before >= 15 * u
