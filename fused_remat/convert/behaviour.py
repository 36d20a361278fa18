"""What does this code compute? Answered by running it on a tiny copy of the layer and comparing with the reference.

Names prove little: a class with children `gate_proj`, `up_proj` and `down_proj` may clamp, scale or split. So a layer
is converted only if its own code, on a copy with linears of a few features and random weights, returns the outputs
and gradients of `fused_remat.reference.mlp`, in float64, in evaluation and in training. In the copy every dropout and
norm is a marker that scales by a factor of its own, which shows where it is applied; only the parts in question
exist, and they are called past all hooks. Nothing of the real layer runs or changes: no weight is read (it may be
large, on the meta device or sharded) and random states are untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fused_remat import reference
from fused_remat.activations import ACTIVATIONS
from fused_remat.convert.adapters import base_of
from fused_remat.convert.fused import Layout, Path, find
from fused_remat.convert.small_copy import (
    Marker,
    copy_module,
    first_line,
    isolated,
    marker_factors,
    own_tensor,
    random_linear,
    small_linear,
    twin,
)
from fused_remat.plain import held

_D, _F = 5, 7  # model and hidden width of the copy
_LARGEST = 1 << 20  # bytes of tensors that an activation may have
_TOLERANCE = 1e-10  # relative; the two GELUs differ by 5e-4
# Token rows from tiny to huge, so that a clamp or a clip shows.
_ROW_SCALES = torch.tensor([0.01, 0.3, 1.0, 3.0, 30.0, 1e4], dtype=torch.float64, device="cpu").view(2, 3, 1)


def _grid() -> Tensor:
    tail = torch.logspace(0.7, 30, 60, dtype=torch.float64, device="cpu")
    return torch.cat([torch.linspace(-4, 4, 1000, dtype=torch.float64, device="cpu"), tail, -tail])


def _values_and_slopes(act: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = _grid().requires_grad_()
    y = act(x.clone())
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@functools.cache
def _known_activations() -> dict[str, tuple[Tensor, Tensor]]:
    return {name: _values_and_slopes(act) for name, act in ACTIVATIONS.items()}


def _close(actual: Tensor, expected: Tensor, scale: Tensor | float = 1.0) -> bool:
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= _TOLERANCE * scale).all())


def activation_name(act: nn.Module | Callable[[Tensor], Tensor]) -> str | None:
    """The name in ACTIVATIONS that computes what `act` does, values and slopes, in either mode; None if there is none.

    A module with parameters, buffers or children is never an activation: its values may change.
    """
    if isinstance(act, nn.Module) and (act._parameters or act._buffers or act._modules):
        return None
    with isolated():
        known = _known_activations()
        names = list(known)
        for training in (False, True):
            try:
                probe = copy_module(act, training) if isinstance(act, nn.Module) else act
                values, slopes = _values_and_slopes(probe)
            except Exception:  # whatever an unknown callable raises, it is not a known activation
                return None
            names = [
                name
                for name in names
                if _close(values, known[name][0], known[name][0].abs().clamp(min=1.0))
                and _close(slopes, known[name][1], known[name][1].abs().clamp(min=1.0))
            ]
        return names[0] if names else None


def overwrites_input(act: nn.Module) -> bool:
    """Whether the activation `act` writes its result into what it is given."""
    with isolated():
        x = _grid()
        copy_module(act, training=True)(x)
        return not torch.equal(x, _grid())


def looks_like_activation(module: nn.Module) -> bool:
    """Whether `module` could be an activation, known or not: a leaf that maps any tensor to one of the same shape."""
    if module._modules:
        return False
    if type(module).__module__ == "torch.nn.modules.activation":
        return not isinstance(module, (nn.GLU, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d))
    return _width_out(module) == _grid().numel()


def looks_like_glu(module: nn.Module) -> bool:
    """Whether `module` could make gate and up of its input and multiply them: it halves any tensor's last dim.

    It may have an activation as a child, and has no tensors of its own.
    """
    if module._parameters or module._buffers or not all(map(looks_like_activation, module.children())):
        return False
    return 2 * _width_out(module) == _grid().numel()


def _width_out(module: nn.Module) -> int:
    """Features that a copy of `module` and its children makes of a 1-dim tensor; 0 if it needs something else."""
    with isolated():
        try:
            children = {name: child and _copy_of_small(child, False) for name, child in module._modules.items()}
            y = _copy_of_small(module, False, _modules=children)(_grid())
            return y.numel() if y.dim() == 1 else 0
        except Exception:  # needs other arguments or shapes
            return 0


def _copy_of_small(module: nn.Module, training: bool, **changes: Any) -> nn.Module:
    """A copy of an activation or its like that shares no tensor with it.

    Raises ValueError where its tensors are larger than those of an activation.
    """
    tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if sum(t.nbytes for t in tensors) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes of tensors of its own")
    own = {name: None if t is None else own_tensor(t) for name, t in module._parameters.items()}
    return copy_module(module, training, _parameters=own, **changes)


@dataclass(frozen=True)
class Observation:
    """One run of a layer's code on a small copy: what went in, what came out, in one mode."""

    mode: str  # "in evaluation" or "in training"
    weights: dict[Path, tuple[Tensor, Tensor | None]]  # [weight, bias] of each linear, float64
    factors: dict[Path, float]  # of each marker
    x: Tensor  # [2, 3, D] float64
    dout: Tensor  # [2, 3, D] float64
    y: Tensor
    gradients: tuple[Tensor | None, ...]  # of x and the weights, for dout

    @property
    def inputs(self) -> list[Tensor]:
        return _differentiable(self.x, self.weights)


