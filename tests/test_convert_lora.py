"""PEFT's LoRA on the linears of MLPs: inside the fused call where that computes the same, wrapped early or late."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from convert_cases import Gated, Plain, assert_same, fused_calls, kept_shapes, step
from torch import nn

import fused_remat
from fused_remat.convert import convert

peft = pytest.importorskip("peft")
# PEFT asks transformers' models in words of their own.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
KINDS = {"plain": (Plain, ["fc1", "fc2"]), "gated": (Gated, ["gate_proj", "up_proj", "down_proj"])}
KIND = pytest.mark.parametrize("kind", KINDS)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Two MLPs in a residual chain."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = cls(), cls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def _config(targets, **settings) -> peft.LoraConfig:
    settings = {"r": 3, "lora_alpha": 5, "init_lora_weights": False} | settings
    return peft.LoraConfig(target_modules=targets, **settings)


def _adapted(kind: str, **settings) -> nn.Module:
    torch.manual_seed(7)
    cls, targets = KINDS[kind]
    return peft.get_peft_model(Net(cls), _config(settings.pop("targets", targets), **settings))


def _same(ours: nn.Module, stock: nn.Module, calls: int) -> None:
    """Outputs, gradients and the set of gradients of one step, of which so many MLP calls are fused."""
    with fused_calls() as seen:
        results = step(ours, X)
    assert len(seen) == calls
    assert_same(results, step(stock, X), 1e-5)


def _lora(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


# Fused ----------------------------------------------------------------------------------------------------------------


@KIND
@pytest.mark.parametrize("rslora", (False, True))
def test_wrapped_before_conversion(kind, rslora):
    stock = _adapted(kind, use_rslora=rslora)
    ours = copy.deepcopy(stock)
    report = convert(ours)
    assert len(report.converted) == 2 and not report.skipped
    _same(ours, stock, calls=2)
    assert not any(p.grad is not None for n, p in ours.named_parameters() if "lora" not in n), "the base is frozen"
    assert ours.state_dict().keys() == stock.state_dict().keys()


@KIND
def test_wrapped_after_conversion(kind):
    torch.manual_seed(7)
    cls, targets = KINDS[kind]
    stock = Net(cls)
    ours = copy.deepcopy(stock)
    convert(ours)
    for model in (ours, stock):
        torch.manual_seed(8)
        peft.get_peft_model(model, _config(targets))
    _same(ours, stock, calls=2)


@KIND
def test_any_subset_of_linears(kind):
    for targets in ([name] for name in KINDS[kind][1]):
        stock = _adapted(kind, targets=targets)
        ours = copy.deepcopy(stock)
        convert(ours)
        _same(ours, stock, calls=2)


@KIND
def test_trained_base_weights(kind):
    stock = _adapted(kind).requires_grad_()
    ours = copy.deepcopy(stock)
    convert(ours)
    _same(ours, stock, calls=2)


def test_x_alone_is_kept():
    model = _adapted("gated").model.first
    x = torch.randn(64, 6, requires_grad=True)
    full = kept_shapes(model, x)
    convert(model)
    assert kept_shapes(model, x) == [((64, 6), 64 * 6 * 4)] and len(full) > 3


@pytest.mark.parametrize("when", ("before", "after"))
def test_llama(when):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.LlamaModel(config)
    ours = copy.deepcopy(stock)
    if when == "after":
        convert(ours)
    wrapped = []
    for model in (ours, stock):
        torch.manual_seed(1)
        wrapped.append(peft.get_peft_model(model, _config(["gate_proj", "up_proj", "down_proj", "q_proj"])))
    if when == "before":
        convert(wrapped[0])
    tokens = torch.randint(0, 32, (2, 7))
    with fused_calls() as calls:
        results = step(wrapped[0], tokens)
    assert calls == ["silu"] * 2
    assert_same(results, step(wrapped[1], tokens), 1e-5)


def test_conv1d():
    """transformers' GPT-2 stores its weights transposed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=2,
        bos_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = peft.get_peft_model(transformers.GPT2Model(config), _config(["c_fc", "mlp.c_proj"], fan_in_fan_out=True))
    ours = copy.deepcopy(stock)
    assert len([entry for entry in convert(ours).converted if "mlp" in str(entry)]) == 1
    tokens = torch.randint(0, 32, (2, 7))
    with fused_calls() as calls:
        results = step(ours, tokens)
    assert calls == ["gelu_tanh"]
    assert_same(results, step(stock, tokens), 1e-5)


