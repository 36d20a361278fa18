"""Multi-head attention from x inside torch.utils.checkpoint, selective checkpointing, save_on_cpu and autocast."""

from __future__ import annotations

from functools import partial

import mha_cases as cases
import pytest
import torch
from mha_cases import RESIDUALS, Block
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]
BLOCK = Block(length=9, model=8, heads=4, kv_heads=2, width=4)


class Layer(nn.Module):
    """A block as a module, its operands being parameters."""

    def __init__(self, block: Block = BLOCK, **settings) -> None:
        super().__init__()
        self.block, self.settings = block, settings
        operands = block.operands(torch.float32)
        self.names = [name for name in operands if name != "query"]
        self.operands = nn.ParameterDict({name: nn.Parameter(operands[name].detach()) for name in self.names})

    def forward(self, x):
        return self.block._call({"query": x} | {name: self.operands[name] for name in self.names}, self.settings)


def _forwards_in_backward(y: torch.Tensor) -> bool:
    """Whether a forward was computed: a replay that is answered from a cache calls the op but no kernel."""
    return "attention_fwd_cpp" in cases.kernels_of(lambda: y.square().sum().backward())


def _results(module: nn.Module, function, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(5)
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


@pytest.mark.parametrize("keep", ((), ("out",), RESIDUALS), ids=str)
@pytest.mark.parametrize("dropout_p", (0.0, 0.3))
def test_gradients_are_those_without_checkpoint(keep, dropout_p):
    first, second = (Layer(keep=keep, dropout_p=dropout_p, is_causal=True) for _ in range(2))
    both, x = nn.Sequential(first, second), torch.randn(2, 9, 8)

    def nested(x, use_reentrant):
        return checkpoint(lambda x: second(checkpoint(first, x, use_reentrant=False)), x, use_reentrant=use_reentrant)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return both(x)

    def selective(x, policy):
        ours = torch.ops.fused_remat.multi_head_attention_fwd.default

        def choose(ctx, op, *args, **kwargs):
            return policy if op == ours else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(both, x, use_reentrant=False, context_fn=contexts)

    wrapped = {
        "non-reentrant": lambda x: checkpoint(both, x, use_reentrant=False),
        "reentrant": lambda x: checkpoint(both, x, use_reentrant=True),
        "no early stop": lambda x: checkpoint(both, x, use_reentrant=False, early_stop=False),
        "nested": lambda x: nested(x, use_reentrant=False),
        "nested in reentrant": lambda x: nested(x, use_reentrant=True),
        "save_on_cpu": offloaded,
        "selective, saved": lambda x: selective(x, CheckpointPolicy.MUST_SAVE),
        "selective, recomputed": lambda x: selective(x, CheckpointPolicy.MUST_RECOMPUTE),
    }
    truth = _results(both, both, x)
    for name, function in wrapped.items():
        for ours, expected in zip(_results(both, function, x), truth, strict=True):
            assert torch.equal(ours, expected), name


def test_selective_checkpointing_can_save_our_forward():
    layer, x = Layer(), torch.randn(2, 9, 8, requires_grad=True)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.fused_remat.multi_head_attention_fwd.default])

    region = lambda x: layer(x).sin()
    assert not _forwards_in_backward(checkpoint(region, x, use_reentrant=False, context_fn=contexts))
    assert _forwards_in_backward(checkpoint(region, x, use_reentrant=False))


def test_frozen_embedding_before_and_head_after():
    embedding, layer, head = nn.Embedding(10, 8), Layer(), nn.Linear(8, 2)
    embedding.requires_grad_(False)
    tokens = torch.arange(9).view(1, 9).expand(2, 9)
    for wrap in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        head(wrap(embedding(tokens))).sum().backward()
        # A bias of k moves every score of a row alike, so its gradient is zero up to rounding.
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_second_backward_and_nobody_elses_tensors():
    block = Block(norm="layer_norm", qk_norm=True, rotary=4, bias_kv=True, mask="float+float-padding")
    given = block.operands()
    before = {name: value.detach().clone() for name, value in given.items()}
    y = block.call(given, dropout_p=0.3)
    dy = torch.randn_like(y)
    dy_before = dy.clone()
    first = cases.gradients(y, given, dy, retain_graph=True)
    second = cases.gradients(y, given, dy)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(dy, dy_before) and all(torch.equal(before[name], given[name]) for name in before)
    with pytest.raises(RuntimeError, match="second time"):
        cases.gradients(y, given, dy)
    for name in ("query", "in_proj_weight", "norm_weight", "q_norm", "bias_k", "attn_mask"):
        y = block.call(given)
        with torch.no_grad():
            given[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, given["out_proj_weight"], dy)


# Autocast ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("use_reentrant", (None, False, True), ids=("plain", "non-reentrant", "reentrant"))
def test_autocast_around_forward_only(dtype, use_reentrant):
    block = Block(length=12, model=16, heads=4, kv_heads=4, width=4)
    before, layer = nn.Linear(16, 16), Layer(block)
    x, o = torch.randn(2, 12, 16), layer.operands

    def ours(x):
        return layer(x) + before(x)

    def twin(x):
        packed = nn.functional.linear(x, o["in_proj_weight"], o["in_proj_bias"])
        q, k, v = packed.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return nn.functional.linear(out, o["out_proj_weight"], o["out_proj_bias"]) + before(x)

    def run(function):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", dtype):
            before(leaf)  # another user of the same input fills autocast's cache first
            y = function(leaf) if use_reentrant is None else checkpoint(function, leaf, use_reentrant=use_reentrant)
        y.float().square().sum().backward()
        return {"y": y.detach(), "x": leaf.grad} | {n: p.grad.clone() for n, p in layer.named_parameters()}

    results, truth = run(ours), run(twin)
    assert results["y"].dtype == dtype and results["x"].dtype == torch.float32
    for name in truth:
        assert results[name].dtype == truth[name].dtype
        assert cases.relative_error(results[name], truth[name]) <= 2e-2, name


def test_autocast_around_backward_only_changes_nothing():
    layer, x = Layer(), torch.randn(2, 9, 8)
    plain = _results(layer, layer, x)
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    loss = layer(leaf).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    inside = [leaf.grad, *(p.grad for p in layer.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], inside, strict=True))


def test_autocast_keeps_x_and_the_fp32_parameters_alone():
    layer, x = Layer(keep=()), torch.randn(2, 9, 8, requires_grad=True)
    saved = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        layer(x)
    alive = {x.data_ptr(), *(p.data_ptr() for p in layer.parameters())}
    others = [t for t in saved if t.numel() and t.data_ptr() not in alive]
    assert [(t.dtype, t.shape) for t in others] == [(torch.float32, (2, 4, 9))], "lse"


def test_fp64_stays_out_of_autocast():
    given = BLOCK.operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert BLOCK.call(given).dtype == torch.float64
