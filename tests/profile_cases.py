"""Models whose kept bytes and lines are known, and what profiling must leave as it was."""

from __future__ import annotations

import inspect
import random

import numpy
import torch
from torch import nn


class Chain(nn.Module):
    """Linear, GELU, product, ReLU, Linear; every comment "keeps" names what its line keeps."""

    def __init__(self, width: int = 16, hidden: int = 64):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        hidden = nn.functional.gelu(up)  # keeps: up
        gated = hidden * up  # keeps: hidden
        active = gated.relu()  # keeps: active
        return self.down(active)


class Attention(nn.Module):
    """Attention that keeps its probabilities, as `need_weights=True` does."""

    def __init__(self, width: int = 16, heads: int = 4):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT).softmax(-1)  # keeps: weights
        return (weights @ v).transpose(1, 2).flatten(2)


class Tower(nn.Module):
    """Equal blocks, one after the other."""

    def __init__(self, depth: int = 4, width: int = 16):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def line_that_keeps(cls: type, what: str) -> str:
    """ "file.py:line" of the line of `cls` with the comment "keeps: what"."""
    lines, first = inspect.getsourcelines(cls)
    (number,) = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# keeps: {what}")]
    return f"profile_cases.py:{number}"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, *inputs: torch.Tensor) -> dict[str, object]:
    """Everything that profiling must give back: values as bytes, objects by identity."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {} if optimizer is None else optimizer.state
    return {
        "values": {name: _raw(t) for name, t in named.items()},
        "objects": {name: id(t) for name, t in named.items()},
        "grads": {name: (id(p.grad), _raw(p.grad)) for name, p in model.named_parameters()},
        "inputs": [(_raw(t), id(t.grad), t.requires_grad) for t in inputs],
        "modes": [(type(m), m.training, sorted(vars(m))) for m in model.modules()],
        "optimizer": [(id(p), {k: _raw(v) for k, v in own.items()}) for p, own in state.items()],
        "random": (torch.random.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
    }


def _raw(value: object) -> object:
    return value.detach().contiguous().view(-1).view(torch.uint8).tolist() if isinstance(value, torch.Tensor) else value