def test_gate_and_up_in_one_linear():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down, self.act = nn.Linear(6, 20), nn.Linear(10, 6), nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.both(x).chunk(2, dim=-1)
            return self.down(self.act(gate) * up)

    torch.manual_seed(7)
    stock = peft.get_peft_model(Net(Packed), _config(["both", "down"]))
    ours = copy.deepcopy(stock)
    convert(ours)
    _same(ours, stock, calls=2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiles_in_one_graph():
    torch._dynamo.reset()
    stock = _adapted("gated").model
    ours = copy.deepcopy(stock)
    convert(ours)
    called = []

    def backend(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend=backend)(X), stock(X), rtol=1e-5, atol=1e-5)
    assert sum("fused_remat" in target and "mlp" in target for target in called) == 2
    torch._dynamo.reset()
    results = step(torch.compile(ours, fullgraph=True, backend="aot_eager"), X)
    assert_same({name.replace("_orig_mod.", ""): value for name, value in results.items()}, step(stock, X), 1e-5)


def test_factors_in_fp32_beside_bf16_weights():
    torch.manual_seed(7)
    base = Net(Gated).bfloat16()
    stock = peft.get_peft_model(base, _config(KINDS["gated"][1]))
    assert {p.dtype for n, p in stock.named_parameters() if "lora" in n} == {torch.float32}
    exact = copy.deepcopy(stock).double()
    ours = copy.deepcopy(stock)
    convert(ours)
    with fused_calls() as calls:
        results = step(ours, X.bfloat16())
    assert len(calls) == 2
    eager, right = step(stock, X.bfloat16()), step(exact, X.bfloat16().double())
    for name, value in results.items():
        assert value.dtype == eager[name].dtype
        ours_error, error = ((t.double() - right[name]).norm() / right[name].norm() for t in (value, eager[name]))
        assert ours_error <= 2 * error + 2e-3, name


# The layer's own code -------------------------------------------------------------------------------------------------


def _merge(model):
    model.merge_adapter()


def _disable(model):
    for module in _lora(model):
        module.enable_adapters(False)


def _second_adapter(model):
    torch.manual_seed(11)
    model.add_adapter("other", _config(KINDS["gated"][1]))
    model.base_model.set_adapter(["default", "other"])


def _hook(part):
    def change(model):
        for module in _lora(model):
            getattr(module, part)["default"].register_forward_hook(lambda module, args, y: y * 2)

    return change


def _hooked_base(model):
    for module in _lora(model):
        module.base_layer.register_forward_hook(lambda module, args, y: y * 2)


def _hooked_wrapper(model):
    for module in _lora(model):
        module.register_forward_hook(lambda module, args, y: y * 2)


def _parametrized(model):
    for module in _lora(model):
        nn.utils.parametrizations.weight_norm(module.lora_B["default"])


def _own_dropout(model):
    class Halve(nn.Module):
        def forward(self, x):
            return x * 0.5

    for module in _lora(model):
        module.lora_dropout["default"] = Halve()


