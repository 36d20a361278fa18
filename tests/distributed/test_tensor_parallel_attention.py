"""Attention whose heads a plan shares out among ranks, alone, in Llama, and in torch's own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convert_cases import assert_same, fused_attentions, fused_calls, randomize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fused_remat import MultiheadAttention, convert, tensor_parallel
from fused_remat.plain import is_dtensor

WIDTH, HEADS, BATCH, LENGTH = 16, 4, 2, 6


class Attention(nn.Module):
    """Separate projections of q, k, v, with fewer key-value heads."""

    def __init__(self, kv_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.dropout = HEADS, kv_heads, WIDTH // HEADS, dropout
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=False)  # softmax would not see a bias
        self.v_proj = nn.Linear(WIDTH, kv_heads * self.head_dim)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, l, _ = hidden_states.shape
        q, k, v = (
            proj(hidden_states).view(b, l, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for t in (k, v))
        p = self.dropout if self.training else 0.0
        out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, dropout_p=p)
        return self.o_proj(out.transpose(1, 2).reshape(b, l, -1))


PLAN = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")} | {"o_proj": RowwiseParallel()}
X, WEIGHT = (torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(s)) for s in (3, 4))


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if is_dtensor(t) else t


def step(model: nn.Module, *args: Any) -> tuple[dict[str, Tensor], int, dict[str, int]]:
    """Output and gradients, whole, fused calls and collectives."""
    x = X.clone().requires_grad_()
    with fused_attentions() as calls, CommDebugMode() as comm:
        y = model(x, *args)
        (y * WEIGHT).sum().backward()
    values = {"y": y.detach(), "dx": x.grad} | {n: whole(p.grad) for n, p in model.named_parameters()}
    return values, len(calls), {str(op).rpartition(".")[2]: n for op, n in comm.get_comm_counts().items()}


def planned(kv_heads: int, dropout: float, mask: Tensor | None, prepared: bool) -> tuple:
    model = randomize(Attention(kv_heads, dropout))
    report = convert(model)
    assert report.converted, str(report)
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, PLAN)
    if prepared:
        style = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
        parallelize_module(model, mesh, style)
    return step(model, *([] if mask is None else [mask]))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("prepared", [False, True])
def test_planned_attention_runs_fused_and_equals_one_process(ranks, kv_heads, prepared):
    mask = torch.randn(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))
    mask = None if prepared else mask
    expected, _, _ = step(randomize(Attention(kv_heads)), mask)
    for actual, fused, collectives in ranks(planned, kv_heads, 0.0, mask, prepared):
        assert_same(actual, expected, 1e-5)
        assert fused == 1
        assert collectives == {"all_reduce": 2}


def test_a_mask_per_head_and_dropout_run_their_own_code(ranks):
    mask = torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))
    for results in ranks(own_code, mask):
        assert results == ["error", 0]


def own_code(mask: Tensor) -> list:
    """What a planned attention makes of a mask per head, which its own code cannot add to its heads, and of dropout."""
    try:
        planned(4, 0.0, mask, False)
        found = ["no error"]
    except RuntimeError:
        found = ["error"]
    return [*found, planned(4, 0.5, None, False)[1]]


def reasons(num_heads: int, num_kv_heads: int, plan: dict[str, Any]) -> str | None:
    model = Attention(1)
    if plan:
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    else:
        for linear in model.children():
            parallelize_module(linear, init_device_mesh("cpu", (2,)), ColwiseParallel())
            linear._forward_hooks.clear()
            linear._forward_pre_hooks.clear()
    return tensor_parallel.why_not_heads(
        [model.q_proj, model.k_proj, model.v_proj], model.o_proj, num_heads, num_kv_heads
    )


@pytest.mark.parametrize(
    ("heads", "plan", "reason"),
    [
        ((4, 2), PLAN, None),
        ((4, 1), PLAN, "4 heads on 1 key-value heads are no multiple of 2 ranks"),
        ((3, 2), PLAN, "3 heads on 2 key-value heads are no multiple of 2 ranks"),
        ((4, 2), {}, "its weights are DTensors without a plan for heads"),
        (
            (4, 2),
            PLAN | {"k_proj": ColwiseParallel(input_layouts=Shard(1))},
            "its linears expect different layouts of their input",
        ),
    ],
)
def test_why_not_heads(ranks, heads, plan, reason):
    assert ranks(reasons, *heads, plan) == [reason, reason]


def llama(parallel: bool, sequence: bool) -> tuple[dict[str, Tensor], int, int]:
    """Loss and gradients of a small Llama, whole, and calls fused."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = randomize(transformers.LlamaForCausalLM(config))
    if parallel:
        convert(model)
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            plan = {f"self_attn.{name}": style for name, style in PLAN.items()}
            plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
            plan["mlp.down_proj"] = RowwiseParallel()
            if sequence:
                moved = {"desired_input_layouts": (Replicate(),), "input_layouts": (Shard(1),)}
                rows = {"output_layouts": Shard(1), "use_local_output": False}
                plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
                plan |= {"mlp": PrepareModuleInput(**moved), "mlp.down_proj": RowwiseParallel(**rows)}
                plan["self_attn.o_proj"] = RowwiseParallel(**rows)
                plan["self_attn"] = PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                )
            parallelize_module(layer, mesh, plan)
        if sequence:
            table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
            parallelize_module(model, mesh, {"model.embed_tokens": table, "model.norm": SequenceParallel()})
            head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
            parallelize_module(model, mesh, {"lm_head": head})
    tokens = torch.randint(0, 32, (BATCH, LENGTH), generator=torch.Generator().manual_seed(6))
    with fused_calls() as mlps, fused_attentions() as attentions:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": whole(loss.detach())} | gradients, len(mlps), len(attentions)


@pytest.mark.parametrize("sequence", [False, True])
def test_llama_under_a_plan(ranks, sequence):
    expected, _, _ = llama(False, False)
    for actual, mlps, attentions in ranks(llama, True, sequence):
        assert (mlps, attentions) == (2, 2)
        assert_same(actual, expected, 1e-5)


class Net(nn.Module):
    """Self-attention by one of torch's modules, or ours."""

    def __init__(self, cls: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.attention = cls(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def packed(cls: type[nn.MultiheadAttention], plan: dict[str, Any]) -> str | dict[str, Tensor]:
    """Output and gradients under a plan for the projection of the output, or what it says instead."""
    net = randomize(Net(cls))
    convert(net)
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    try:
        return step(net)[0]
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("cls", [nn.MultiheadAttention, MultiheadAttention])
def test_a_packed_projection_cannot_be_shared_out_by_heads(ranks, cls):
    # torch's own code fails as well: it adds a DTensor to a plain tensor.
    for found in ranks(packed, cls, {"attention.out_proj": RowwiseParallel()}):
        assert isinstance(found, str)
    expected, _, _ = step(randomize(Net(nn.MultiheadAttention)))
    for found in ranks(packed, cls, {"attention.out_proj": RowwiseParallel(input_layouts=Replicate())}):
        assert isinstance(found, str) or assert_same(found, expected, 1e-5) is None
