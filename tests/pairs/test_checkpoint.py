"""torch.utils.checkpoint around blocks, around the whole and inside, and selective checkpointing that names our ops."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pair_cases import (
    MODELS,
    Replaced,
    assert_equal_steps,
    assert_same,
    every_converted,
    every_model,
    forwards,
    fused_parts,
    needs_extension,
    own,
    step,
    tokens,
)
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

OURS = ("fused_remat::mlp", "fused_remat::multi_head_attention")
HOW = {
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "no early stop": {"use_reentrant": False, "early_stop": False},
}
every_way = pytest.mark.parametrize("how", HOW.values(), ids=[key.replace(" ", "-") for key in HOW])


def _wrap(module: nn.Module, **settings) -> None:
    """Have `module` checkpoint itself, as transformers and torchtune do it: a forward on the instance."""
    forward = module.forward

    def checkpointed(*args, **kwargs):
        if args:
            return checkpoint(partial(forward, **kwargs), *args, **settings)
        name = next(iter(kwargs))  # reentrant checkpoints look for gradients among positional arguments
        rest = {key: value for key, value in kwargs.items() if key != name}
        return checkpoint(lambda x: forward(**{name: x}, **rest), kwargs[name], **settings)

    module.forward = checkpointed


def _policy(policy: CheckpointPolicy, level: str = "_fwd"):
    """Contexts whose policy is for our ops of that level, while everything else is recomputed."""

    def choose(ctx, op, *args, **kwargs):
        ours = op._schema.name in [name + level for name in OURS]
        return policy if ours else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, choose)


@every_way
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@every_model
def test_around_the_whole_and_around_blocks(name, how, dropout):
    ours, stock = MODELS[name].pair(dropout=dropout)
    torch.manual_seed(1)
    truth = step(ours, tokens())
    torch.manual_seed(1)
    whole = step(Replaced(ours, lambda x: checkpoint(ours, x, **how)), tokens())
    assert_same(own(whole), truth, 0.0)
    for path in MODELS[name].blocks:
        _wrap(ours.get_submodule(path), **how)
    torch.manual_seed(1)
    assert_same(step(ours, tokens()), truth, 0.0)
    if not dropout:
        assert_same(step(stock, tokens()), truth, 1e-5)


@every_way
@every_converted
def test_around_a_child_inside_a_converted_parent(name, how):
    """A child that checkpoints itself is called, and runs fused itself where it was converted as it is."""
    for pick in (_attentions, _linears):
        ours, stock = MODELS[name].pair()
        children = pick(ours)
        assert children
        for child in children:
            _wrap(child, **how)
        assert_equal_steps(ours, stock, tokens())


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [module for key, module in model.named_modules() if key.endswith("self_attn")]


def _linears(model: nn.Module) -> list[nn.Module]:
    return [module for key, module in model.named_modules() if key.endswith(("linear1", "gate_proj"))]


@every_converted
def test_checkpoint_sequential_and_nested(name):
    ours, stock = MODELS[name].pair()
    for path in MODELS[name].blocks:
        _wrap(ours.get_submodule(path), use_reentrant=False)
    nested = Replaced(ours, lambda x: checkpoint(ours, x, use_reentrant=False))
    assert_same(own(step(nested, tokens())), step(stock, tokens()), 1e-5)
    ours, stock = MODELS[name].pair()
    chain = nn.Sequential(ours, nn.Tanh())
    chunked = Replaced(chain, lambda x: checkpoint_sequential(chain, 2, x, use_reentrant=False))
    truth = step(nn.Sequential(stock, nn.Tanh()), tokens())
    assert_same(own(step(chunked, tokens())), truth, 1e-5)


@needs_extension
@every_model
def test_early_stop_spares_what_ends_a_region(name):
    """An MLP that ends a region is not computed again; an attention is, for its output is saved."""
    ours, _ = MODELS[name].pair()
    parts = fused_parts(ours)

    def replayed(**settings) -> dict[str, int]:
        y = checkpoint(ours, tokens().requires_grad_(), **settings)
        return forwards(lambda: y.sum().backward())

    assert replayed(use_reentrant=True) == parts
    spared = replayed(use_reentrant=False)
    with set_checkpoint_early_stop(False):
        assert replayed(use_reentrant=False) == parts
    if name in ("MLP", "GatedMLP", "encoder"):
        assert spared.get("mlp", 0) == parts["mlp"] - 1
    assert spared.get("attention", 0) == parts.get("attention", 0)


# Selective checkpointing ---------------------------------------------------------------------------------------------


@needs_extension
@pytest.mark.parametrize(
    ("policy", "replays"),
    [
        (CheckpointPolicy.MUST_SAVE, False),
        (CheckpointPolicy.PREFER_SAVE, False),
        (CheckpointPolicy.PREFER_RECOMPUTE, True),
        (CheckpointPolicy.MUST_RECOMPUTE, True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@every_model
def test_policies_that_name_our_forwards(name, policy, replays):
    ours, stock = MODELS[name].pair()
    region = lambda x: ours(x).sin()  # saves our output: without a policy every forward is replayed
    y = checkpoint(region, tokens().requires_grad_(), use_reentrant=False, context_fn=_policy(policy))
    assert forwards(lambda: y.sum().backward()) == (fused_parts(ours) if replays else {})
    selective = Replaced(ours, lambda x: checkpoint(region, x, use_reentrant=False, context_fn=_policy(policy)))
    truth = own(step(Replaced(stock, lambda x: stock(x).sin()), tokens()))
    assert_same(own(step(selective, tokens())), truth, 1e-5)


@needs_extension
@every_model
def test_lists_of_ops_as_policies(name):
    ours, _ = MODELS[name].pair()
    ops = [torch.ops.fused_remat.mlp_fwd.default, torch.ops.fused_remat.multi_head_attention_fwd.default]
    contexts = partial(create_selective_checkpoint_contexts, ops)
    y = checkpoint(lambda x: ours(x).sin(), tokens().requires_grad_(), use_reentrant=False, context_fn=contexts)
    assert forwards(lambda: y.sum().backward()) == {}


@needs_extension
@every_model
def test_policies_that_name_the_differentiable_ops_do_not_reach_them(name):
    """A policy sees ops below autograd, which are `*_fwd`: naming `mlp` saves nothing, and breaks nothing."""
    ours, stock = MODELS[name].pair()
    contexts = _policy(CheckpointPolicy.MUST_SAVE, level="")
    y = checkpoint(lambda x: ours(x).sin(), tokens().requires_grad_(), use_reentrant=False, context_fn=contexts)
    assert forwards(lambda: y.sum().backward()) == fused_parts(ours)
    selective = Replaced(ours, lambda x: checkpoint(ours, x, use_reentrant=False, context_fn=contexts))
    assert_same(own(step(selective, tokens())), step(stock, tokens()), 1e-5)
