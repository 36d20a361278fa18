"""Does this code compute attention as a layout says? Answered by running it on a small copy of the layer.

As in `behaviour`: names prove little, so the layer's own code runs in float64 on a copy with random weights, and what
it returns, with its gradients, has to be what `fused_remat.reference.multi_head_attention` gives. The copy keeps the
layer's heads and settings and shrinks the width of its input. Each scenario below is one call: without a mask, with
one, with other keys, with attention weights dropped, and so on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat import reference
from fused_remat.convert.adapters import base_of
from fused_remat.convert.attention_call import (
    CAUSAL,
    NO_BIAS,
    ROLES,
    implementation,
    inputs_of,
    mask_feature,
    parameter_names,
    required_names,
)
from fused_remat.convert.attention_judge import Observation, Recording, Scenario, leaves_of, why_not_attention
from fused_remat.convert.attention_layer import prefix
from fused_remat.convert.attention_layout import AttentionLayout
from fused_remat.convert.fused import Path, find
from fused_remat.convert.norms import FusedNorm
from fused_remat.convert.patterns import features, is_linear_like
from fused_remat.convert.small_copy import (
    Marker,
    Tensors,
    copy_module,
    first_line,
    isolated,
    marker_factors,
    random_linear,
    small_linear,
    twin,
)
from fused_remat.plain import has_values, held
from fused_remat.settings import Norm

_SMALL = 8  # input width of the copy
_LARGEST = 1 << 22  # elements of a weight that is still copied at its own input width
_BATCH, _KEYS = 2, 7
_FAR_WORDS = ("window", "chunk", "local", "block")
LONGEST = 260  # tokens that a copy is tried on, where it takes as many
_SHORTER = (128, 64, 40, 16)


# What every layer has to pass, alone or with other keys.
BASE = (
    Scenario("in evaluation"),
    Scenario("in training", training=True),
    Scenario("for a longer and larger input", length=LONGEST),
    Scenario("where attention weights are dropped", training=True, dropped=True),
)
# What a call may use once the layer has passed it.
FEATURES = (
    *(Scenario(mask_feature(kind, dims), True, mask=(kind, dims)) for dims in (4, 3, 2) for kind in ("float", "bool")),
    Scenario(CAUSAL, causal=True),
    Scenario(NO_BIAS, biased=False),
)


def returns_of(result: Any, heads: int, bias: Tensor | None) -> tuple[str, Tensor]:
    """The form of what forward returned, and y. Raises TypeError for a form that is not known."""
    if isinstance(result, Tensor):
        return "y", result
    if isinstance(result, tuple) and 2 <= len(result) <= 3 and isinstance(result[0], Tensor):
        last = result[-1]
        is_weights = isinstance(last, Tensor) and last.dim() == 4 and last.shape[1] == heads
        is_bias = len(result) == 2 or (result[1] is bias if bias is not None else result[1].dim() == 4)
        if (last is None or is_weights) and is_bias:
            return ("y, weights" if len(result) == 2 else "y, bias, weights"), result[0]
    raise TypeError("it returns something else than y, (y, weights) or (y, bias, weights)")


def _forbid_weights(result: Any) -> None:
    """Raises TypeError where weights are returned that a fused call would not make."""
    if isinstance(result, tuple) and result[-1] is not None:
        raise TypeError("it returns attention weights, which a fused call does not make")


class Probe:
    """Tries layouts of one layer; what does not depend on the layout is run once."""

    def __init__(self, layer: nn.Module, linear: type[nn.Module], norms: tuple[FusedNorm, ...]) -> None:
        self.layer, self.linear, self.norms = layer, linear, norms
        self._seen: dict[tuple[Any, ...], Observation | str] = {}

    def why_not(self, layout: AttentionLayout, scenario: Scenario) -> str | None:
        """Why the code of the layer does something else than `layout` says in this scenario; None if it does it."""
        seen = self.observe(layout, scenario)
        if isinstance(seen, str):
            return seen
        with isolated():
            try:
                return why_not_attention(layout, seen)
            except Exception as error:  # a method of the layer that makes its bias may raise anything
                return f"its bias cannot be made: {str(error) or type(error).__name__}"

    def observe(self, layout: AttentionLayout, scenario: Scenario) -> Observation | str:
        """What the code of the layer computes, or why it does not run on a small copy.

        Of `layout` only the parts and `dropout` matter.
        """
        key = (layout.q, layout.k, layout.v, layout.out, layout.dropout, scenario)
        if key not in self._seen:
            self._seen[key] = self._observe(layout, scenario)
        return self._seen[key]

    def _observe(self, layout: AttentionLayout, scenario: Scenario) -> Observation | str:
        reason = "it is too wide to be tried on a copy"
        # A table of positions or a mask of its own may end before the longest input.
        lengths = (scenario.length, *_SHORTER) if _is_long(scenario) else (scenario.length,)
        for d in dict.fromkeys((_SMALL, features(base_of(find(self.layer, layout.q)))[0])):
            if d * max(features(base_of(find(self.layer, path)))[1] for path in layout.linears) > _LARGEST:
                continue
            for length in lengths:
                tried = replace(scenario, length=length)
                with isolated():
                    try:
                        return _observe(self.layer, layout, self.linear, self.norms, d, tried)
                    except Exception as error:  # the layer's code may raise anything when it is no attention
                        reason = f"its forward fails on a small copy: {first_line(error)}"
        return reason


def _is_long(scenario: Scenario) -> bool:
    return scenario.length > _KEYS


def takes(layer: nn.Module, *roles: str) -> bool:
    """Whether the forward of `layer` has an argument of one of these roles."""
    return any(role in roles for role in _roles(layer).values())


def longest_attribute(layer: nn.Module, core: nn.Module) -> tuple[str, int]:
    """The attribute that may say how far the layer sees, with its value; ("", 0) if there is none."""
    numbers = {n: v for module in (core, layer) for n, v in vars(module).items() if type(v) is int}
    named = {n: v for n, v in numbers.items() if any(word in n for word in _FAR_WORDS)}
    return max(named.items(), key=lambda item: item[1], default=("", 0))


def _roles(layer: nn.Module) -> dict[str, str]:
    names = parameter_names(type(layer))
    return {name: "x" if name == names[0] else ROLES.get(name, "") for name in names}


def _observe(
    layer: nn.Module,
    layout: AttentionLayout,
    linear: type[nn.Module],
    norms: tuple[FusedNorm, ...],
    d: int,
    scenario: Scenario,
) -> Observation:
    random = torch.Generator("cpu").manual_seed(21)
    around = [path for path in (*layout.after, layout.norm) if path]
    factors = marker_factors(around)
    parts: dict[Path, Any] = {path: Marker(factor) for path, factor in factors.items()}
    for path in layout.linears:
        rows_in, rows_out = features(base_of(find(layer, path)))
        shape = (d, rows_in) if path == layout.out else (rows_out, d)
        scale = _large(layout).get(path, 1.0) if _is_long(scenario) else 1.0
        is_biased = held(base_of(find(layer, path)), "bias") is not None
        parts[path] = small_linear(linear, *random_linear(shape, is_biased, random, scale), scenario.training)
    for path, norm in zip((layout.q_norm, layout.k_norm), norms, strict=False):
        parts[path] = _exact_norm(norm, find(layer, path), random)
    recorded = parts[layout.out] = Recording(parts[layout.out])
    copy = twin(layer, parts, scenario.training, tensors=_own_tensors, brings=_brings)
    _set_dropout(copy, layout, 0.5 if scenario.dropped else 0.0)
    call = _arguments(layer, layout, d, scenario, random)
    x = call[parameter_names(type(layer))[0]].requires_grad_()
    before = {path: set(vars(find(copy, path))) for path in ((), layout.core)}
    torch.manual_seed(22)
    values = {_roles(layer)[name]: value for name, value in call.items() if value is not None}
    bias = values.get("bias")
    result = type(layer).forward(copy, **call)
    if implementation(layer, layout.core) is None:  # transformers asks for weights when it wants them
        _forbid_weights(result)
    returns, y = returns_of(result, layout.num_heads, bias if scenario.biased else None)
    if any(set(vars(find(copy, path))) != names for path, names in before.items()):
        raise TypeError("it stores something on itself")
    dout = torch.randn(y.shape, generator=random, dtype=torch.float64)
    gradients = torch.autograd.grad(y, [x, *leaves_of(copy, layout)], dout, allow_unused=True)
    inputs = inputs_of(values, prefix(copy, layout))
    if isinstance(inputs, str):
        raise TypeError(inputs)
    return Observation(scenario, copy, inputs, returns, dout, y, gradients, factors, recorded.given)


def _brings(child: nn.Module) -> bool:
    return not child._modules and not is_linear_like(child)


def _own_tensors(module: nn.Module) -> Tensors:
    parameters = {name: t if t is None else _made_anew(t) for name, t in module._parameters.items()}
    buffers = {name: t if t is None else _as_it_is(t) for name, t in module._buffers.items()}
    return {"_parameters": parameters, "_buffers": buffers}


def _made_anew(tensor: Tensor) -> Tensor:
    return torch.linspace(-1, 1, tensor.numel(), dtype=torch.float64).view(tensor.shape)


def _as_it_is(tensor: Tensor) -> Tensor:
    """A buffer's own values, where it has any: a table or a mask says what the code does."""
    if not has_values(tensor):
        return _made_anew(tensor)
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", dtype, copy=True)