CHANGES = {
    "merged": (_merge, "has merged adapters: default"),
    "disabled": (_disable, "has its adapters disabled"),
    "two active adapters": (_second_adapter, "has several active adapters: default, other"),
    "hook on A": (_hook("lora_A"), "has a lora_A that has forward hooks"),
    "hook on B": (_hook("lora_B"), "has a lora_B that has forward hooks"),
    "hook on dropout": (_hook("lora_dropout"), "has a lora_dropout that"),
    "hook on base": (_hooked_base, "has forward hooks"),
    "hook on wrapper": (_hooked_wrapper, "has forward hooks"),
    "parametrised": (_parametrized, "has a lora_B that is a"),
    "another dropout": (_own_dropout, "has a lora_dropout that is a"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_the_fused_call_would_miss(case):
    change, reason = CHANGES[case]
    stock = _adapted("gated")
    changed_later = copy.deepcopy(stock)
    assert len(convert(changed_later).converted) == 2
    for model in (stock, changed_later):
        change(model)
    changed_before = copy.deepcopy(stock)
    report = convert(changed_before)
    assert not report.converted and len(report.skipped) == 2
    assert all(reason in entry.reason for entry in report.skipped), report
    with torch.no_grad():
        expected = stock(X)
        for model in (changed_later, changed_before):
            with fused_calls() as calls:
                torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-5)
            assert calls == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    (
        ({"use_dora": True}, "of another kind than LoRA (DoraLinearVariant)"),
        ({"lora_bias": True}, "has a lora_B with a bias"),
        ({"lora_dropout": 0.5}, "drops 0.5 of what its adapter takes in"),
    ),
    ids=("DoRA", "bias", "dropout"),
)
def test_other_kinds_of_adapters(settings, reason):
    stock = _adapted("plain", **settings)
    ours = copy.deepcopy(stock)
    report = convert(ours)
    assert not report.converted and all(reason in entry.reason for entry in report.skipped), report
    later = copy.deepcopy(stock)
    for module in _lora(later):  # converted in a state that fits; the change comes after
        module.train(False)
    convert(later.eval())
    later.train()
    for model in (ours, later):
        torch.manual_seed(0)
        expected = step(stock, X)
        torch.manual_seed(0)
        with fused_calls() as calls:
            results = step(model, X)
        assert calls == []
        assert_same(results, expected, 1e-5)


def test_adapter_dropout_is_nothing_in_evaluation():
    stock = _adapted("plain", lora_dropout=0.5).eval()
    ours = copy.deepcopy(stock)
    assert len(convert(ours).converted) == 2
    _same(ours, stock, calls=2)


def test_switching_merging_and_unloading():
    stock = _adapted("gated")
    ours = copy.deepcopy(stock)
    convert(ours)
    for model in (ours, stock):
        torch.manual_seed(12)
        model.add_adapter("other", _config(KINDS["gated"][1], r=5))
        model.set_adapter("other")
    _same(ours, stock, calls=2)
    with ours.disable_adapter(), stock.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(ours(X), stock(X))
    _same(ours, stock, calls=2)
    for model in (ours, stock):
        model.merge_adapter()
        model.unmerge_adapter()
    _same(ours, stock, calls=2)
    merged, expected = ours.merge_and_unload(), stock.merge_and_unload()
    assert not _lora(merged)
    _same(merged.requires_grad_(), expected.requires_grad_(), calls=2)


def test_adapters_per_sample_are_left_to_peft():
    """`adapter_names` reaches the linears through hooks, which are seen."""
    stock = _adapted("gated")
    stock.add_adapter("other", _config(KINDS["gated"][1]))
    ours = copy.deepcopy(stock)
    convert(ours)
    names = ["default", "other", "__base__", "default"]
    with fused_calls() as calls, torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(X, adapter_names=names), stock.eval()(X, adapter_names=names), rtol=1e-5, atol=1e-5
        )
    assert calls == []


def test_a_patched_forward_is_seen(monkeypatch):
    ours = _adapted("plain")
    convert(ours)
    original = peft.tuners.lora.Linear.forward
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda self, x: original(self, x) * 2)
    with fused_calls() as calls:
        ours(X)
    assert calls == []


def test_the_attributes_that_are_read_are_peft_s():
    """What `convert.adapters` reads decides in PEFT's own forward; new conditions there would need a look."""
    code = inspect.getsource(peft.tuners.lora.Linear.forward)
    for word in ("disable_adapters", "merged", "active_adapters", "lora_A", "lora_B", "lora_dropout", "scaling",
                 "lora_variant", "base_layer"):  # fmt: skip
        assert word in code
    assert fused_remat.LowRank(X, X).scale == 1.0
