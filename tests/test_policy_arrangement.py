"""`Arrangement` and `Assignment`: examined once, switched quickly, on real, meta and fake models."""

from __future__ import annotations

import json

import pytest
import torch
from convert_cases import assert_same, fused_attentions, fused_calls
from policy_cases import (
    Looped,
    MLPBlock,
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
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat import convert, revert
from fused_remat.convert import behaviour, norm_examine
from fused_remat.convert.rebind import records_of
from fused_remat.policy import Arrangement, Assignment


def test_an_assignment_is_json_and_compares():
    assignment = Assignment({"a": ("up",), "b": 0.25, "c": None, "d": ["q", "out"]}, (("x", "y"), ("z",)), "once")
    assert assignment.layers["d"] == ("q", "out") and assignment.paths == ("x", "y", "z")
    assert Assignment.from_dict(json.loads(json.dumps(assignment.to_dict()))) == assignment


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(layers=["a"]), TypeError, "layers must be a mapping of path to keep, got list"),
        (dict(layers={"a": "up"}), TypeError, "layers has 'a': 'up'; expected a path and a tuple"),
        (dict(layers={"a": True}), TypeError, "layers has 'a': True"),
        (dict(regions=("a", "b")), TypeError, r"regions must be tuples of paths.*write \(\(path,\), ...\)"),
        (dict(regions=(("a",), ("b", "a"))), ValueError, "regions must hold every path once"),
        (dict(regions=((),)), ValueError, "at least one each"),
        (dict(verify="yes"), ValueError, "verify must be one of 'off', 'once', 'always'; got 'yes'"),
    ],
)
def test_assignments_of_another_form(arguments, error, message):
    with pytest.raises(error, match=message):
        Assignment(**arguments)
    with pytest.raises(ValueError, match="an assignment has no 'layer'"):
        Assignment.from_dict({"layer": {}})