def _large(layout: AttentionLayout) -> dict[Path, float]:
    """Factors that make q and v large, for clamps to show, and scores not."""
    return {} if layout.packing else {layout.q: 1e3, layout.k: 1e-3, layout.v: 1e4}


def _exact_norm(record: FusedNorm, norm: nn.Module, random: torch.Generator) -> nn.Module:
    """A norm over a head as precise as float64: those of transformers compute in float32."""
    made = record.norm(norm, torch.float64)
    weight = torch.randn(norm.weight.shape, generator=random, dtype=torch.float64)
    return _ExactNorm(Norm(made.kind, weight, None, made.eps))


class _ExactNorm(nn.Module):
    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return reference.normalize(x, self.norm)


def _set_dropout(copy: nn.Module, layout: AttentionLayout, p: float) -> None:
    """Sets the probability for attention weights, wherever the copy holds it."""
    if layout.dropout:
        owner, name = find(copy, layout.dropout[:-1]), layout.dropout[-1]
        holder = getattr(owner, name)
        if isinstance(holder, nn.Dropout):
            owner._modules[name] = copy_module(holder, copy.training, p=p)
        else:
            owner.__dict__[name] = p


def _arguments(
    layer: nn.Module, layout: AttentionLayout, d: int, scenario: Scenario, random: torch.Generator
) -> dict[str, Any]:
    """Random arguments by name for what the forward takes."""
    core = find(layer, layout.core)
    width = features(base_of(find(layer, layout.out)))[0] // layout.num_heads
    length = getattr(core, "window_area", scenario.length)
    keys = _KEYS if scenario.crossed else length
    unrotated = prefix(layer, layout)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    rotated = getattr(core, "rotary_ndims", width)
    angles = 3 * normal(1, length, rotated // 2)
    angles = torch.cat((angles, angles), dim=-1)
    timms = angles[0, unrotated:]

    def tokens(count: int) -> Tensor:
        # Where weights are dropped, one token over and over: see _why_not_dropped.
        return normal(1, 1, d).repeat(_BATCH, count, 1) if scenario.dropped else normal(_BATCH, count, d)

    made = {
        "x": tokens(length),
        "keys": tokens(keys) if scenario.crossed else None,
        "mask": _mask(scenario, length, keys, normal),
        "keys_mask": _mask(scenario, length, keys, normal),
        "rotary": None if scenario.crossed else (angles.cos(), angles.sin()),
        "rope": torch.cat((timms.sin(), timms.cos()), dim=-1),
        "bias": normal(1, layout.num_heads, length, keys) if scenario.biased else None,
        "causal": True if scenario.causal else None,
    }
    required = required_names(type(layer))
    given = {name: made.get(role) for name, role in _roles(layer).items()}
    return {name: value for name, value in given.items() if value is not None or name in required}


def _mask(scenario: Scenario, length: int, keys: int, normal: Any) -> Tensor | None:
    """Random, of the scenario's form; a bool one lets every query see something."""
    if scenario.mask is None:
        return None
    kind, dims = scenario.mask
    mask = normal(*{4: (_BATCH, 1, length, keys), 3: (_BATCH, length, keys), 2: (length, keys)}[dims])
    return mask if kind == "float" else (mask > 0).index_fill(-1, torch.tensor([0]), True)
