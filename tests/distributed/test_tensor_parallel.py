"""Plans of `parallelize_module`: layers stay fused on their shards, and equal one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from convert_cases import assert_same, fused_attentions, fused_calls, randomize
from convert_cases import step as plain_step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fused_remat import MLP, GatedMLP, convert
from fused_remat.plain import is_dtensor

WIDTH, HIDDEN, BATCH, LENGTH = 8, 12, 2, 4


class Llama(nn.Module):
    """Llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


MLPS = {
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)),
    "llama": Llama,
    "MLP": lambda: MLP(WIDTH, HIDDEN, keep=("up",)),
    "GatedMLP": lambda: GatedMLP(WIDTH, HIDDEN, bias=True, keep=0.5),
}


class Block(nn.Module):
    """`x + mlp(norm(x))`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLPS[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def make(kind: str) -> Block:
    return randomize(Block(kind))


def linears(mlp: nn.Module) -> list[str]:
    """Names, the one that makes the output last."""
    return [name for name, child in mlp.named_children() if isinstance(child, nn.Linear)]


def plan_of(mlp: nn.Module, column: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    *ins, out = linears(mlp)
    return {f"mlp.{name}": ColwiseParallel(**column) for name in ins} | {f"mlp.{out}": RowwiseParallel(**row)}


PREPARED = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
# Name: layouts of the columns, of the rows, styles of other modules, and how the block takes its tokens: "whole" on
# every rank, a "DTensor" in shards, or its "shard" as a plain tensor.
PLANS = {
    "local": ({}, {}, {}, "whole"),
    "DTensors inside": ({"use_local_output": False}, {}, {}, "whole"),
    "sequence": (
        {"input_layouts": Shard(1)}, {"output_layouts": Shard(1), "use_local_output": False},
        {"norm": SequenceParallel()}, "DTensor",
    ),
    "sequence, prepared": (
        {}, {"output_layouts": Shard(1), "use_local_output": False},
        {"norm": SequenceParallel(), "mlp": PrepareModuleInput(**PREPARED)}, "DTensor",
    ),
    "sequence, prepared locally": (
        {}, {"output_layouts": Shard(1)},
        {"norm": SequenceParallel(), "mlp": PrepareModuleInput(**PREPARED, use_local_output=True)}, "shard",
    ),
    "sequence, all local": (
        {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)},
        {"norm": SequenceParallel(use_local_output=True)}, "shard",
    ),
}  # fmt: skip


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, WEIGHT = (numbers(BATCH, LENGTH, WIDTH, seed=seed) for seed in (3, 4))


@dataclass
class Outcome:
    """Output and gradients, whole; where parameters' gradients lie; fused calls and collectives."""

    values: dict[str, Tensor]
    placements: dict[str, str]
    fused: int
    collectives: dict[str, int]


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if is_dtensor(t) else t


def step(model: nn.Module, mesh: Any = None, tokens: str = "whole") -> Outcome:
    """Output and gradients of one step on `X` with `WEIGHT` as the gradient of the whole output."""
    model.zero_grad()
    x, weight = X, WEIGHT
    if tokens != "whole":
        x, weight = (distribute_tensor(t, mesh, [Shard(1)]) for t in (x, weight))
    if tokens == "shard":
        x, weight = x.to_local(), weight.to_local()
    x = x.detach().requires_grad_()
    with fused_calls() as mlps, fused_attentions() as attentions, CommDebugMode() as comm:
        y = model(x)
        y.backward(weight)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    values = {"y": y.detach(), "dx": x.grad}
    if tokens == "shard":
        values = {name: DTensor.from_local(t, mesh, [Shard(1)]) for name, t in values.items()}
    values |= gradients
    return Outcome(
        {name: whole(value) for name, value in values.items()},
        {name: " ".join(map(str, g.placements)) for name, g in gradients.items() if is_dtensor(g)},
        len(mlps) + len(attentions),
        {str(op).rpartition(".")[2]: count for op, count in comm.get_comm_counts().items()},
    )