def test_what_is_known_of_layers():
    pytest.importorskip("transformers")
    layers = Arrangement(llama(3)).layers
    assert list(layers) == [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn", "mlp")]
    attention, mlp = layers["model.layers.1.self_attn"], layers["model.layers.1.mlp"]
    assert (attention.kind, attention.residuals, attention.fractions) == ("attention", ("q", "k", "v", "out"), False)
    assert (mlp.kind, mlp.residuals, mlp.fractions) == ("gated mlp", ("up", "gate"), True)
    assert mlp.block == "model.layers.1" and mlp.like == "model.layers.0.mlp" and mlp.class_name == "LlamaMLP"
    assert attention.norms == ("model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm")


def test_chains_are_runs_of_equal_class_outer_ones_first():
    stages = nn.Sequential(*(nn.Sequential(*(MLPBlock() for _ in range(2))) for _ in range(2)), nn.Linear(3, 3))
    assert Arrangement(stages).chains == (("0", "1"), ("0.0", "0.1"), ("1.0", "1.1"))
    shared = MLPBlock()
    assert Arrangement(nn.ModuleList([MLPBlock(), MLPBlock(), shared, shared])).chains == (("0", "1"),)
    assert Arrangement(nn.ModuleDict({"a": MLPBlock(), "b": MLPBlock()})).chains == ()


def test_chains_of_stages_in_real_models():
    timm = pytest.importorskip("timm")
    swin = timm.create_model("swin_tiny_patch4_window7_224", depths=(2, 2), embed_dim=24, num_heads=(2, 2), img_size=56)
    assert Arrangement(swin).chains[0] == ("layers.0", "layers.1")
    torchvision = pytest.importorskip("torchvision")
    resnet = torchvision.models.resnet18(weights=None)
    assert Arrangement(resnet).chains == tuple((f"layer{i}.0", f"layer{i}.1") for i in range(1, 5))
    report = convert(resnet, policy="full", dry_run=True)
    assert [entry.name for entry in report.converted] == [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]


def test_switching_examines_nothing_again_and_always_computes_the_same(monkeypatch):
    model, stock = attention_chain(), attention_chain()
    before, expected = state_of(model), stepped(stock, rows())
    arrangement = Arrangement(model)
    assert state_of(model) == before

    def forbidden(*_: object) -> None:
        raise AssertionError("examined again")

    monkeypatch.setattr(behaviour, "isolated", forbidden)
    monkeypatch.setattr(norm_examine, "isolated", forbidden)
    names = list(arrangement.layers)
    for layers, regions in (
        (dict.fromkeys(names, ("out",)), ()),
        (dict.fromkeys(names, ()), ()),
        ({names[0]: ("q", "k", "v", "out")}, (("1", "2"), ("3",))),
        ({}, (("0", "1", "2", "3"),)),
        ({}, ()),
    ):
        arrangement.set(Assignment(layers, regions))
        with fused_attentions() as calls:
            assert_same(stepped(model, rows()), expected, 2e-5)
        assert len(calls) == len(layers) and set(calls) <= {"layer_norm"}
    assert state_of(model) == before
    arrangement.set(Assignment(dict.fromkeys(names, ())))
    assert arrangement.revert() == [name for i in range(4) for name in (f"{i}.norm", f"{i}.attention")]
    assert state_of(model) == before and arrangement.assignment is None and arrangement.revert() == []


def test_revert_gives_back_what_the_user_had_converted():
    model = mlp_chain()
    convert(model, keep=("up",), include="[12].mlp")
    before, kept = state_of(model), measured(model, rows()).kept_bytes
    arrangement = Arrangement(model)
    arrangement.set(Assignment({"0.mlp": (), "1.mlp": ()}, (("2", "3"),)))
    assert records_of(model[1].mlp)["forward"].keep == () and not records_of(model[2].mlp)
    arrangement.revert()
    assert state_of(model) == before and measured(model, rows()).kept_bytes == kept
    # What a policy made earlier counts as the user's, regions included.
    convert(model, policy={"3": "region", "*": ("up",)})
    before = state_of(model)
    second = Arrangement(model)
    second.set(Assignment({"3.mlp": ()}))
    assert not records_of(model[3]) and list(second.layers) == [f"{i}.mlp" for i in range(4)]
    second.revert()
    assert state_of(model) == before
    assert len(revert(model)) == 7 and not any(records_of(module) for module in model.modules())


def test_layers_that_are_not_to_be_looked_at_stay_as_they_are():
    model = mlp_chain()
    convert(model, keep=("up",), include="0")
    arrangement = Arrangement(model, exclude="0")
    assert "0.mlp" not in arrangement.layers and arrangement.others == ("0.norm", "0.mlp")
    arrangement.set(Assignment({"1.mlp": ()}))
    assert records_of(model[0].mlp)["forward"].keep == ("up",) and records_of(model[1].mlp)["forward"].keep == ()


@pytest.mark.parametrize(
    ("assignment", "error", "message"),
    [
        ({"layers": {}}, TypeError, "assignment must be a fused_remat.policy.Assignment, got dict"),
        (
            Assignment({"9.mlp": ()}),
            ValueError,
            "layers names '9.mlp', but it is no layer that can run fused; those are",
        ),
        (Assignment({"0.mlp": ("gate",)}), ValueError, r"0.mlp: keep names \['gate'\], but a plain MLP can keep 'up'"),
        (Assignment({"0.mlp": 1.5}), ValueError, "0.mlp: keep as a fraction must be in"),
        (Assignment({}, (("9",),)), ValueError, "regions has '9', but the model has no such module"),
        (Assignment({}, (("0", "2"),)), ValueError, "which are no neighbours in one nn.Sequential or nn.ModuleList"),
        (Assignment({}, (("1", "0"),)), ValueError, "which are no neighbours"),
        (Assignment({}, (("0.norm", "0.mlp"),)), ValueError, "which are no neighbours"),
    ],
)
def test_assignments_that_do_not_fit(assignment, error, message):
    model = mlp_chain()
    before = state_of(model)
    with pytest.raises(error, match=message):
        Arrangement(model).set(assignment)
    assert state_of(model) == before


def test_what_cannot_be_a_region_is_named():
    model = Looped(*mlp_chain())
    with pytest.raises(ValueError, match="regions has 'layers', which is a ModuleList and runs no forward"):
        Arrangement(model).set(Assignment({}, (("layers",),)))
    attention = attention_chain()
    with pytest.raises(TypeError, match=r"0\.attention: keep must be a tuple of residual names, got 0.5"):
        Arrangement(attention).set(Assignment({"0.attention": 0.5}))
    shared = MLPBlock()
    twice = nn.Sequential(shared, shared)
    with pytest.raises(ValueError, match="hold one module twice"):
        Arrangement(twice).set(Assignment({}, (("0",), ("1",))))


def test_a_layer_that_can_not_is_told_why():
    model = mlp_chain()
    model[1].mlp[0].register_forward_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match=r"layers names '1\.mlp', but it is no layer that can run fused: 0 has forward hooks"
    ):
        Arrangement(model).set(Assignment({"1.mlp": ()}))


