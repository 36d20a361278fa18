"""The operators on DTensors, by the rules of `fused_remat.sharding`: values, gradients and where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from convert_cases import assert_same
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fused_remat
from fused_remat.plain import is_dtensor


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def mlp_tensors(gated: bool, biases: bool) -> dict[str, Tensor]:
    tensors = {"x": numbers(4, 6, 8, seed=0), "w_up": numbers(12, 8, seed=1), "w_down": numbers(8, 12, seed=2)}
    tensors |= {"b_up": numbers(12, seed=3), "b_down": numbers(8, seed=4)} if biases else {}
    tensors |= {"w_gate": numbers(12, 8, seed=5)} if gated else {}
    return tensors | ({"b_gate": numbers(12, seed=6)} if gated and biases else {})


def attention_tensors() -> dict[str, Tensor]:
    return {"q": numbers(2, 4, 5, 8, seed=0), "k": numbers(2, 2, 6, 8, seed=1), "v": numbers(2, 2, 6, 8, seed=2)}


def mha_tensors() -> dict[str, Tensor]:
    return {
        "query": numbers(2, 5, 8, seed=0), "in_proj_weight": numbers(24, 8, seed=1),
        "in_proj_bias": numbers(24, seed=2), "out_proj_weight": numbers(8, 8, seed=3),
        "out_proj_bias": numbers(8, seed=4),
    }  # fmt: skip


def mlp(t: dict[str, Tensor], **settings: Any) -> Tensor:
    return fused_remat.mlp(**t, activation="silu", **settings)


def attention(t: dict[str, Tensor], **settings: Any) -> Tensor:
    return fused_remat.attention(**t, **settings)


def mha(t: dict[str, Tensor], **settings: Any) -> Tensor:
    weights = [t[name] for name in ("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias")]
    return fused_remat.multi_head_attention(
        t["query"], None, None, *weights, 2, attn_mask=t.get("attn_mask"), **settings
    )


OPS = {"mlp": mlp, "attention": attention, "mha": mha}


@dataclass
class Outcome:
    node: str  # of autograd, behind the result
    values: dict[str, Tensor]  # result and gradients, whole
    placements: dict[str, str]


def step(op: str, tensors: dict[str, Tensor], **settings: Any) -> Outcome:
    """One call of `op` and its backward."""
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    y = OPS[op](leaves, **settings)
    whole = y.full_tensor() if is_dtensor(y) else y
    (whole * numbers(*y.shape, seed=9)).sum().backward()
    found = {"y": y.detach()} | {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Outcome(
        y.grad_fn.name(),
        {name: t.full_tensor() if is_dtensor(t) else t for name, t in found.items()},
        {name: str(*t.placements) for name, t in found.items() if is_dtensor(t)},
    )


def on_ranks(op: str, tensors: dict[str, Tensor], shards: dict[str, int], settings: dict[str, Any]) -> Outcome:
    """`step` with every tensor a DTensor: sharded on the dim that `shards` names, else replicated."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    placed = {
        name: distribute_tensor(t, mesh, [Shard(shards[name]) if name in shards else Replicate()])
        for name, t in tensors.items()
    }
    return step(op, placed, **settings)


HIDDEN = {"w_up": 0, "w_gate": 0, "b_up": 0, "b_gate": 0, "w_down": 1}
MASK = {"attn_mask": numbers(2, 4, 5, 6, seed=7), "key_padding_mask": torch.arange(12).view(2, 6) % 5 > 0}
PLAIN, GATED, BARE = mlp_tensors(False, True), mlp_tensors(True, True), mlp_tensors(True, False)

