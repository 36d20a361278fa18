"""torch.export, for inference and for training, and AOT autograd's joint graph."""

from __future__ import annotations

import pytest
import torch
from pair_cases import COMPILED, MODELS, fused_parts, needs_extension, tokens
from torch import nn
from torch._functorch.aot_autograd import aot_export_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    # transformers keeps track of outputs in a variable of its own.
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning"),
]
OPS = {"fused_remat.mlp.default": "mlp", "fused_remat.multi_head_attention.default": "attention"}
# Tracing the whole of a language model takes its time.
_quick_first = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "Llama" else ()) for name in MODELS]
)


def _export(model: nn.Module, *, strict: bool) -> torch.export.ExportedProgram:
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=64)
    return torch.export.export(model, (tokens(),), dynamic_shapes=({0: batch, 1: length},), strict=strict)


def _ours(program: torch.export.ExportedProgram) -> dict[str, int]:
    kinds = [OPS[str(node.target)] for node in program.graph.nodes if str(node.target) in OPS]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


@_quick_first
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batch_and_length_are_dynamic(name, strict, training):
    ours, stock = MODELS[name].pair()
    program = _export(ours.train(training), strict=strict)
    assert _ours(program) == (fused_parts(ours) if COMPILED else {})
    for x in (tokens(5, 3), tokens(33, 7)):
        torch.testing.assert_close(program.module()(x), stock.train(training)(x), rtol=1e-4, atol=1e-5)


@needs_extension
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Llama"])  # AOT autograd alone cannot trace it
def test_the_joint_graph_of_a_training_step_rebuilds_inside_our_backward(name):
    ours, _ = MODELS[name].pair()
    joint, _ = aot_export_module(_Loss(ours), (tokens(),), trace_joint=True, output_loss_index=0)
    targets = [str(node.target) for node in joint.graph.nodes]
    for kind, op in (("mlp", "mlp"), ("attention", "multi_head_attention")):
        for suffix in ("fwd", "bwd"):
            assert targets.count(f"fused_remat.{op}_{suffix}.default") == fused_parts(ours).get(kind, 0)


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.model(x).square().sum(),)
