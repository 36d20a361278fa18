"""Attentions that are almost what a fused call computes: each is told apart, or handled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from convert_cases import assert_same, fused_attentions, randomize, step, twins
from torch import Tensor, nn

from fused_remat.convert import convert

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = torch.randn(2, 33, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Written(nn.Module):
    """Softmax written out, with places to change something."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 3, 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 12, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(12, 12, bias=False)
        self.drop = nn.Dropout(p)

    def heads(self, x: Tensor) -> list[Tensor]:
        linears = (self.q_proj, self.k_proj, self.v_proj)
        return [linear(x).unflatten(-1, (3, 4)).transpose(1, 2) for linear in linears]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * 0.5

    def weights(self, scores: Tensor) -> Tensor:
        return self.drop(torch.softmax(scores, dim=-1))

    def out(self, context: Tensor) -> Tensor:
        return self.o_proj(context)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.out((self.weights(self.scores(q, k)) @ v).transpose(1, 2).flatten(-2))


class Causal(Written):
    """As nanoGPT masks: by a buffer of floating zeros and ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        length = q.shape[2]
        return super().scores(q, k).masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))


def test_a_mask_in_a_buffer_is_seen():
    model, stock = twins(randomize(Causal()).double())
    assert convert(model, strict=True).count("attention") == 1
    with fused_attentions() as calls:
        actual = step(model, LONG)
    assert calls == [""]
    assert_same(actual, step(stock, LONG), 1e-9)


class Near(Written):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        return super().scores(q, k).masked_fill((index[:, None] - index).abs() >= 200, float("-inf"))


class ByLength(Written):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * max(1.0, torch.tensor(q.shape[2] / 16.0).log().item())


class Clipped(Written):
    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.clamp(-30, 30) for part in super().heads(x)]


class Kept(Written):
    def weights(self, scores: Tensor) -> Tensor:
        self.seen = super().weights(scores)
        return self.seen


class WithBias(Written):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.o_proj.weight


class WithWeights(Written):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, _ = self.heads(x)
        return super().forward(x), self.weights(self.scores(q, k))


class Renormalised(Written):
    def weights(self, scores: Tensor) -> Tensor:
        kept = super().weights(scores)
        return kept / kept.sum(-1, keepdim=True).clamp(min=1e-6)


@pytest.mark.parametrize("cls", [Near, ByLength, Clipped, Kept, WithBias, WithWeights, Renormalised])
def test_what_a_fused_call_does_not_do_is_left_alone(cls):
    model = randomize(cls(p=0.3)).double()
    report = convert(model)
    assert report.count("attention") == 0 and report.skipped[0].reason


class DropsContext(Written):
    def weights(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)

    def out(self, context: Tensor) -> Tensor:
        return self.o_proj(self.drop(context))


class DropsOutput(DropsContext):
    def out(self, context: Tensor) -> Tensor:
        return self.drop(self.o_proj(context))


class DropsBoth(Written):
    def out(self, context: Tensor) -> Tensor:
        return self.drop(self.o_proj(context))


class DropsValues(DropsContext):
    def heads(self, x: Tensor) -> list[Tensor]:
        q, k, v = super().heads(x)
        return [q, k, self.drop(v)]

    def out(self, context: Tensor) -> Tensor:
        return self.o_proj(context)


@pytest.mark.parametrize("cls", [DropsContext, DropsOutput, DropsBoth, DropsValues])
def test_dropout_anywhere_else_is_not_that_of_attention_weights(cls):
    assert convert(randomize(Written(p=0.3)).double()).count("attention") == 1
    model = randomize(cls(p=0.3)).double()
    assert convert(model).count("attention") == 0
    # Without a probability there is nothing to drop, until there is.
    model, stock = twins(randomize(cls(p=0.0)).double())
    convert(model)
    for changed in (model, stock):
        changed.drop.p = 0.5
    torch.manual_seed(0)
    actual = step(model, LONG)
    torch.manual_seed(0)
    assert_same(actual, step(stock, LONG), 1e-9)


def test_layers_that_differ_in_a_buffer_have_verdicts_of_their_own():
    class Odd(Causal):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) * self.factor

    layers = nn.Sequential(Odd(), Odd())
    layers[0].register_buffer("factor", torch.tensor(1.0))
    layers[1].register_buffer("factor", torch.tensor(3.0))
    model, stock = twins(randomize(layers).double())
    convert(model)
    assert_same(step(model, LONG), step(stock, LONG), 1e-9)


def test_a_method_of_another_signature_is_no_crash():
    class Biased(Written):
        def _get_rel_pos_bias(self, length: int) -> Tensor:
            return torch.zeros(1, 3, length, length)

        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) + self._get_rel_pos_bias(q.shape[2])

    report = convert(Biased())
    assert report.count("attention") == 0 and "bias" in report.skipped[0].reason


def test_functional_dropout_with_a_number():
    class Numbered(Written):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.25

        def weights(self, scores: Tensor) -> Tensor:
            return F.dropout(torch.softmax(scores, dim=-1), self.attention_dropout, self.training)

    model, stock = twins(randomize(Numbered()).double())
    assert convert(model).count("attention") == 1
    with fused_attentions() as calls:
        assert not torch.equal(model(LONG), model(LONG))
        torch.testing.assert_close(model.eval()(LONG), stock.eval()(LONG), rtol=1e-9, atol=1e-9)
    assert len(calls) == 3
