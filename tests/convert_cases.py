"""What the tests of modules and conversion share: counting fused calls, one step of a model, comparing two steps."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fused_remat import functional


@contextlib.contextmanager
def fused_calls() -> Iterator[list[str]]:
    """Collects the activation of every call of `functional.mlp`, so that a test sees which path ran."""
    calls: list[str] = []
    original = functional.mlp

    def counted(*args, activation="gelu", **kwargs):
        calls.append(activation)
        return original(*args, activation=activation, **kwargs)

    functional.mlp = counted
    try:
        yield calls
    finally:
        functional.mlp = original


@contextlib.contextmanager
def fused_attentions() -> Iterator[list[str]]:
    """Collects the kind of the folded norm, or "", of every call of `functional.multi_head_attention`."""
    calls: list[str] = []
    original = functional.multi_head_attention

    def counted(*args, norm=None, **kwargs):
        calls.append("" if norm is None else norm.kind)
        return original(*args, norm=norm, **kwargs)

    functional.multi_head_attention = counted
    try:
        yield calls
    finally:
        functional.multi_head_attention = original


def step(model: nn.Module, *inputs: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward with a random incoming gradient."""
    for parameter in model.parameters():
        parameter.grad = None
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    out = model(*inputs)
    out = out if isinstance(out, Tensor) else out[0]
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    out.backward(dout)
    results = {"output": out.detach()}
    results |= {f"dx{i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
    results |= {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return results


def kept_shapes(
    model: Callable[[Tensor], Tensor], x: Tensor, owner: nn.Module | None = None
) -> list[tuple[tuple[int, ...], int]]:
    """(shape, storage bytes) of each distinct non-empty storage kept for backward that is no parameter's of `owner`.

    `owner` is the model itself if None.
    """
    parameters = {p.untyped_storage().data_ptr() for p in (owner or model).parameters()}
    kept: dict[int, tuple[tuple[int, ...], int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (tuple(tensor.shape), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad
    return sorted(kept.values())


class _Packed:
    """What backward gets its tensor back from; it dies with the node that holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(model: nn.Module, *inputs: Tensor, owner: nn.Module | None = None, **options) -> int:
    """Bytes of the distinct storages that backward still holds once forward is over, parameters of `owner` apart.

    `owner` is the model itself if None. Unlike `kept_shapes`, what forward itself lets go of does not count.
    """
    parameters = {p.untyped_storage().data_ptr() for p in (owner or model).parameters()}
    packed: weakref.WeakSet[_Packed] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Packed:
        packed.add(holder := _Packed(tensor))
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        out = model(*inputs, **options)
    storages = {holder.tensor.untyped_storage() for holder in packed}
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert (out if isinstance(out, Tensor) else out[0]).requires_grad
    return sum(nbytes for pointer, nbytes in kept.items() if pointer not in parameters)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within `tolerance` of the largest element of the expected one, which is not all zero."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name] - want).abs().max().item()
        scale = want.abs().max().item()
        # A gradient that is zero in theory (a key bias under softmax) is rounding noise in both.
        assert error <= tolerance * max(scale, 1e-3), f"{name}: {error:.2e} of {scale:.2e}"


def randomize(model: nn.Module, seed: int = 1) -> nn.Module:
    """Random values, far from any initialisation, in every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


class Plain(nn.Module):
    """timm's child names."""

    def __init__(self, drop: float = 0.0, width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, width)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x))))))


class Gated(nn.Module):
    """Llama's child names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(6, 10, bias=False)
        self.up_proj = nn.Linear(6, 10, bias=False)
        self.down_proj = nn.Linear(10, 6, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.0), nn.Linear(10, 6), nn.Dropout(0.0))


def net() -> nn.Module:
    """A residual chain of the three kinds, with names that differ from the classes'."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 6)
            self.a, self.b, self.c = Plain(), Gated(), sequential()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in (self.a, self.b, self.c):
                x = x + layer(x)
            return x

    return randomize(Net())


class LowRank(nn.Module):
    """An adapter of the common kind: `base(x) + up(down(x))`, with a non-zero second matrix."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.b = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class ScaledLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class TwoLinear(nn.Module):
    """A hand-written MLP whose activation is a function in `forward`."""

    def __init__(self, act: Callable[[Tensor], Tensor], width: int = 6, hidden: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden, dtype=torch.float64)
        self.second = nn.Linear(hidden, width, dtype=torch.float64)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class Layer(nn.Module):
    """Parts by name and a forward given as a function, to write many layers in a line each."""

    def __init__(self, code, **parts) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        # An own class per layer: conversion reads the class's forward, as in real code.
        self.__class__ = type("Layer", (Layer,), {"forward": code})


def up() -> nn.Linear:
    return nn.Linear(6, 10)


def down() -> nn.Linear:
    return nn.Linear(10, 6)


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """`model` and an untouched copy of it."""
    return model, copy.deepcopy(model)
