"""fused_remat.convert on attention layers of any library but torch's own: what is found, refused and left alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from convert_cases import (
    LowRank,
    ScaledLinear,
    assert_same,
    fused_attentions,
    kept_shapes,
    randomize,
    step,
    twins,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fused_remat import ops
from fused_remat.convert import convert, revert

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Attention(nn.Module):
    """A hand-written one, with names that no table knows."""

    def __init__(self, width: int = 12, nheads: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.nheads, self.p, self.factor = nheads, p, 1.0
        self.first, self.second, self.third, self.last = (nn.Linear(width, width) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.nheads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        # In an order of its own: the value comes first.
        v, q, k = (self.split(linear(x)) for linear in (self.first, self.second, self.third))
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.p if self.training else 0.0)
        return self.last(y.transpose(1, 2).flatten(-2)) * self.factor


class Packed(nn.Module):
    """One linear for q, k and v; softmax written out; a causal mask of its own making if asked."""

    def __init__(self, by_head: bool = False) -> None:
        super().__init__()
        self.num_heads, self.by_head = 3, by_head
        self.qkv, self.proj = nn.Linear(12, 36, bias=False), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x)
        if self.by_head:
            q, k, v = made.unflatten(-1, (3, 3, 4)).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = made.unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.proj((torch.softmax(q @ k.mT * 0.5, dim=-1) @ v).transpose(1, 2).flatten(-2))


def found(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The layer in float64, converted, and a stock twin."""
    model, stock = twins(randomize(layer).double())
    report = convert(model, strict=True)
    assert report.count("attention") == 1
    return model, stock


@pytest.mark.parametrize("make", [Attention, Packed, lambda: Packed(by_head=True)], ids=["four", "packed", "by head"])
def test_hand_written_attentions_are_found_by_what_they_compute(make):
    model, stock = found(make())
    for mode in (True, False):
        with fused_attentions() as calls:
            actual = step(model.train(mode), X)
        assert calls == [""]
        assert_same(actual, step(stock.train(mode), X), 1e-9)
    revert(model)
    with fused_attentions() as calls:
        step(model, X)
    assert calls == [] and type(model) is type(stock)


@pytest.mark.parametrize(
    "mask",
    [torch.rand(6, 6) < 0.6, torch.randn(6, 6).double(), torch.randn(2, 3, 6, 6).double()],
    ids=["bool", "float", "per head"],
)
def test_masks_of_a_hand_written_attention(mask):
    model, stock = found(Attention())
    mask = mask | torch.eye(6, dtype=torch.bool) if mask.dtype == torch.bool else mask
    with fused_attentions() as calls:
        torch.testing.assert_close(model(X, mask), stock(X, mask=mask), rtol=1e-9, atol=1e-9)
    assert calls == [""]


class Clamped(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask).clamp(-0.1, 0.1)


class Sunk(Packed):
    """One more score that no key stands for."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(F.pad(q @ k.mT * 0.5, (0, 1)), dim=-1)[..., :-1]
        return self.proj((weights @ v).transpose(1, 2).flatten(-2))


class ScaledValues(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) + x


@pytest.mark.parametrize("cls", [Clamped, Sunk, ScaledValues])
def test_what_computes_something_else_is_left_alone_with_a_reason(cls):
    model, stock = twins(randomize(cls()).double())
    report = convert(model)
    assert report.count("attention") == 0 and type(model) is cls
    assert "computes something else" in report.skipped[0].reason and "outputs differ" in report.skipped[0].reason
    with pytest.raises(ValueError, match=r"(?s)strict=True.*computes something else"):
        convert(model, strict=True)
    assert_same(step(model, X), step(stock, X), 1e-12)


class Excluding(Attention):
    """Its bool masks say what to leave out, as nn.MultiheadAttention's do; floating ones are added."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask, -torch.inf)
        return super().forward(x, mask)


class Padded(Attention):
    """Its masks of two dims are one row of keys per sample."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask[:, None, None] if mask is not None and mask.dim() == 2 else mask)


class Local(Attention):
    """Sees some tokens back and forth."""

    def __init__(self, window: int = 8) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        index = torch.arange(x.shape[1])
        near = (index[:, None] - index).abs() <= self.window
        return super().forward(x, near if mask is None else near & mask)


class Placed(Attention):
    """Its forward reads an argument that most only pass along."""

    def forward(self, x: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(x if position_ids is None else x * position_ids.unsqueeze(-1), mask)


def test_masks_mean_what_the_layer_was_seen_to_make_of_them():
    out = torch.rand(2, 1, 6, 6) < 0.4
    out[..., 0] = False
    per_sample = torch.randn(6, 6, dtype=torch.float64)  # as many samples as tokens
    for cls, x, mask in ((Excluding, X, out), (Padded, X.repeat(3, 1, 1), per_sample)):
        model, stock = found(cls())
        with fused_attentions() as calls:
            torch.testing.assert_close(model(x, mask), stock(x, mask), rtol=1e-9, atol=1e-9)
            assert calls == []
            mask = torch.randn(x.shape[0], 1, 6, 6, dtype=torch.float64)
            torch.testing.assert_close(model(x, mask), stock(x, mask), rtol=1e-9, atol=1e-9)
            assert calls == [""]


@pytest.mark.parametrize(
    ("window", "reason"), [(8, "computes something else"), (200, "computes something else"), (500, "its window of 500")]
)
def test_a_window_of_the_layers_own_shows_on_a_longer_input(window, reason):
    report = convert(randomize(Local(window)).double())
    assert report.count("attention") == 0 and reason in report.skipped[0].reason


def test_an_argument_that_forward_names_is_not_just_passed_along():
    model, stock = found(Placed())
    positions = torch.arange(6, dtype=torch.float64).expand(2, 6)
    with fused_attentions() as calls:
        got, want = (m(X, position_ids=positions) for m in (model, stock))
    assert calls == []
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


class Optional(Attention):
    """Children that do nothing, for now."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.extra = nn.Identity(), nn.Identity(), None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        v, q, k = (self.split(linear(x)) for linear in (self.first, self.second, self.third))
        y = F.scaled_dot_product_attention(self.before(q), k, v, mask).transpose(1, 2).flatten(-2)
        y = self.last(self.between(y))
        return y if self.extra is None else self.extra(y)


