"""torch.compile: whole graphs, dynamic lengths, what the compiled forward keeps, and other tools inside the graph."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from pair_cases import (
    CONVERTED,
    HIDDEN,
    MODELS,
    Replaced,
    assert_equal_steps,
    assert_same,
    fused_parts,
    named,
    needs_extension,
    saved,
    step,
    tokens,
)
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytestmark = [
    # torch's own tracing does all of this.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]

# Tracing the whole of a language model takes its time.
_SLOW = {"Llama": pytest.mark.slow}
every_model, every_converted = (
    pytest.mark.parametrize("name", [pytest.param(name, marks=_SLOW.get(name, ())) for name in names])
    for names in (MODELS, CONVERTED)
)


def _compile_blocks(name: str, model: nn.Module, **settings) -> nn.Module:
    """Every block compiled in place, as training scripts do it."""
    for path in MODELS[name].blocks:
        model.get_submodule(path).compile(fullgraph=True, **({"backend": "aot_eager"} | settings))
    return model


class _Graphs:
    """A backend that remembers the forward and backward graphs that AOT autograd makes."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=self._remember(self.forward),
            bw_compiler=self._remember(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def _remember(graphs: list[torch.fx.GraphModule]):
        def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    @staticmethod
    def count(graphs: list[torch.fx.GraphModule], suffix: str) -> dict[str, int]:
        """Ops of ours in these graphs, by kind."""
        targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
        counts = {
            kind: targets.count(f"fused_remat.{op}_{suffix}.default")
            for kind, op in (("mlp", "mlp"), ("attention", "multi_head_attention"))
        }
        return {kind: count for kind, count in counts.items() if count}

    def kept(self) -> list[tuple[int, ...]]:
        """Shapes of what the forward graphs hand to the backward ones, besides the model's own inputs."""
        shapes = []
        for graph in self.forward:
            (output,) = (node for node in graph.graph.nodes if node.op == "output")
            values = (node for node in output.args[0][1:] if node is not None and node.op != "placeholder")
            shapes += [tuple(node.meta["val"].shape) for node in values if isinstance(node.meta["val"], torch.Tensor)]
        return shapes


@every_model
def test_every_block_is_one_graph(name):
    ours, stock = MODELS[name].pair()
    assert_equal_steps(_compile_blocks(name, ours), stock, tokens())


@every_converted
def test_a_whole_converted_model_is_one_graph(name):
    ours, stock = MODELS[name].pair()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_equal_steps(compiled, stock, tokens())
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(tokens()), stock.eval()(tokens()), rtol=1e-4, atol=1e-5)


@needs_extension
@every_model
def test_graphs_hold_our_ops_and_keep_nothing_of_the_hidden_width(name):
    ours, _ = MODELS[name].pair()
    graphs = _Graphs()
    with saved() as tensors:
        y = torch.compile(ours, fullgraph=True, backend=graphs.backend)(tokens().requires_grad_())
    y.sum().backward()
    assert graphs.count(graphs.forward, "fwd") == fused_parts(ours) == graphs.count(graphs.backward, "bwd")
    assert graphs.count(graphs.backward, "fwd") == {}, "nothing is replayed"
    parameters = {tuple(p.shape) for p in ours.parameters()}
    shapes = [shape for shape in [tuple(t.shape) for t in tensors] + graphs.kept() if shape not in parameters]
    assert tensors and not any(HIDDEN in shape or 2 * HIDDEN in shape for shape in shapes)


@pytest.mark.slow
@every_model
def test_inductor(name):
    ours, stock = MODELS[name].pair()
    assert_equal_steps(_compile_blocks(name, ours, backend="inductor"), stock, tokens())


@every_model
@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.slow)])
def test_dynamic_lengths(name, dynamic):
    """Without recompiling where lengths are said to be dynamic, after one recompilation where that turns out."""
    ours, stock = MODELS[name].pair()
    _compile_blocks(name, ours, dynamic=dynamic)
    for i, length in enumerate((16, 33, 47)):
        with torch._dynamo.config.patch(error_on_recompile=i > (0 if dynamic else 1)):
            assert_equal_steps(ours, stock, tokens(length))


@every_model
def test_dropout_under_compile_is_drawn_once_and_replayed(name):
    ours, _ = MODELS[name].pair(dropout=0.4)
    x = tokens()
    torch.manual_seed(3)
    eager = step(ours, x)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    assert_same(named(step(compiled, x)), eager, 1e-5)
    assert not torch.equal(compiled(x), compiled(x))


@every_model
def test_autocast_inside_the_graph(name):
    ours, _ = MODELS[name].pair()

    def autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ours(x)

    eager = step(Replaced(ours, autocast), tokens())
    compiled = step(Replaced(ours, torch.compile(autocast, fullgraph=True, backend="aot_eager")), tokens())
    assert compiled["output"].dtype == eager["output"].dtype
    for key, want in eager.items():
        assert compiled[key].dtype == want.dtype
        assert (compiled[key] - want).float().norm() <= 2e-2 * want.float().norm() + 1e-5, key


@needs_extension
@every_converted
def test_checkpoint_inside_the_graph(name):
    """Without a policy our forwards are in the backward graph again; one that saves our ops keeps them out of it."""
    ours, stock = MODELS[name].pair()
    fwd = (torch.ops.fused_remat.mlp_fwd.default, torch.ops.fused_remat.multi_head_attention_fwd.default)

    def save_ours(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in fwd else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(save_ours)
    for settings, replayed in (({}, True), ({"context_fn": contexts}, False)):
        graphs = _Graphs()

        def region(x, settings=settings):
            return checkpoint(ours, x, use_reentrant=False, **settings).sin()

        expected = step(Replaced(stock, lambda x: stock(x).sin()), tokens())
        compiled = torch.compile(region, fullgraph=True, backend=graphs.backend)
        assert_same(step(Replaced(ours, compiled), tokens()), expected, 1e-5)
        assert bool(graphs.count(graphs.backward, "fwd")) == replayed
        assert graphs.count(graphs.forward, "fwd") == fused_parts(ours)
