"""The gate: no number of a provider is printed unless its output and all gradients are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.operation import EAGER, Forward, Leaves

# Allowed: twice eager's own error, plus this part of a unit in the last place of the largest true value.
_FACTOR = 2.0
_FLOOR_ULPS = 0.125

# Largest absolute error by tensor ("output", "dx", "dw_up", ...); NaN where a result has one.
Errors = Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """A tensor of a provider that is further from the truth than allowed."""

    provider: str
    tensor: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.provider}: {self.tensor} is off by {self.error:.3g}, allowed {self.allowed:.3g}"


class Gate:
    """The float64 truth of a case, output and all gradients for one random incoming gradient."""

    def __init__(self, truth: Callable[[Leaves], Tensor], leaves: Leaves):
        dtype = next(iter(leaves.values())).dtype
        double = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
        output = truth(double)
        generator = torch.Generator(output.device).manual_seed(1)
        self._leaves = leaves
        self._dout = torch.randn(output.shape, generator=generator, device=output.device).to(dtype)
        self._truth = _results(output, self._dout.double(), double)
        self._ulps = {name: torch.finfo(dtype).eps * t.abs().max().item() for name, t in self._truth.items()}

    def errors(self, forward: Forward) -> Errors:
        """How far one provider is from the truth."""
        results = _results(forward(), self._dout, self._leaves)
        return {name: (results[name].double() - true).abs().max().item() for name, true in self._truth.items()}

    def failures(self, errors: Mapping[str, Errors]) -> list[Failure]:
        """The tensors, by provider, whose error is above twice eager's plus the floor."""
        allowed = {name: _FACTOR * errors[EAGER][name] + _FLOOR_ULPS * ulp for name, ulp in self._ulps.items()}
        return [
            Failure(provider, name, own[name], most)
            for provider, own in errors.items()
            for name, most in allowed.items()
            if not own[name] <= most
        ]


def _results(output: Tensor, dout: Tensor, leaves: Leaves) -> dict[str, Tensor]:
    # Not torch.autograd.grad, which reentrant checkpointing refuses.
    output.backward(dout)
    results = {"output": output.detach()}
    for name, leaf in leaves.items():
        results[f"d{name}"], leaf.grad = leaf.grad, None
    return results
