"""Pipeline stages with several micro-batches in flight: gradients equal one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from convert_cases import assert_same, fused_attentions, fused_calls, randomize
from torch import Tensor, nn
from torch.distributed import pipelining

from fused_remat import MLP, MultiheadAttention, convert

WIDTH, HIDDEN, HEADS, BATCH, LENGTH, MICRO_BATCHES = 8, 12, 2, 8, 5, 4


class StockBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


class OurBlock(StockBlock):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiheadAttention(WIDTH, HEADS, batch_first=True, keep=())
        self.mlp = MLP(WIDTH, HIDDEN, keep=0.5)


def make(block: type[nn.Module]) -> nn.Sequential:
    model = randomize(nn.Sequential(block(), block()))
    if block is StockBlock:
        convert(model)
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2))


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def stage_on_rank(block: type[nn.Module], schedule: str) -> tuple[dict[str, Tensor], int, int]:
    """Gradients of this rank's block after one step, under its name in the whole model, and fused calls."""
    rank = dist.get_rank()
    stage = pipelining.PipelineStage(make(block)[rank], rank, 2, torch.device("cpu"))
    run = getattr(pipelining, schedule)(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    x, target = batch()
    with fused_calls() as mlps, fused_attentions() as attentions:
        run.step(x) if rank == 0 else run.step(target=target)
    return {f"{rank}.{name}": g for name, g in gradients(stage.submod).items()}, len(mlps), len(attentions)


@pytest.mark.parametrize("block", [StockBlock, OurBlock])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_gradients_equal_one_process(ranks, block, schedule):
    alone = make(block)
    x, target = batch()
    loss_of(alone(x), target).backward()
    actual: dict[str, Tensor] = {}
    for found, mlps, attentions in ranks(stage_on_rank, block, schedule):
        actual |= found
        # The first step runs each stage once more, on tensors without data, to learn its shapes.
        assert (mlps, attentions) == (MICRO_BATCHES + 1, MICRO_BATCHES + 1)
    assert_same(actual, gradients(alone), 1e-6)