def observe(layer: nn.Module, layout: Layout, linear: type[nn.Module]) -> list[Observation] | str:
    """What the code of `layer` computes in evaluation and in training, or why it does not run on a small copy.

    Of `layout` only the set of parts matters, which linear is the last, and whether the first is packed; so one
    observation serves all layouts that agree in these. `linear` is the class of the linears.
    """
    observations = []
    with isolated():
        for training in (False, True):
            mode = "in training" if training else "in evaluation"
            try:
                observations.append(_observe_either(layer, layout, linear, training, mode))
            except Exception as error:  # the layer's code may raise anything when it is not an MLP
                return f"its {layout.method} fails {mode} on a small copy: {first_line(error)}"
    return observations


def computes_tokens_apart(observations: list[Observation]) -> bool:
    """Whether the code is like any MLP: not linear, each token row a function of that row alone, every linear used."""
    seen = observations[0]
    if any(gradient is None for gradient in seen.gradients) or seen.y.shape != seen.x.shape:
        return False
    with isolated():
        slopes = []
        for at in ((0, 1), (1, 0)):
            gradient = torch.autograd.grad(seen.y[at].sum(), seen.x, retain_graph=True)[0]
            slopes.append(gradient[at])
            if torch.count_nonzero(gradient) != torch.count_nonzero(gradient[at]):
                return False
        return not _close(*slopes)


def why_not_mlp(layout: Layout, observations: list[Observation]) -> str | None:
    """Why what was observed is not the MLP that `layout` describes; None if it is."""
    with isolated():
        for seen in observations:
            expected = _expected(layout, seen)
            what = f"its {layout.method} computes something else {seen.mode}"
            if not _close(seen.y, expected, 1.0 + expected.abs().amax(-1, keepdim=True)):
                return f"{what}: outputs differ"
            wanted = torch.autograd.grad(expected, seen.inputs, seen.dout)
            for got, want in zip(seen.gradients, wanted, strict=True):
                if got is None or not _close(got, want, 1.0 + want.abs().amax(-1, keepdim=True)):
                    return f"{what}: gradients differ"
    return None


