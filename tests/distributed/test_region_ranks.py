"""Regions in DistributedDataParallel and fully sharded models: the gradients and statistics of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fused_remat


class Stage(nn.Sequential):
    """May run as a region within itself."""

    inside = False

    def forward(self, x: Tensor) -> Tensor:
        return fused_remat.region(super().forward, x) if self.inside else super().forward(x)


class Net(nn.Module):
    """Two convolution stages with running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            Stage(nn.Conv2d(c, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2))
            for c in (3, 4)
        )
        self.head = nn.Conv2d(4, 1, 1)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = fused_remat.region(stage, x, verify="once") if self.recompute else stage(x)
        return self.head(x)


def trained(wrap: str) -> list[dict[str, Tensor]]:
    """Gradients and buffers of both after two steps of two micro-batches each."""
    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)
    ours.recompute = True
    found = []
    for model in (plain, ours):
        torch.manual_seed(5 + dist.get_rank())
        wrapped = model
        if wrap == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (2,))
            for stage in model.stages if "stages" in wrap else ():
                fully_shard(stage, mesh=mesh)
                if "around" in wrap and model is ours:
                    model.recompute, stage.inside = False, True
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for x in torch.randn(2, 2, 3, 6, 6):
                wrapped(x).square().mean().backward()
            optimizer.step()
        tensors = {f"d {name}": p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
        found.append({name: getattr(t, "full_tensor", lambda t=t: t)().clone() for name, t in tensors.items()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "root sharded", "stages sharded", "stages sharded around regions"])
def test_region_on_two_ranks(ranks, wrap: str) -> None:
    for plain, ours in ranks(trained, wrap):
        assert plain.keys() == ours.keys() and len(plain) == 16
        for name in plain:
            assert torch.equal(plain[name], ours[name]), name
