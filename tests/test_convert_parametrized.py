"""Models whose weights are made anew whenever they are read, and modules that write into what they hold: looking at
them changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fused_remat
from fused_remat import convert, find_batch_size, plan, profile, revert
from fused_remat.convert.attention_probe import _as_it_is
from fused_remat.convert.behaviour import looks_like_activation
from fused_remat.convert.rebind import records_of
from fused_remat.policy import Arrangement

X = torch.randn(2, 4, 16)


class Counting(nn.Module):
    """A parametrization that counts how often the tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("read", torch.zeros(()))

    def forward(self, tensor: Tensor) -> Tensor:
        self.read.add_(1)
        return tensor


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.q(x))


class Block(nn.Module):
    """An MLP written out in the forward of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm = Mixer(), nn.LayerNorm(16)
        self.activation_fn = nn.GELU()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
        self.between = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        h = self.activation_fn(self.fc1(self.norm(x)))
        return x + self.fc2(self.between(h))


class Projected(nn.Module):
    """An attention with biases of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(16, 48, bias=False), nn.Linear(16, 16), 2
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        qkv = nn.functional.linear(x, self.qkv.weight, bias).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(1, 2))


def gated() -> nn.Module:
    return fused_remat.GatedMLP(16, 32)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "block": Block, "own biases": Projected, "attention": Attends, "convolutions": convolutions,
    "ours": gated,
}  # fmt: skip


def everywhere(model: nn.Module, but: str = "") -> nn.Module:
    """`model` with a parametrization on every parameter, `but` on those of modules of that name."""
    skipped = {module for name, module in model.named_modules() if but and name.endswith(but)}
    for module in [module for module in model.modules() if module not in skipped]:
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                parametrize.register_parametrization(module, name, Counting())
    return model


def made(kind: str) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*[KINDS[kind]() for _ in range(2)])


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = model.state_dict()
    assert list(now) == list(before)
    assert [name for name, tensor in before.items() if not torch.equal(now[name], tensor)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_looking_reads_no_parametrized_weight(kind):
    model = everywhere(made(kind))
    before = state(model)
    convert(model, dry_run=True)
    Arrangement(model)
    convert(model)
    convert(model, policy="full")
    revert(model)
    assert_state(model, before)


@pytest.mark.parametrize("look", ["profile", "plan", "fake plan", "batch"])
def test_steps_that_are_taken_back_leave_the_buffers(look):
    model = made("mlp")
    for block in model:
        parametrizations.spectral_norm(block[1])
    before = state(model)
    if look == "profile":
        profile(model, X)
    elif look == "batch":
        find_batch_size(model, lambda size: torch.randn(size, 4, 16), limit="1GiB", largest=1, policies=["full"])
    else:
        plan(model, X, budget="min", fake=look == "fake plan")
    assert_state(model, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [None, "selective"])
def test_converted_layers_read_a_weight_as_often_as_their_own_code(kind, policy):
    """Also where the parametrization arrives after the conversion."""
    stock, model = made(kind), made(kind)
    convert(model, **({} if policy is None else {"policy": policy}))
    assert kind in ("convolutions", "ours") or any(map(records_of, model.modules()))
    for one in (stock, model):
        everywhere(one, but="out_proj")
    expected, found = stock(X), model(X)
    torch.testing.assert_close(found, expected)
    assert_state(model, state(stock))


class Remembers(nn.Module):
    """An activation that writes into everything that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))
        self.seen, self.all_seen = torch.zeros(()), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for tensor in (self.slope, self.calls, self.seen, *self.all_seen):
                tensor += 1
        return x.relu() * self.slope


def test_modules_that_write_are_tried_on_copies():
    act = Remembers()
    before = copy.deepcopy(vars(act))
    model = nn.Sequential(nn.Linear(16, 64), act, nn.Linear(64, 16))
    assert looks_like_activation(act)
    convert(model)
    Arrangement(model)
    for name in ("calls", "seen", "all_seen"):
        assert getattr(act, name) == (before["_buffers"] | before)[name], name
    assert act.slope == 1 and act.slope.requires_grad


def test_buffers_of_attentions_are_copied_whatever_their_dtype():
    for dtype in (torch.float64, torch.float32, torch.int64, torch.bool):
        buffer = torch.ones(3, dtype=dtype)
        _as_it_is(buffer).zero_()
        assert buffer.all()
    assert _as_it_is(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.float64


@pytest.mark.parametrize("kind", ["own biases", "attention", "mlp"])
def test_an_audit_after_the_step_reads_no_weight(kind):
    model = made(kind)
    convert(model)
    model(X).sum().backward()
    expected = [row.expected_bytes for row in fused_remat.audit(model).rows]
    before = state(everywhere(model))
    assert [row.expected_bytes for row in fused_remat.audit(model).rows] == expected
    assert None not in expected
    assert_state(model, before)
