"""FSDP2: a converted model equals its stock twin sharded the same way, and runs fused."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from convert_cases import assert_same, fused_attentions, fused_calls, randomize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fused_remat import convert

WIDTH, HIDDEN, HEADS, BATCH, LENGTH, BLOCKS = 8, 12, 2, 2, 6, 2
TOLERANCE = {None: 1e-6, torch.bfloat16: 2e-2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query = self.norm1(x)
        x = x + self.attention(query, query, query, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def trained(
    per: str, reshard: bool, dtype: torch.dtype | None, checkpointed: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
    """Loss and gradients of the converted model and of its twin after two steps, with calls fused per step."""
    stock = randomize(Stack(checkpointed))
    ours = copy.deepcopy(stock)
    convert(ours)
    mesh = init_device_mesh("cpu", (2,))
    settings = {"mesh": mesh, "reshard_after_forward": reshard}
    settings |= {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x, weight = (torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))
    results = []
    for model in (ours, stock):
        for block in model.blocks if per == "block" else ():
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            with fused_calls() as mlps, fused_attentions() as attentions:
                loss = (model(x) - weight).square().mean()
                loss.backward()
            optimizer.step()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results.append(({"loss": loss.detach()} | gradients, len(mlps), len(attentions)))
    (actual, *counts), (expected, *none) = results
    assert none == [0, 0]
    return actual, expected, *counts


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("per", "reshard", "checkpointed"), list(itertools.product(("block", "model"), (True, False), (True, False)))
)
def test_equals_the_twin_sharded_the_same_way(ranks, per, reshard, dtype, checkpointed):
    for actual, expected, mlps, attentions in ranks(trained, per, reshard, dtype, checkpointed):
        assert_same(actual, expected, TOLERANCE[dtype])
        # A checkpointed block runs its fused calls again in backward, as far as its own outputs need.
        assert (mlps, attentions) == (2 * BLOCKS, 2 * BLOCKS) if checkpointed else (BLOCKS, BLOCKS)


def with_linears_as_units() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """As `trained`, with every linear of the MLPs a unit: their weights are there only while they run."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPLinear\) returned a view")
    stock = randomize(Stack(False))
    ours = copy.deepcopy(stock)
    convert(ours)
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(7 + dist.get_rank()))
    results, counts = [], []
    for model in (ours, stock):
        for block in model.blocks:
            fully_shard(block.mlp[0], mesh=mesh)
            fully_shard(block.mlp[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        with fused_calls() as mlps:
            loss = model(x).square().sum()
            loss.backward()
        counts.append(len(mlps))
        results.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    return *results, counts[0]


def test_linears_that_are_units_of_their_own_run_as_they_are(ranks):
    for actual, expected, fused in ranks(with_linears_as_units):
        assert fused == 0
        assert_same(actual, expected, 1e-6)