def under_plan(kind: str, plan: str, first: str) -> tuple[Outcome, Outcome]:
    """Of the converted block and of its stock twin under the same plan; `first`: "convert" or "parallelize"."""
    column, row, others, tokens = PLANS[plan]
    mesh = init_device_mesh("cpu", (2,))
    outcomes = []
    for converted in (True, False):
        block = make(kind)
        if not converted and kind in ("MLP", "GatedMLP"):
            block.mlp = own_code(block.mlp)
        if converted and first == "convert":
            convert(block)
        parallelize_module(block, mesh, plan_of(block.mlp, column, row) | others)
        if converted and first == "parallelize":
            convert(block)
        outcomes.append(step(block, mesh, tokens))
    return tuple(outcomes)


def own_code(mlp: nn.Module) -> nn.Module:
    """`mlp` as it runs with anything odd about it: a hook that does nothing."""
    mlp.get_submodule(linears(mlp)[0]).register_forward_hook(lambda *args: None)
    return mlp


@pytest.mark.parametrize("kind", MLPS)
@pytest.mark.parametrize("plan", PLANS)
def test_planned_mlps_run_fused_and_equal_one_process(ranks, kind, plan):
    expected = step(make(kind))
    for ours, stock in ranks(under_plan, kind, plan, "convert"):
        assert_same(ours.values, expected.values, 1e-5)
        assert_same(stock.values, expected.values, 1e-5)
        assert ours.placements == stock.placements and len(ours.placements) >= 3
        assert (ours.fused, stock.fused) == (1, 0)
        # A gated MLP reads its input twice: stock code moves it, or its gradient, for each.
        assert sum(ours.collectives.values()) <= sum(stock.collectives.values())
        if plan == "local":
            assert ours.collectives == {"all_reduce": 2}


@pytest.mark.parametrize("kind", ["sequential", "llama"])
def test_planned_mlps_are_converted_afterwards_too(ranks, kind):
    expected = step(make(kind))
    for ours, stock in ranks(under_plan, kind, "local", "parallelize"):
        assert_same(ours.values, expected.values, 1e-5)
        assert ours.placements == stock.placements
        assert (ours.fused, stock.fused) == (1, 0)


def compiled(kind: str, plan: str) -> tuple[dict[str, Tensor], int]:
    """Output and gradients of a planned block compiled in one graph, and calls fused while tracing."""
    column, row, others, _ = PLANS[plan]
    mesh = init_device_mesh("cpu", (2,))
    block = make(kind)
    convert(block)
    parallelize_module(block, mesh, plan_of(block.mlp, column, row) | others)
    x = X.clone().requires_grad_()
    torch.compiler.reset()
    with fused_calls() as calls:
        y = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
        y.backward(WEIGHT)
    gradients = {name: whole(p.grad) for name, p in block.named_parameters()}
    return {"y": y.detach(), "dx": x.grad} | gradients, len(calls)


@pytest.mark.parametrize("kind", ["llama", "MLP"])
def test_a_planned_block_compiles_to_one_graph(ranks, kind):
    expected = step(make(kind))
    for actual, fused in ranks(compiled, kind, "local"):
        assert fused == 1
        assert_same(actual, expected.values, 1e-5)


def fully_sharded(kind: str) -> Outcome:
    """Of a planned block that FSDP2 shards along another dim of the mesh."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    block = make(kind)
    convert(block)
    parallelize_module(block, mesh["tensor"], plan_of(block.mlp, {}, {}))
    fully_shard(block, mesh=mesh["data"])
    return step(block)


@pytest.mark.parametrize("kind", ["llama", "MLP"])
def test_a_plan_on_one_dim_of_a_mesh_and_fully_shard_on_the_other(ranks, kind):
    expected = step(make(kind))
    for ours in ranks(fully_sharded, kind):
        assert ours.fused == 1
        assert_same(ours.values, expected.values, 1e-5)


class Packed(nn.Module):
    """Gate and up in one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


