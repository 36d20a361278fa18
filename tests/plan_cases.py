"""What the tests of `plan` share: small models with more activations than parameters, steps seen from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from policy_cases import MLPBlock, llama, seeded
from torch import Tensor, nn

import fused_remat
from fused_remat.plan import Plan, plan
from fused_remat.recording import record_step
from fused_remat.training_step import make_step

WIDTH, LENGTH = 32, 128


@dataclass(frozen=True)
class Case:
    """A model, what it is called with and its loss."""

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    loss: Callable[[Any], Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of `plan`: kwargs, optimizer

    def model(self) -> nn.Module:
        return seeded(self.make)


def drawn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids(vocabulary: int = 64, length: int = LENGTH) -> Tensor:
    return torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(6))


def square(output: Any) -> Tensor:
    """The mean square of the logits."""
    return getattr(output, "logits", output).square().mean()


class Down(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Three stages down and two up, with skip connections."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([Down(3, width), Down(width, 2 * width), Down(2 * width, 4 * width)])
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([Down(4 * width, 2 * width), Down(2 * width, width)])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for i, stage in enumerate(self.down):
            x = stage(nn.functional.max_pool2d(x, 2) if i else x)
            skipped.append(x)
        for widen, stage, skip in zip(self.widen, self.up, (skipped[1], skipped[0]), strict=True):
            x = stage(torch.cat([widen(x), skip], 1))
        return self.head(nn.functional.interpolate(x, scale_factor=2.0))


class Listed(nn.Module):
    """Blocks in a ModuleList."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.Sequential(*(MLPBlock() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Scale(nn.Module):
    """The one parameter of a chain of layers without any."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def chain(depth: int = 6) -> nn.Module:
    return nn.Sequential(*(MLPBlock() for _ in range(depth)))


def vit() -> nn.Module:
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, depth=4, num_classes=10, embed_dim=48, num_heads=3
    )


def converted() -> nn.Module:
    model = chain(4)
    fused_remat.convert(model, keep=())
    return model


CASES = {
    "vit": Case(vit, (drawn(2, 3, 64, 64),)),
    "llama": Case(lambda: llama(4), (ids(),), square),
    "unet": Case(UNet, (drawn(2, 3, 32, 32),)),
    "sequential": Case(chain, (drawn(2, LENGTH, WIDTH),)),
    "list": Case(Listed, (drawn(2, LENGTH, 8),)),
    "converted": Case(converted, (drawn(2, LENGTH, WIDTH),)),
    "tied": Case(Tied, (ids(),), options={"optimizer": torch.optim.AdamW}),
}


def planned(case: Case, budget: Any, model: nn.Module | None = None, **options: Any) -> Plan:
    model = case.model() if model is None else model
    return plan(model, *case.inputs, budget=budget, loss=case.loss, **case.options | options)


def explained(decided: Plan) -> str:
    """Its table with the wrapped lines joined."""
    return decided.explain().replace("\n  ", " ")


def step_of(case: Case, model: nn.Module, **options: Any):
    return make_step(model, case.inputs, loss=case.loss, **case.options | options)


def peak_of(case: Case, model: nn.Module) -> int:
    """Of a real step, by the allocator's events."""
    return record_step(step_of(case, model)).peak_bytes


def applied(case: Case, decided: Plan) -> nn.Module:
    """A new model of the case with the plan applied."""
    model = case.model()
    decided.apply(model)
    return model


def results_of(case: Case, model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Loss and gradients of a step, and what the buffers are after it; in `dtype` if given (of a copy of the model)."""
    if dtype is not None:
        model = copy.deepcopy(model).to(dtype)
    inputs = [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in case.inputs]
    torch.manual_seed(1)
    step = make_step(model, inputs, case.options.get("kwargs"), loss=case.loss)
    found = {"loss": step.run().detach().clone()}
    found |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    step.zero_grad()
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers() if b.is_floating_point()}


def assert_stock_results(case: Case, model: nn.Module) -> None:
    """The error of `model` against float64 is at most twice that of the stock model, plus a tiny floor."""
    exact, stock = results_of(case, case.model(), torch.float64), results_of(case, case.model())
    own = results_of(case, model)
    assert own.keys() == stock.keys() == exact.keys()
    for name, value in exact.items():
        allowed = 2 * (stock[name].double() - value).abs().max() + 3e-6 * (value.abs().max() + 1e-3)
        assert (own[name].double() - value).abs().max() <= allowed, name