def _observe_either(
    layer: nn.Module, layout: Layout, linear: type[nn.Module], training: bool, mode: str
) -> Observation:
    """With the attributes that the layer has; if that fails, with the widths among them as they are in the copy."""
    try:
        return _observe(layer, layout, linear, training, mode)
    except Exception:
        widths = _widths(layer, layout, linear)
        resized = {name: widths[n] for name, n in vars(layer).items() if type(n) is int and n in widths}
        if not resized:
            raise
        return _observe(copy_module(layer, training, **resized), layout, linear, training, mode)


def _widths(layer: nn.Module, layout: Layout, linear: type[nn.Module]) -> dict[int, int]:
    """The layer's own widths, and those of the copy; nothing where two of them cannot be told apart."""
    pairs = []
    for path, sizes in ((layout.up, (2 * _F if layout.packed else _F, _D)), (layout.down, (_D, _F))):
        weight = held(base_of(find(layer, path)), "weight")
        if not isinstance(weight, Tensor) or is_lazy(weight) or weight.dim() != 2:
            return {}
        pairs += zip(weight.shape if linear is nn.Linear else weight.shape[::-1], sizes, strict=True)
    return dict(pairs) if len(dict(pairs)) == len(set(pairs)) else {}


def _observe(layer: nn.Module, layout: Layout, linear: type[nn.Module], training: bool, mode: str) -> Observation:
    random = torch.Generator("cpu").manual_seed(20)
    up_shape = (2 * _F if layout.packed else _F, _D)
    weights = {
        path: random_linear((_D, _F) if path == layout.down else up_shape, _is_biased(find(layer, path)), random)
        for path in sorted(layout.linears)
    }
    around = {path for path in (layout.dropout, *layout.before, *layout.after, layout.norm) if path}
    factors = marker_factors(around)
    parts: dict[Path, Any] = {path: Marker(factor) for path, factor in factors.items()}
    parts |= {path: small_linear(linear, *weights[path], training) for path in layout.linears}
    for path in (layout.act, *layout.through):
        part = find(layer, path) if path else None
        if part is not None and not part._modules:
            parts[path] = _copy_of_small(part, training)

    x = torch.randn(2, 3, _D, generator=random, dtype=torch.float64) * _ROW_SCALES
    dout = torch.randn(2, 3, _D, generator=random, dtype=torch.float64)
    x.requires_grad_()
    y = getattr(type(layer), layout.method)(twin(layer, parts, training), x)
    if not isinstance(y, Tensor):
        raise TypeError(f"it returns a {type(y).__name__} instead of a tensor")
    gradients = torch.autograd.grad(y, _differentiable(x, weights), dout, retain_graph=True, allow_unused=True)
    return Observation(mode, weights, factors, x, dout, y, gradients)


def _differentiable(x: Tensor, weights: dict[Path, tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    return [x, *[tensor for pair in weights.values() for tensor in pair if tensor is not None]]


def _is_biased(linear: nn.Module) -> bool:
    return held(base_of(linear), "bias", linear) is not None


def _expected(layout: Layout, seen: Observation) -> Tensor:
    w_up, b_up = seen.weights[layout.up]
    w_down, b_down = seen.weights[layout.down]
    w_gate, b_gate = seen.weights[layout.gate] if layout.gate else (None, None)
    if layout.packed:
        w_gate, w_up = layout.gate_and_up(w_up)
        b_gate, b_up = (None, None) if b_up is None else layout.gate_and_up(b_up)
    x = seen.x
    for path in layout.before:
        x = x * seen.factors[path]
    scaled_down = w_down * seen.factors.get(layout.dropout, 1.0)
    y = reference.mlp(x, w_up, scaled_down, b_up, b_down, w_gate=w_gate, b_gate=b_gate, activation=layout.activation)
    for path in layout.after:
        y = y * seen.factors[path]
    return (y + x) * seen.factors[layout.norm] if layout.norm else y
