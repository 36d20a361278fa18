"""Is this layer a norm that a fused call can apply? Answered, as in `behaviour`, by running it on a small copy."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fused_remat import reference
from fused_remat.convert.norms import FusedNorm
from fused_remat.convert.small_copy import copy_module, isolated
from fused_remat.settings import Norm

_WIDTH = 6  # of the copy that is tried
_VALUES = (str, int, float, bool, tuple, type(None))
_TOLERANCE = 1e-4  # relative; the norms of transformers compute in float32 whatever their input


def examine_norm(layer: nn.Module, parent: nn.Module) -> FusedNorm | None:
    """The record with which what reads `layer`, a child of `parent`, can apply it; None if it is no known norm."""
    names = set(layer._parameters)
    if layer._modules or layer._buffers or "forward" in vars(layer) or not names <= {"weight", "bias"}:
        return None
    if any(tensor is not None and tensor.dim() > 1 for tensor in layer._parameters.values()):
        return None
    if not any("eps" in name for name in vars(layer)):
        return None
    if _writes_in_place(type(parent)):
        return None
    with isolated():
        try:
            seen = [_observe(layer, training) for training in (True, False)]
        except Exception:  # whatever it is, it does not normalise a tensor on its own
            return None
        for record in _records(layer):
            if all(_agrees(record, layer, *observed) for observed in seen):
                return record
    return None


def _records(layer: nn.Module) -> Iterator[FusedNorm]:
    """What `layer` might be."""
    simple = {n: v for n, v in vars(layer).items() if type(v) in _VALUES and n not in vars(nn.Module())}
    offsets = (0.0, 1.0) if layer._parameters.get("weight") is not None else (0.0,)
    for form in ("layer_norm", "rms_norm"):
        for offset in offsets:
            for eps in [n for n, v in simple.items() if "eps" in n and (v is None or type(v) is float)]:
                yield FusedNorm(form, eps, offset, tuple((n, v) for n, v in simple.items() if n != eps))


def _observe(
    layer: nn.Module, training: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Tensor, ...]]:
    """x, weight, bias, what a small copy of `layer` made of them, and the gradients of x, weight and bias."""
    random = torch.Generator("cpu").manual_seed(30)
    stored = {n: None if t is None else torch.randn(_WIDTH, generator=random) for n, t in layer._parameters.items()}
    changes = {"_parameters": {n: None if t is None else t.requires_grad_() for n, t in stored.items()}}
    if hasattr(layer, "normalized_shape"):
        if len(layer.normalized_shape) != 1:
            raise ValueError("it normalises several dims")
        changes["normalized_shape"] = (_WIDTH,)
    # Rows from tiny to large, so that eps, where it is added, and clamps show.
    scales = torch.tensor([1e-3, 3e-3, 1.0, 30.0, 1e4]).view(5, 1)
    x = ((torch.randn(5, _WIDTH, generator=random) + 0.5) * scales).requires_grad_()
    made = copy_module(layer, training=training, **changes)(x)
    weight, bias = stored.get("weight"), stored.get("bias")
    leaves = [t for t in (x, weight, bias) if t is not None]
    return x, weight, bias, made, torch.autograd.grad(made, leaves, _incoming(made))


def _incoming(made: Tensor) -> Tensor:
    return torch.randn(made.shape, generator=torch.Generator("cpu").manual_seed(31), dtype=made.dtype)


def _agrees(
    record: FusedNorm,
    layer: nn.Module,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    made: Tensor,
    gradients: tuple[Tensor, ...],
) -> bool:
    if (record.form == "rms_norm" and bias is not None) or made.shape != x.shape:
        return False
    eps = getattr(layer, record.eps)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias) if t is not None]
    wide = dict(
        zip([n for n, t in (("x", x), ("weight", weight), ("bias", bias)) if t is not None], leaves, strict=True)
    )
    scaled = wide["weight"] + record.offset if "weight" in wide else None
    norm = Norm(record.form, scaled, wide.get("bias"), torch.finfo(x.dtype).eps if eps is None else eps)
    expected = reference.normalize(wide["x"], norm)
    wanted = torch.autograd.grad(expected, list(wide.values()), _incoming(made).double())
    # A row's gradient is as large as its scale is small.
    pairs = [(made, expected), *zip(gradients, wanted, strict=True)]
    return all(
        bool(((got - want).abs() <= _TOLERANCE * (1e-6 + want.abs().amax(-1, keepdim=True))).all())
        for got, want in pairs
    )


@functools.cache
def _writes_in_place(cls: type[nn.Module]) -> bool:
    """Whether forward of `cls`, or a method that it calls, changes a tensor in place, as far as sources tell.

    True where there is no source.
    """
    waiting, known = ["forward"], {"forward"}
    while waiting:
        method = getattr(cls, waiting.pop(), None)
        if not callable(method):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
        except (OSError, TypeError, SyntaxError):
            return True
        for node in ast.walk(tree):
            if _is_write(node):
                return True
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                is_method = inspect.isfunction(getattr(cls, node.attr, None)) and not hasattr(nn.Module, node.attr)
                if is_method and node.attr not in known:
                    known.add(node.attr)
                    waiting.append(node.attr)
    return False


def _is_write(node: ast.AST) -> bool:
    if isinstance(node, (ast.AugAssign, ast.Delete)):
        return True
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(target, ast.Subscript) for target in targets)
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    inplace = any(word.arg == "inplace" for word in node.keywords)
    return inplace or (name.endswith("_") and not name.endswith("__"))
