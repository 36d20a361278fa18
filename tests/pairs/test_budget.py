"""torch.compile's own activation memory budget beside us."""

from __future__ import annotations

import pytest
import torch
from pair_cases import MODELS, assert_same, named, step, tokens
from torch import nn

import fused_remat

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("MLP", "aot_eager_decomp_partition"),
        ("MultiheadAttention", "aot_eager_decomp_partition"),
        ("encoder", "aot_eager_decomp_partition"),
        pytest.param("GatedMLP", "inductor", marks=pytest.mark.slow),
        pytest.param("encoder", "inductor", marks=pytest.mark.slow),
        pytest.param("Llama", "inductor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("budget", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_results_are_those_of_eager(name, backend, budget):
    """Without dropout: torch draws random numbers again in such a backward, stock dropout's included."""
    ours, _ = MODELS[name].pair()
    tail = nn.Sequential(ours, nn.Softplus(), nn.Linear(tokens().shape[-1], 5))
    truth = step(tail, tokens())
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled = torch.compile(tail, fullgraph=True, backend=backend)
        assert_same(named(step(compiled, tokens())), truth, 1e-5)


@pytest.mark.parametrize("op", ["mlp", "attention"])
def test_dropout_whose_mask_would_be_drawn_again_is_refused(op):
    x, w = torch.randn(2, 6, 8, requires_grad=True), torch.randn(8, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        if op == "mlp":
            return fused_remat.mlp(x, w, w, dropout_p=0.3)
        return fused_remat.multi_head_attention(x, None, None, (w, w, w), None, w, None, 2, dropout_p=0.3)

    assert call(x).isfinite().all()
    with (
        torch._functorch.config.patch(activation_memory_budget=0.5),
        pytest.raises(Exception, match=r"dropout_p is 0\.3 under .*activation_memory_budget=0\.5"),
    ):
        torch.compile(call, fullgraph=True, backend="aot_eager")(x)