def test_verify_reaches_the_regions():
    model = conv_chain()
    Arrangement(model).set(Assignment({}, (("1",), ("2", "3")), "always"))
    assert {record.verify for module in model for record in records_of(module).values()} == {"always"}
    assert_same(stepped(model, image()[:, :, :8, :8]), stepped(conv_chain(), image()[:, :, :8, :8]), 0.0)


def test_equal_layers_are_tried_once(monkeypatch):
    tried = []
    original = behaviour._observe

    def counted(*arguments):
        tried.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(behaviour, "_observe", counted)
    counts = []
    for layers in (1, 6):
        tried.clear()
        Arrangement(nn.Sequential(*(MLPBlock() for _ in range(layers))))
        counts.append(len(tried))
    assert counts[0] == counts[1] > 0


def test_models_without_values():
    pytest.importorskip("transformers")
    expected = list(Arrangement(llama()).layers.items())
    with torch.device("meta"):
        on_meta = llama()
    with FakeTensorMode():
        fake = llama()
        assert list(Arrangement(fake).layers.items()) == expected
    for model in (on_meta, fake):
        arrangement = Arrangement(model)
        assert list(arrangement.layers.items()) == expected and not arrangement.skipped
        arrangement.set(Assignment(dict.fromkeys(arrangement.layers, ()), ()))
        assert len(arrangement.report.converted) == 8


def test_a_large_model_on_meta_is_arranged():
    """32 layers of 8 billion parameters: as many trials as for two, so seconds; no weight is made."""
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = llama(32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                      vocab_size=128256)  # fmt: skip
    assert sum(p.numel() for p in model.parameters()) > 8e9
    arrangement = Arrangement(model)
    assert len(arrangement.layers) == 64 and len({info.like for info in arrangement.layers.values()}) == 2
    assert [len(chain) for chain in arrangement.chains] == [32]
    arrangement.set(Assignment({}, tuple(arrangement.chains[0][i : i + 4] for i in range(0, 32, 4))))
    assert arrangement.report.count("region") == 8


def test_a_block_whose_forward_holds_the_mlp():
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(32, 32)

        def forward(self, x):
            return torch.tanh(self.q(x))

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer, self.norm, self.act = Mixer(), nn.LayerNorm(32), nn.GELU()
            self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            x = x + self.mixer(x)
            return x + self.fc2(self.act(self.fc1(self.norm(x))))

    make = lambda: nn.Sequential(*(Written() for _ in range(3)))
    model, stock = seeded(make), seeded(make)
    before, expected = state_of(model), stepped(stock, rows())
    arrangement = Arrangement(model)
    for layers, regions, fused in (
        ({"0": (), "1": ("up",)}, (), 2),
        ({"2": ()}, (("0", "1"),), 1),
        ({"1": ()}, (("1",),), 2),
    ):
        arrangement.set(Assignment(layers, regions))
        with fused_calls() as calls:
            assert_same(stepped(model, rows()), expected, 2e-5)
        assert len(calls) == fused
    arrangement.revert()
    assert state_of(model) == before


def test_tokens_of_llama_switch():
    pytest.importorskip("transformers")
    model, x = llama(), tokens()
    arrangement, kept = Arrangement(model), []
    for region in ((), (("model.layers.0",),), (("model.layers.0", "model.layers.1"),)):
        arrangement.set(Assignment({}, region))
        kept.append(measured(model, x).kept_bytes)
    assert kept[0] > kept[1] > kept[2]
