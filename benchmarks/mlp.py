"""The MLP, plain and gated: inputs, truth, and everyone who computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import cases, peers
from benchmarks.cases import OURS, MLPCase
from benchmarks.operation import CHECKPOINT, EAGER, Forward, Leaves, NotRun, Operation
from fused_remat import functional, reference

_COMPILE, _COMPILE_BUDGET = "compile", "compile-budget-0"


def _leaves(case: MLPCase, device: torch.device) -> Leaves:
    """Named as the arguments of `mlp`. Weights are scaled by 1 / sqrt(fan-in), so that every value is of order 1."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {"x": (case.rows, case.width), "w_up": (case.hidden, case.width), "w_down": (case.width, case.hidden)}
    shapes |= {"w_gate": shapes["w_up"]} if case.gated else {"b_up": (case.hidden,), "b_down": (case.width,)}
    leaves = {}
    for name, shape in shapes.items():
        scale = 1 / math.sqrt(shape[-1]) if name.startswith("w") else 1.0
        values = scale * torch.randn(shape, generator=generator, device=device)
        leaves[name] = values.to(case.dtype).requires_grad_()
    return leaves


def _plain(case: MLPCase, leaves: Leaves) -> Tensor:
    return reference.mlp(**leaves, activation=case.activation)


def _eager(case: MLPCase, leaves: Leaves) -> Forward:
    return lambda: _plain(case, leaves)


def _checkpoint(case: MLPCase, leaves: Leaves, *, reentrant: bool) -> Forward:
    def region(*values: Tensor) -> Tensor:
        return _plain(case, dict(zip(leaves, values, strict=True)))

    # Reentrant checkpointing carries gradients through positional tensors only.
    return lambda: checkpoint(region, *leaves.values(), use_reentrant=reentrant)


def _compiled(case: MLPCase, leaves: Leaves, *, memory_budget: float | None) -> Forward:
    """`torch.compile`, compiled here and now. Raises NotRun where the compiler fails.

    `memory_budget` is `torch._functorch.config.activation_memory_budget`: 1 keeps what the compiler likes, 0 the least.
    """
    inductor = torch._dynamo.lookup_backend("inductor")

    def with_budget(graph, inputs):
        with torch._functorch.config.patch(activation_memory_budget=memory_budget):
            return inductor(graph, inputs)

    backend = inductor if memory_budget is None else with_budget
    compiled = torch.compile(_eager(case, leaves), dynamic=False, backend=backend)
    try:
        # Every case and budget compiles the same Python function once more.
        with torch._dynamo.config.patch(recompile_limit=1000):
            output = compiled()
        torch.autograd.grad(output, list(leaves.values()), torch.randn_like(output))
    except torch._dynamo.exc.TorchDynamoException as error:
        lines = str(error).strip().splitlines()
        raise NotRun(f"torch.compile failed: {' '.join(lines[:2])}") from error
    return compiled


def _ours(options: Callable[[MLPCase], dict[str, Any]]) -> Callable[[MLPCase, Leaves], Forward]:
    """fused_remat with the options that the case asks for."""
    return lambda case, leaves: lambda: functional.mlp(**leaves, activation=case.activation, **options(case))


MLP = Operation(
    name="mlp",
    shape_help="M,D,F or gated:M,D,F (token rows, model width, hidden width)",
    cases=cases.MLP_CASES,
    quick_cases=cases.MLP_QUICK_CASES,
    parse=cases.parse_mlp,
    leaves=_leaves,
    truth=_plain,
    providers={
        EAGER: _eager,
        CHECKPOINT: lambda case, leaves: _checkpoint(case, leaves, reentrant=False),
        "checkpoint-reentrant": lambda case, leaves: _checkpoint(case, leaves, reentrant=True),
        _COMPILE: lambda case, leaves: _compiled(case, leaves, memory_budget=None),
        _COMPILE_BUDGET: lambda case, leaves: _compiled(case, leaves, memory_budget=0.0),
        OURS: _ours(lambda case: {"keep": ()}),
        f"{OURS}-keep-all": _ours(lambda case: {"keep": ("up", "gate") if case.gated else ("up",)}),
        f"{OURS}-keep-0.25": _ours(lambda case: {"keep": 0.25}),
        f"{OURS}-MF/4": _ours(lambda case: {"keep": (), "workspace": case.hidden_bytes // 4}),
        "liger": peers.liger_mlp,
        "quack": peers.quack_mlp,
    },
    slow_providers=frozenset({_COMPILE, _COMPILE_BUDGET}),
    # Its CPU code adds up a bias gradient row by row where eager adds in a tree: 20 times eager's error at 8192 rows.
    error_limits={_COMPILE: 100.0, _COMPILE_BUDGET: 100.0},
)