def odd(what: str) -> tuple[Outcome, Outcome]:
    """Of a planned block with something that no fused call does, and of its stock twin."""
    mesh = init_device_mesh("cpu", (2,))
    outcomes = []
    for converted in (True, False):
        block = make("sequential")
        if what == "a packed linear":
            block.mlp = randomize(Packed())
        if converted:
            assert any("mlp" in entry.name for entry in convert(block).converted)
        up, down = (block.mlp.get_submodule(name) for name in linears(block.mlp))
        column, row = {}, {}
        if what == "a hook before the plan":
            up.register_forward_hook(lambda module, args, y: y * 2)
        if what == "two meshes":
            turned = DeviceMesh("cpu", [1, 0])
            parallelize_module(block, mesh, {"mlp.0": ColwiseParallel()})
            parallelize_module(block, turned, {"mlp.2": RowwiseParallel()})
        if what == "a style of their own":
            parallelize_module(block, mesh, {"mlp.0": Doubling(), "mlp.2": RowwiseParallel()})
        elif what == "half a plan":
            parallelize_module(block, mesh, {"mlp.0": ColwiseParallel(output_layouts=Replicate())})
        elif what == "gathered in between":
            column, row = {"output_layouts": Replicate()}, {"input_layouts": Replicate()}
        if not hasattr(up, "_distribute_module_applied"):
            parallelize_module(block, mesh, plan_of(block.mlp, column, row))
        if what == "a hook after the plan":
            down.register_forward_pre_hook(lambda module, args: args[0] * 2)
        if what == "a hook on gradients":
            up.register_full_backward_hook(lambda module, dx, dy: tuple(g * 2 for g in dx))
        if what == "another weight":
            up.weight = nn.Parameter(up.weight.redistribute(placements=[Replicate()]))
        if what == "an adapter":
            block.mlp[0] = Scaled(up)
        outcomes.append(step(block))
    return tuple(outcomes)


class Scaled(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * 2


class Doubling(ColwiseParallel):
    """A style that does more than its parent."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs * 2, device_mesh)


@pytest.mark.parametrize(
    "what",
    [
        "a hook before the plan", "a hook after the plan", "a hook on gradients", "a style of their own",
        "gathered in between", "half a plan", "two meshes", "a packed linear", "another weight", "an adapter",
    ],
)  # fmt: skip
def test_what_is_no_plain_plan_runs_its_own_code(ranks, what):
    for ours, stock in ranks(odd, what):
        assert ours.fused == 0
        assert_same(ours.values, stock.values, 0.0)
        assert ours.placements == stock.placements


def with_dropout(kind: str, training: bool) -> tuple[int, bool]:
    """Fused calls of a planned MLP that drops hidden features, and whether it equals its own code."""
    mesh = init_device_mesh("cpu", (2,))
    block = Block("sequential")
    block.mlp = MLP(WIDTH, HIDDEN, dropout=0.5) if kind == "MLP" else nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.5), nn.Linear(HIDDEN, WIDTH)
    )  # fmt: skip
    randomize(block)
    convert(block)
    parallelize_module(block, mesh, plan_of(block.mlp, {}, {}))
    block.train(training)
    torch.manual_seed(5)
    ours = step(block)
    torch.manual_seed(5)
    own_code(block.mlp)
    return ours.fused, torch.equal(ours.values["y"], step(block).values["y"])


@pytest.mark.parametrize("kind", ["MLP", "sequential"])
@pytest.mark.parametrize("training", [True, False])
def test_planned_mlps_with_dropout_run_their_own_code_in_training(ranks, kind, training):
    for fused, same in ranks(with_dropout, kind, training):
        assert fused == (0 if training else 1)
        assert same or not training


def with_norm(kind: str) -> tuple[dict[str, Tensor], int]:
    """Output and gradients of a converted block under a plan, and fused calls. Nothing else watches its tensors."""
    mesh = init_device_mesh("cpu", (2,))
    if kind == "encoder layer":
        block = encoder_layer()
        plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    else:
        block = make(kind)
        plan = plan_of(block.mlp, {}, {})
    convert(block)
    parallelize_module(block, mesh, plan)
    with fused_calls() as calls:
        results = plain_step(block, X)
    return {name: whole(value) for name, value in results.items()}, len(calls)


def encoder_layer() -> nn.Module:
    return randomize(nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN, 0.0, batch_first=True, norm_first=True))


@pytest.mark.parametrize("kind", ["sequential", "llama", "encoder layer"])
def test_a_norm_before_a_planned_mlp_is_not_folded(ranks, kind):
    # Folded, the gradient of its weight would be the part that this rank's features give.
    expected = plain_step(encoder_layer() if kind == "encoder layer" else make(kind), X)
    for actual, fused in ranks(with_norm, kind):
        assert fused == 1
        assert_same(actual, expected, 1e-5)
