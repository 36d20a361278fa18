"""Models that the planner's tests plan."""

from __future__ import annotations

from torch import Tensor, nn

MIB = 2**20


class Block(nn.Module):
    """Pre-norm residual MLP block, [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """`count` blocks in a loop."""

    def __init__(self, count: int, width: int = 64, hidden: int = 256):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