@pytest.mark.parametrize("child", ["before", "between", "extra"])
@pytest.mark.parametrize("how", ["hook", "replaced"])
def test_children_that_did_nothing_are_watched(child, how):
    model, stock = found(Optional())
    if how == "hook" and child == "extra":
        return
    for changed in (model, stock):
        if how == "hook":
            hook(changed.get_submodule(child))
        else:
            setattr(changed, child, nn.Tanh())
    with fused_attentions() as calls:
        assert_same(step(model, X), step(stock, X), 1e-9)
    assert calls == []


def test_a_setting_that_changes_later_is_followed():
    model, stock = found(Attention())
    for changed in (model, stock):
        changed.nheads = 2
    assert_same(step(model, X), step(stock, X), 1e-9)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: out * 1.5)


def weight_norm(module: nn.Module) -> None:
    parametrizations.weight_norm(module)


def own_forward(module: nn.Module) -> None:
    module.forward = lambda x: F.linear(x, module.weight) * 3


CHANGES = {"hook": hook, "weight norm": weight_norm, "own forward": own_forward}
REPLACEMENTS = {
    "adapter": lambda linear: randomize(LowRank(linear), seed=3).double(),
    "subclass": lambda linear: randomize(ScaledLinear(12, 12), seed=3).double(),
}


@pytest.mark.parametrize("child", ["first", "second", "third", "last"])
@pytest.mark.parametrize("how", [*CHANGES, "adapter", "subclass"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_no_child_is_read_behind_the_back_of_what_wraps_it(child, how, when):
    model, stock = twins(randomize(Attention()).double())
    if when == "after":
        convert(model)
    for changed in (model, stock):
        if how in CHANGES:
            CHANGES[how](changed.get_submodule(child))
        else:
            setattr(changed, child, REPLACEMENTS[how](changed.get_submodule(child)))
    if when == "before":
        report = convert(model)
        assert [entry.name for entry in report.skipped] == [""]
    with fused_attentions() as calls:
        actual = step(model, X)
    assert calls == []
    assert_same(actual, step(stock, X), 1e-9)


def test_quantised_children_run_their_own_code():
    for when in ("before", "after"):
        model = randomize(nn.Sequential(Attention())).eval()
        if when == "after":
            convert(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        stock = copy.deepcopy(model)
        revert(stock)
        if when == "before":
            assert convert(model).count("attention") == 0
        with fused_attentions() as calls:
            assert torch.equal(model(X.float()), stock(X.float()))
        assert calls == []


def test_one_attention_reachable_by_two_paths_stays_one():
    net = nn.Sequential(Attention(), nn.Identity())
    net.again = net[0]
    randomize(net).double()
    stock = copy.deepcopy(net)
    report = convert(net)
    assert report.count("attention") == 1 and net.again is net[0]
    assert convert(net).converted == [] and len(list(net.parameters())) == len(list(stock.parameters()))
    assert_same(step(net, X), step(stock, X), 1e-9)


def test_dropout_follows_the_layer_and_its_mode():
    model, stock = found(Attention(p=0.5))
    torch.manual_seed(0)
    one, two = model(X), model(X)
    assert not torch.equal(one, two)
    model.eval(), stock.eval()
    torch.testing.assert_close(model(X), stock(X), rtol=1e-9, atol=1e-9)
    assert torch.equal(model(X), model(X))
    model.train()
    mean = torch.stack([model(X) for _ in range(600)]).mean(0)
    assert (mean - stock(X)).norm() <= 0.1 * stock(X).norm()


@pytest.mark.skipif(ops.ready() is not None, reason="only compiled operators save memory")
def test_nothing_as_wide_as_q_k_and_v_is_kept():
    x = torch.randn(2, 64, 12)
    for make in (Attention, Packed, lambda: Packed(by_head=True)):
        layer = randomize(make())
        convert(layer)
        kept = kept_shapes(layer, x)
        # x, the attention's output, lse.
        assert sum(nbytes for _, nbytes in kept) <= 2 * x.numel() * 4 + 2 * 3 * 64 * 4
        assert all(36 not in shape for shape, _ in kept)


def test_gradients_of_x_alone_and_of_weights_alone():
    model, stock = found(Attention())
    for frozen in (model, stock):
        frozen.requires_grad_(False)
    assert_same(step(model, X), step(stock, X), 1e-9)
    for trained in (model, stock):
        trained.requires_grad_(True)
        trained(X).sum().backward()
    for got, want in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-9)


def test_arguments_that_nobody_understood_are_never_dropped():
    class Gated(Attention):
        def forward(self, x: Tensor, mask: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
            y = super().forward(x, mask)
            return y if gate is None else y * gate

    model, stock = found(Gated())
    gate = torch.rand(2, 6, 12, dtype=torch.float64)
    with fused_attentions() as calls:
        torch.testing.assert_close(model(X, gate=gate), stock(X, gate=gate), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(X, None, gate), stock(X, None, gate), rtol=1e-9, atol=1e-9)
    assert calls == []
    with fused_attentions() as calls:
        model(X, gate=None)
    assert calls == [""]
