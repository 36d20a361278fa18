"""MLPs that no conversion of one layer can reach: found only to say why.

A fused call replaces a method that takes x and returns the MLP's output. Where none exists, or the weights are no
linears, the report says so instead of staying silent. As in `patterns`, each of these is a function of a layer; it is
asked only when no pattern had anything to say about that layer.
"""

from __future__ import annotations

import itertools
import types

from torch import nn
from torch.nn.parameter import is_lazy

from fused_remat.convert.behaviour import activation_name, looks_like_activation
from fused_remat.convert.patterns import features, is_conv1d


def _inline(layer: nn.Module) -> str | None:
    """A block whose forward calls the linears itself, between attention, norms and sums, that `inline` cannot read."""
    linears = [name for name, child in layer._modules.items() if isinstance(child, nn.Linear) or is_conv1d(child)]
    others = [name for name, child in layer._modules.items() if name not in linears and _has_parameters(child)]
    if not others or type(layer).forward in (nn.Sequential.forward, nn.Module.forward) or not _has_activation(layer):
        return None
    for up, down in itertools.pairwise(linears):
        if features(layer._modules[up]) == features(layer._modules[down])[::-1]:
            return (
                f"its forward calls {up} and {down} between other steps ({', '.join(others)}); "
                "an MLP has to be a layer or a method of its own, or `down(dropout(act(up(x))))` in plain sight"
            )
    return None


def _spread(layer: nn.Module) -> str | None:
    """A BERT-like block that runs the halves of its MLP one by one in its forward: DeBERTa, ..."""
    halves = layer._modules.get("intermediate"), layer._modules.get("output")
    if not all(half and isinstance(half._modules.get("dense"), nn.Linear) for half in halves):
        return None
    return "its forward calls intermediate and output between other steps; no method of it computes the MLP alone"


def _convolutions(layer: nn.Module) -> str | None:
    """Two 1x1 convolutions and one activation: timm's ConvMlp, Mlp(use_conv=True), ..."""
    convolutions, acts = [], 0
    for name, child in layer._modules.items():
        if isinstance(child, nn.Conv2d) and child.kernel_size == (1, 1) and child.groups == 1:
            convolutions.append(name)
        elif child is not None and not isinstance(child, (nn.Dropout, nn.Identity)):
            acts += 1 if looks_like_activation(child) else 2
    if len(convolutions) != 2 or acts != 1:
        return None
    return f"{' and '.join(convolutions)} are convolutions; only an MLP of nn.Linear is converted"


def _experts(layer: nn.Module) -> str | None:
    """Many MLPs whose weights are stacked: Mixtral, GPT-OSS, ..."""
    own = {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}
    if any(map(is_lazy, own.values())) or any(map(_has_parameters, layer.children())):
        return None
    stacked = [name for name, parameter in own.items() if parameter.dim() == 3]
    if len(stacked) < 2:
        return None
    counts = {parameter.shape[:1] for parameter in own.values()}
    if len(counts) > 1 or counts <= {(0,), (1,)}:
        return None
    return f"its weights ({', '.join(stacked)}) are stacks of {counts.pop()[0]} matrices, one per expert"


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and next(module.parameters(), None) is not None


def _has_activation(layer: nn.Module) -> bool:
    functions = (types.FunctionType, types.BuiltinFunctionType)
    return any(
        child is not None and not isinstance(child, (nn.Identity, nn.Dropout)) and looks_like_activation(child)
        for child in layer._modules.values()
    ) or any(isinstance(value, functions) and activation_name(value) for value in vars(layer).values())


NEAR_MISSES = (_inline, _spread, _convolutions, _experts)