CASES = {  # op, tensors, shards, settings; where y, the input's and a weight's gradient lie
    "mlp, replicated": ("mlp", PLAIN, {}, {}, {"y": "R", "dx": "R", "dw_up": "R"}),
    "mlp, batch": ("mlp", GATED, {"x": 0}, {}, {"y": "S(0)", "dx": "S(0)", "dw_up": "P(sum)", "db_down": "P(sum)"}),
    "mlp, sequence": ("mlp", PLAIN, {"x": 1}, {"keep": ("up",)}, {"y": "S(1)", "dx": "S(1)", "dw_down": "P(sum)"}),
    "mlp, hidden": ("mlp", GATED, HIDDEN, {}, {"y": "P(sum)", "dw_up": "S(0)", "dw_down": "S(1)", "db_down": "R"}),
    "mlp, hidden, no bias": ("mlp", BARE, HIDDEN, {}, {"y": "P(sum)", "dx": "P(sum)", "dw_gate": "S(0)"}),
    "attention, batch": ("attention", attention_tensors(), dict.fromkeys("qkv", 0), {}, {"y": "S(0)", "dk": "S(0)"}),
    "attention, heads": (
        "attention", attention_tensors() | MASK, dict.fromkeys("qkv", 1) | {"attn_mask": 1}, {},
        {"y": "S(1)", "dv": "S(1)", "dattn_mask": "S(1)"},
    ),
    "attention, three key-value heads": (
        "attention", {"q": numbers(1, 6, 5, 8, seed=0)} | {t: numbers(1, 3, 6, 8, seed=1) for t in "kv"}, {"q": 1}, {},
        {"y": "R"},
    ),
    "attention, masks": (
        "attention", attention_tensors() | {"attn_mask": MASK["attn_mask"][:1, :1]}, dict.fromkeys("qkv", 0),
        {"is_causal": True}, {"y": "S(0)", "dattn_mask": "P(sum)"},
    ),
    "mha, batch": ("mha", mha_tensors(), {"query": 0}, {"keep": ("q",)}, {"y": "S(0)", "din_proj_weight": "P(sum)"}),
    "mha, masks": (
        "mha", mha_tensors() | {"attn_mask": numbers(2, 1, 5, 5, seed=8)}, {"query": 0, "attn_mask": 0}, {"keep": ()},
        {"y": "S(0)", "dattn_mask": "S(0)", "dquery": "S(0)"},
    ),
    "mha, one mask": (
        "mha", mha_tensors() | {"attn_mask": numbers(2, 5, 5, seed=8)}, {"query": 0}, {"keep": ("out", "v")},
        {"y": "S(0)", "dattn_mask": "P(sum)", "dout_proj_bias": "P(sum)"},
    ),
    "mha, replicated": ("mha", mha_tensors(), {}, {"is_causal": True}, {"y": "R", "dquery": "R"}),
}  # fmt: skip
NODES = {"mlp": "MlpBackward", "attention": "AttentionBackward", "mha": "MultiHeadAttentionBackward"}


@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_equal_one_process(ranks, case):
    op, tensors, shards, settings, placements = CASES[case]
    expected = step(op, tensors, **settings)
    for actual in ranks(on_ranks, op, tensors, shards, settings):
        assert actual.node == expected.node == NODES[op]
        assert_same(actual.values, expected.values, 1e-6)
        assert placements.items() <= actual.placements.items()


@pytest.mark.parametrize("shards", [{}, {"x": 0}, HIDDEN], ids=str)
def test_dropout_drops_what_one_process_drops(ranks, shards):
    torch.manual_seed(0)  # as on the ranks
    expected = step("mlp", PLAIN, dropout_p=0.5)
    for actual in ranks(on_ranks, "mlp", PLAIN, shards, {"dropout_p": 0.5}):
        assert actual.node != NODES["mlp"]
        assert_same(actual.values, expected.values, 1e-6)


def reasons(op: str, tensors: dict[str, Tensor], shards: dict[str, int], plain: str, settings: dict) -> str:
    """What `explain` says against the compiled op, with the tensor `plain` no DTensor."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    placed = {
        name: t
        if name == plain
        else distribute_tensor(t, mesh, [Shard(shards[name]) if name in shards else Replicate()])
        for name, t in tensors.items()
    }
    if "w_down on another mesh" in settings:
        settings = {}
        square = init_device_mesh("cpu", (1, 2))
        placed["w_down"] = distribute_tensor(tensors["w_down"], square, [Replicate(), Replicate()])
    explanation = fused_remat.explain(fused_remat.mlp, **placed, **settings)
    assert explanation.backend == "reference"
    return "; ".join(explanation.reasons["aten"])


@pytest.mark.parametrize(
    ("shards", "plain", "settings", "reason"),
    [
        ({}, "", {"dropout_p": 0.5}, "a dropout mask numbers rows"),
        (HIDDEN, "", {"keep": 0.5}, "its weights are sharded"),
        ({}, "", {"w_down on another mesh": True}, "DTensors on different meshes"),
        ({}, "w_up", {}, "some of its tensors are DTensors and some are not"),
    ],
)
def test_what_the_rules_do_not_cover_takes_the_reference_path(ranks, shards, plain, settings, reason):
    for found in ranks(reasons, "mlp", PLAIN, shards, plain, settings):
        assert reason in found
