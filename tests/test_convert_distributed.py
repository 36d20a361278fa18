"""Sharded weights: DTensor, FSDP2 and tensor parallel plans, in one process with one rank (gloo)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from convert_cases import assert_same, fused_attentions, fused_calls, randomize, step
from torch import nn

from fused_remat.convert import convert, revert
from fused_remat.nn import GatedMLP, MultiheadAttention

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sequential() -> nn.Sequential:
    return randomize(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)))


def gated() -> GatedMLP:
    return randomize(GatedMLP(6, 10))


def parallelize(layer: nn.Module, mesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    *ups, down = [name for name, child in layer.named_children() if isinstance(child, nn.Linear)]
    parallelize_module(layer, mesh, {name: ColwiseParallel() for name in ups} | {down: RowwiseParallel()})


def full(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in results.items()}


@pytest.mark.parametrize("make", [sequential, gated])
def test_tensor_parallel_plan_after_conversion_stays_fused(mesh, make):
    layer, stock = make(), make()
    convert(layer)
    parallelize(layer, mesh)
    with fused_calls() as calls:
        actual = step(layer, X)
    assert len(calls) == 1
    assert_same(full(actual), step(stock, X), 1e-5)


def test_a_layer_under_a_plan_is_converted(mesh):
    layer = sequential()
    parallelize(layer, mesh)
    assert len(convert(layer).converted) == 1


def test_weights_sharded_without_a_known_plan_are_left_alone(mesh):
    layer = sequential()
    parallelize(layer, mesh)
    layer[0].register_forward_hook(lambda *args: None)
    report = convert(layer)
    assert report.converted == [] and report.skipped[0].reason == "a linear has forward hooks"


@pytest.mark.parametrize("make", [sequential, gated])
@pytest.mark.parametrize("whole", [True, False])
def test_fully_shard_fuses_when_the_layer_is_the_unit(mesh, make, whole):
    from torch.distributed.fsdp import fully_shard

    layer = make()
    stock = copy.deepcopy(layer)
    convert(layer)
    for unit in [layer] if whole else [child for child in layer.children() if isinstance(child, nn.Linear)]:
        fully_shard(unit, mesh=mesh)
    with fused_calls() as calls:
        actual = step(layer, X)
    assert len(calls) == (1 if whole else 0)
    assert_same(full(actual), step(stock, X), 1e-5)


def test_revert_of_a_sharded_layer_runs_its_own_code(mesh):
    from torch.distributed.fsdp import fully_shard

    layer, stock = sequential(), sequential()
    convert(layer)
    fully_shard(layer, mesh=mesh)
    assert revert(layer) == [""]
    with fused_calls() as calls:
        actual = step(layer, X)
    assert calls == []
    assert_same(full(actual), step(stock, X), 1e-5)


@pytest.mark.parametrize(
    ("units", "folded"),
    [([""], ["layer_norm"]), (["self_attn"], [""]), (["norm1"], [""]), (["norm1", "self_attn", ""], [""])],
    ids=str,
)
def test_fully_shard_of_a_block_with_attention(mesh, units, folded):
    from torch.distributed.fsdp import fully_shard

    block = randomize(nn.TransformerEncoderLayer(6, 2, 10, 0.0, batch_first=True, norm_first=True))
    stock = copy.deepcopy(block)
    convert(block)
    for unit in units:
        fully_shard(block.get_submodule(unit), mesh=mesh)
    x = X.view(1, 5, 6)
    with fused_attentions() as calls:
        actual = step(block, x)
    assert calls == folded
    assert_same(full(actual), step(stock, x), 1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_fully_shard_of_the_attention_module(mesh, whole):
    from torch.distributed.fsdp import fully_shard

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    net = randomize(Net())
    stock = copy.deepcopy(net)
    fully_shard(net if whole else net.attention, mesh=mesh)
    x = X.view(1, 5, 6)
    assert_same(full(step(net, x)), step(stock, x), 1e-5)
