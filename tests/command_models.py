"""Models that the command line finds as `command_models:name`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fused_remat


class Blocks(nn.Module):
    """`depth` MLP blocks with residuals, of width `width`."""

    def __init__(self, width: int = 32, depth: int = 4):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Broken(nn.Linear):
    """Its forward raises."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the sensor is unplugged")


class Missing(nn.Linear):
    """Its forward looks for what is not there."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("x")


class Quits(Missing):
    """Its forward ends the process, as if all were well."""

    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(0)


class _Drift(nn.Linear):
    """Computes with another number each time, out of the guards' sight."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.numbers = _Numbers()

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).exp() * self.numbers.following()).sin()


class _Numbers:
    __module__ = "torch"
    last = 0.0

    def following(self) -> float:
        self.last += 1.0
        return self.last


class Drifting(nn.Sequential):
    """Four such blocks."""

    def __init__(self) -> None:
        super().__init__(*(_Drift() for _ in range(4)))


def hooked() -> nn.Module:
    """Converted, and then given a hook, with which a layer runs its own code."""
    model = Blocks()
    fused_remat.convert(model)
    model.blocks[1][1].register_forward_hook(lambda module, args, output: None)
    return model


def absolute(output: Tensor) -> Tensor:
    return output.abs().sum()


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def batch(model: nn.Module, step: int) -> tuple[Tensor]:
    return (torch.randn(64, 32),)
