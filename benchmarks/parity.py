"""The gate: no number is printed unless every provider's output and gradients are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.operation import EAGER, Forward, Leaves

# Errors count in units of eager's own, which is taken to be at least this part of a unit in the last place of the
# tensor's largest true value.
_LEAST_ULPS = 1 / 16
DEFAULT_LIMIT = 2.0

# Largest absolute error by tensor ("output", "dx", "dw_up", ...); NaN where a result has one.
Errors = Mapping[str, float]


@dataclass(frozen=True)
class Failure:
    """A tensor of a provider that is further from the truth than allowed, in units of eager's error."""

    provider: str
    tensor: str
    error: float
    limit: float

    def __str__(self) -> str:
        return f"{self.provider}: the error of {self.tensor} is {self.error:.3g} x eager's, allowed {self.limit:g} x"


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

    def relative(self, errors: Mapping[str, Errors]) -> dict[str, Errors]:
        """The errors of each provider, eager among them, in units of eager's."""
        units = {name: max(errors[EAGER][name], _LEAST_ULPS * ulp) for name, ulp in self._ulps.items()}
        return {provider: {name: own[name] / unit for name, unit in units.items()} for provider, own in errors.items()}


def failures(relative: Mapping[str, Errors], limits: Mapping[str, float]) -> list[Failure]:
    """What is above its provider's limit (`DEFAULT_LIMIT` unless `limits` names another), or NaN."""
    return [
        Failure(provider, name, error, limits.get(provider, DEFAULT_LIMIT))
        for provider, own in relative.items()
        for name, error in own.items()
        if not error <= limits.get(provider, DEFAULT_LIMIT)
    ]


def _results(output: Tensor, dout: Tensor, leaves: Leaves) -> dict[str, Tensor]:
    # Not torch.autograd.grad, which reentrant checkpointing refuses.
    output.backward(dout)
    results = {"output": output.detach()}
    for name, leaf in leaves.items():
        results[f"d{name}"], leaf.grad = leaf.grad, None
    return results
