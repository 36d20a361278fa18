"""Profiles of whole models: folded layers, fake tensors, sweeps of vision and language models."""

import builtins

import pytest
import torch
from profile_cases import Attention, Chain, Tower
from torch import nn

from fused_remat.profile import Axis, profile
from fused_remat.profile.modules import folded
from fused_remat.recording import record_step
from fused_remat.training_step import make_step

transformers = pytest.importorskip("transformers")


def tiny_llama(layers=4):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tiny_vit(layers=3):
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False)


def tokens(batch=2, length=12):
    return torch.randint(64, (batch, length))


def test_llama_folds_its_layers_and_names_its_lines():
    ids = tokens()
    found = profile(tiny_llama(), ids, kwargs={"labels": ids}, optimizer=torch.optim.AdamW)
    rows = folded(found.modules)
    (layers,) = [row for row in rows if row.count > 1]
    assert (layers.name, layers.count) == ("layers.0-3 (x4)", 4)
    each = {m.path: m.kept_bytes for m in found.modules}
    layers_keep = [each[f"model.layers.{i}"] for i in range(4)]
    assert (
        layers_keep[0] > layers_keep[1] == layers_keep[3]
    )  # the rotary tables of all layers, saved first by the first
    assert layers.kept_bytes == sum(layers_keep)
    assert found.unseen_bytes == 0
    assert found.about["inputs"][1]["name"] == "labels"
    mlp = {t.source.partition(":")[0] for t in found.kept if t.module.endswith(".mlp")}
    assert mlp == {"modeling_llama.py"}
    text = str(found)
    assert "layers.0-3 (x4)" in text and "(the model) LlamaForCausalLM" in text
    assert max(map(len, text.splitlines())) <= 100
    assert found.recompute.converted_peak_bytes < found.recording.peak_bytes


def test_vit_folds_its_layers_and_grows_with_the_pixels():
    found = profile(
        tiny_vit(), torch.randn(2, 3, 32, 32), kwargs={"interpolate_pos_encoding": True}, sweep="resolution", fake=True
    )
    assert next(row.count for row in folded(found.modules) if row.count > 1) == 3
    growth = found.growth["resolution"]
    assert [p.size for p in growth.points] == [16, 32, 48, 64]
    law = growth.laws["inputs"]
    assert (law.kind, law.power) == ("linear", 2)
    assert "pixels" in growth.sentences()[0]
    assert {p.source for p in growth.points} == {"predicted"}
    assert any("A smaller image (now 32 x 32)" in line for line in found.advice)


@pytest.mark.parametrize("make", [Tower, Attention, Chain])
def test_fake_tensors_show_the_same_storages_and_lines(make):
    model, x = make(), torch.randn(4, 8, 16)
    real, fake = (profile(model, x, optimizer=torch.optim.SGD, fake=fake) for fake in (False, True))
    assert fake.kept == real.kept
    assert fake.kept and fake.recording.source == "predicted"
    assert fake.recording.kept_bytes == real.recording.kept_bytes
    assert fake.recompute.bound_bytes == real.recompute.bound_bytes
    assert "(predicted" in fake.verdict and "(measured" in real.verdict


def test_a_model_without_memory():
    with torch.device("meta"):
        model, x = Tower(depth=4, width=1024), torch.empty(64, 2048, 1024)
    found = profile(model, x, fake=True, optimizer=torch.optim.AdamW, sweep="batch")
    assert found.recording.kept_bytes > 2**32
    assert found.growth["batch"].laws["kept"].kind == "linear"
    largest = found.largest_size("batch", "80GiB")
    peaks = [
        record_step(
            make_step(model, (torch.empty(n, 2048, 1024, device="meta"),), optimizer=torch.optim.AdamW), fake=True
        ).peak_bytes
        for n in (largest, largest + 1)
    ]
    assert peaks[0] <= 80 * 2**30 < peaks[1]
    with pytest.raises(ValueError, match="pass fake=True"):
        profile(model, x)


def test_a_size_that_may_not_fit_is_predicted(monkeypatch):
    from fused_remat.profile import run

    monkeypatch.setattr(run, "_would_fit", lambda recording, factor: factor <= 4)
    found = profile(Tower(), torch.randn(4, 6, 16), sweep={"batch": [2, 4, 8, 12]})
    assert [p.source for p in found.growth["batch"].points] == ["measured", "measured", "measured", "predicted"]
    assert any("predicted the sizes that might not fit" in note for note in found.notes)
    assert found.growth["batch"].laws["kept"].kind == "linear"  # the predictions continue the measurements


def test_own_inputs_by_a_function():
    axis = Axis(inputs=lambda n: {"x": torch.randn(1, n, 16)}, sizes=(8, 16, 24, 32))
    found = profile(Attention(), torch.randn(2, 6, 16), sweep={"context": axis}, fake=True)
    growth = found.growth["context"]
    assert growth.base == 8
    assert growth.laws["kept"].kind == "quadratic"
    assert growth.sentences()[0].startswith("What is kept grows with the square of context")


def test_the_table_is_plain_and_narrow_without_rich(monkeypatch):
    real_import = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.partition(".")[0] == "rich":
            raise ImportError("no rich")
        return real_import(name, *args, **kwargs)

    found = profile(Tower(), torch.randn(2, 6, 16), optimizer=torch.optim.SGD, sweep=["batch"])
    monkeypatch.setattr(builtins, "__import__", without_rich)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 100
    assert str(found).isascii()
    assert any(line.startswith("  blocks.0-3 (x4)") for line in lines)
    (verdict,) = [i for i, line in enumerate(lines) if line.startswith("Verdict: ")]
    assert found.verdict.split()[0] in lines[verdict]
    assert any(line.startswith("Kept and peak are two numbers") for line in lines)
    assert "Kept leaves out" in " ".join(lines) or "leaves out parameters" in " ".join(lines)


def test_long_names_are_cut_to_the_width():
    model = x = None
    for depth in range(12):
        model = nn.Sequential()
        model.add_module(f"a_rather_long_name_of_a_container_{depth}", nn.Linear(8, 8) if x is None else x)
        model.add_module("gelu", nn.GELU())
        x = model
    text = str(profile(model, torch.randn(4, 8)))
    assert max(map(len, text.splitlines())) <= 100
    assert ".." in text
