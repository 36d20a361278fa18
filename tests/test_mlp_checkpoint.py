"""Inside torch.utils.checkpoint, selective checkpointing, save_on_cpu and autocast."""

from __future__ import annotations

from functools import partial

import mlp_cases as cases
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fused_remat

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))
LAYERS = pytest.mark.parametrize("cls", (fused_remat.MLP, fused_remat.GatedMLP))


def _forwards_in_backward(y: torch.Tensor) -> int:
    """How often a forward was computed: a replay that is answered from a cache calls the op but no kernel."""
    return cases.kernels_of(lambda: y.square().sum().backward()).count("mlp_fwd_chunk_cpp")


def _results(module: nn.Module, function, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(5)
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


@LAYERS
def test_early_stop_skips_our_forward(cls):
    """Replayed 0 times where nothing after us saves a tensor, otherwise once; reentrant checkpoints always replay."""
    layer, x = cls(8, 16), torch.randn(3, 8, requires_grad=True)
    regions = {
        "last": (layer, 0),
        "residual": (lambda x: x + layer(x), 0),
        "saved after": (lambda x: layer(x).sin(), 1),
    }
    for name, (region, replays) in regions.items():
        assert _forwards_in_backward(checkpoint(region, x, use_reentrant=False)) == replays, name
        assert _forwards_in_backward(checkpoint(region, x, use_reentrant=True)) == 1, name
    layer.keep = 0.5  # kept residuals exist only after the compute
    assert _forwards_in_backward(checkpoint(layer, x, use_reentrant=False)) == 1


@LAYERS
@pytest.mark.parametrize("keep", ((), ("up",), 0.5), ids=str)
@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_gradients_are_those_without_checkpoint(cls, keep, dropout):
    first, second = cls(8, 16, dropout=dropout, keep=keep), cls(8, 16, dropout=dropout, keep=keep)
    both, x = nn.Sequential(first, second), torch.randn(3, 8)
    truth = _results(both, both, x)

    def nested(x, use_reentrant):
        return checkpoint(lambda x: second(checkpoint(first, x, use_reentrant=False)), x, use_reentrant=use_reentrant)

    def offloaded(x):
        with torch.autograd.graph.save_on_cpu():
            return both(x)

    def selective(x, policy):
        def choose(ctx, op, *args, **kwargs):
            return policy if op == torch.ops.fused_remat.mlp_fwd.default else CheckpointPolicy.PREFER_RECOMPUTE

        return checkpoint(
            both, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, choose)
        )

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
    for name, function in wrapped.items():
        for ours, expected in zip(_results(both, function, x), truth, strict=True):
            assert torch.equal(ours, expected), name


def test_selective_checkpointing_can_save_our_forward():
    layer, x = fused_remat.MLP(8, 16), torch.randn(3, 8, requires_grad=True)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.fused_remat.mlp_fwd.default])

    region = lambda x: layer(x).sin()
    assert _forwards_in_backward(checkpoint(region, x, use_reentrant=False, context_fn=contexts)) == 0
    assert _forwards_in_backward(checkpoint(region, x, use_reentrant=False)) == 1


def test_frozen_embedding_before_and_head_after():
    embedding, layer, head = nn.Embedding(10, 8), fused_remat.GatedMLP(8, 16), nn.Linear(8, 2)
    embedding.requires_grad_(False)
    tokens = torch.arange(6)
    for wrap in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        head(wrap(embedding(tokens))).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


# Autocast ------------------------------------------------------------------------------------------------------------


@LAYERS
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("use_reentrant", (None, False, True), ids=("plain", "non-reentrant", "reentrant"))
def test_autocast_around_forward_only(cls, dtype, use_reentrant):
    before, layer = nn.Linear(16, 16), cls(16, 64, bias=True)
    x = torch.randn(12, 16)
    names = ("fc1", "fc2") if cls is fused_remat.MLP else ("up_proj", "down_proj", "gate_proj")
    linears = [getattr(layer, name) for name in names]

    def ours(x):
        return layer(x) + before(x)

    def twin(x):
        up = linears[0](x)
        hidden = nn.functional.gelu(up) if cls is fused_remat.MLP else nn.functional.silu(linears[2](x)) * up
        return linears[1](hidden) + before(x)

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


def test_recompute_runs_in_the_dtype_of_forward():
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        dtypes = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func == torch.ops.fused_remat.mlp_bwd.default:
                self.dtypes += (args[27],)  # compute_dtype
            return func(*args, **(kwargs or {}))

    layer, x = fused_remat.MLP(8, 16), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
    outside = layer(x)
    with Seen() as seen:
        inside.sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            outside.sum().backward()
    assert seen.dtypes == (torch.bfloat16, torch.float32)


def test_autocast_keeps_x_and_the_fp32_parameters_alone():
    layer, x = fused_remat.MLP(64, 256), torch.randn(128, 64, requires_grad=True)
    saved = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        layer(x)
    assert {t.dtype for t in saved if t.numel()} == {torch.float32}
    alive = {x.data_ptr(), *(p.data_ptr() for p in layer.parameters())}
    assert all(t.data_ptr() in alive for t in saved if t.numel())


def test_fp64_stays_out_of_autocast():
    layer, x = fused_remat.MLP(8, 16).double(), torch.randn(3, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float64
