"""DistributedDataParallel: gradients of two ranks are those of one process on the joined batch, hooks fire once."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from convert_cases import assert_same, fused_attentions, fused_calls, randomize
from torch import Tensor, nn

from fused_remat import MLP, GatedMLP, MultiheadAttention, convert, explain, mlp

WIDTH, HIDDEN, HEADS, BATCH, LENGTH = 8, 12, 2, 4, 8


class StockBlock(nn.Module):
    """Attention and MLP, the MLP used twice, and a linear that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.mlp(x))


class OurBlock(StockBlock):
    """As `StockBlock`, of our modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = MLP(WIDTH, HIDDEN)
        self.gated = GatedMLP(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gated(x)


class Stack(nn.Sequential):
    def __init__(self, block: type[nn.Module], unused: bool) -> None:
        super().__init__(block(), block())
        if unused:
            self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x))


def make(block: type[nn.Module], unused: bool) -> nn.Module:
    model = randomize(Stack(block, unused))
    if block is StockBlock:
        convert(model)
    return model


def batch(rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """x and a weight for every output."""
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(rows, LENGTH, WIDTH, generator=generator) for _ in range(2))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def on_ranks(block: type[nn.Module], find_unused: bool, static_graph: bool, split: int, steps: int) -> tuple:
    """Gradients after `steps` steps, calls of the post-accumulate hooks per parameter and fused calls per step.

    Rank 0 has the samples before `split`, rank 1 the others.
    """
    model = make(block, unused=find_unused)
    fired = dict.fromkeys(dict(model.named_parameters()), 0)

    def count(name: str) -> None:
        fired[name] += 1

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: count(name))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed find_unused_parameters=true")
        wrapped = nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=find_unused, static_graph=static_graph
        )
    samples = slice(split) if dist.get_rank() == 0 else slice(split, None)
    x, weight = (t[samples] for t in batch())
    for _ in range(steps):
        model.zero_grad()
        with fused_calls() as mlps, fused_attentions() as attentions:
            (wrapped(x) * weight).sum().backward()
    return gradients(model), fired, len(mlps), len(attentions)


@pytest.mark.parametrize("block", [StockBlock, OurBlock])
@pytest.mark.parametrize(("find_unused", "static_graph"), list(itertools.product((False, True), repeat=2)))
def test_gradients_equal_one_process_and_hooks_fire_once(ranks, block, find_unused, static_graph):
    steps = 3
    alone = make(block, unused=find_unused)
    x, weight = batch()
    (alone(x) * weight).sum().backward()
    expected = {name: gradient / 2 for name, gradient in gradients(alone).items()}
    for actual, fired, mlps, attentions in ranks(on_ranks, block, find_unused, static_graph, BATCH // 2, steps):
        assert_same(actual, expected, 1e-6)
        assert fired == {name: steps if name in expected else 0 for name in fired}
        assert attentions == 2
        assert mlps == (4 if block is StockBlock else 6)


@pytest.mark.parametrize("split", [1, 3])
def test_ranks_with_different_batches(ranks, split):
    # 8 and 24 token rows: one rank chunks features in backward and the other tokens, and no collective cares.
    alone = make(StockBlock, unused=False)
    x, weight = batch()
    (alone(x) * weight).sum().backward()
    expected = {name: gradient / 2 for name, gradient in gradients(alone).items()}
    for actual, *_ in ranks(on_ranks, StockBlock, False, False, split, 1):
        assert_same(actual, expected, 1e-6)


def axis(rows: int, gated: bool, workspace: int) -> str:
    x, w = torch.empty(rows, WIDTH), torch.empty(HIDDEN, WIDTH)
    gate = {"w_gate": w} if gated else {}
    return explain(mlp, x, w, w.t(), **gate, workspace=workspace).backward.axis


def planned_axes(workspaces: list[int]) -> list[str]:
    """The axis of backward for many shapes, with as much scratch as this rank has."""
    ballast = torch.zeros(2**24 * dist.get_rank())  # 64 MiB less memory on the second rank
    found = [axis(rows, gated, workspaces[dist.get_rank()]) for rows in range(1, 50) for gated in (False, True)]
    return found if ballast.numel() >= 0 else []


def test_ranks_choose_one_axis_whatever_memory_they_have(ranks):
    first, second = ranks(planned_axes, [2**30, 2**12])
    assert first == second
    expected = [rows < (3 if gated else 2) * HIDDEN for rows in range(1, 50) for gated in (False, True)]
    assert [axis == "features" for axis in first] == expected
