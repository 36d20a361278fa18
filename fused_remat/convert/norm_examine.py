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
from fused_remat.convert.behaviour import copy_module, isolated
from fused_remat.convert.norms import FusedNorm
from fused_remat.convert.rebind import original_class
from fused_remat.settings import Norm

_WIDTH = 6  # of the copy that is tried
_TOLERANCE = 1e-5  # relative; the norms of transformers compute in float32 whatever their input


def examine_norm(layer: nn.Module, parent: nn.Module) -> FusedNorm | None:
    """The record with which what reads `layer`, a child of `parent`, can apply it; None if it is no known norm."""
    names, cls = set(layer._parameters), original_class(layer)
    if layer._modules or layer._buffers or "forward" in vars(layer) or not names <= {"weight", "bias"}:
        return None
    if any(tensor is not None and tensor.dim() > 1 for tensor in layer._parameters.values()):
        return None
    if not any(word in cls.__name__.lower() for word in ("norm", "rms")):  # for speed: most leaves are none
        return None
    with isolated():
        try:
            x, weight, bias, made = _observe(layer)
        except Exception:  # whatever it is, it does not normalise a tensor on its own
            return None
        for record in _records(layer, _writes_in_place(type(parent))):
            if _agrees(record, layer, x, weight, bias, made):
                return record
    return None


def _records(layer: nn.Module, writes_in_place: bool) -> Iterator[FusedNorm]:
    """What `layer` might be."""
    eps = [n for n, v in vars(layer).items() if "eps" in n and (v is None or (type(v) is float and v >= 0.0))]
    offsets = (0.0, 1.0) if layer._parameters.get("weight") is not None else (0.0,)
    for form in ("layer_norm", "rms_norm"):
        for offset in offsets:
            for name in eps:
                yield FusedNorm(form, name, offset, writes_in_place)


def _observe(layer: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    random = torch.Generator("cpu").manual_seed(30)
    stored = {n: None if t is None else torch.randn(_WIDTH, generator=random) for n, t in layer._parameters.items()}
    changes = {"_parameters": stored}
    if hasattr(layer, "normalized_shape"):
        if len(layer.normalized_shape) != 1:
            raise ValueError("it normalises several dims")
        changes["normalized_shape"] = (_WIDTH,)
    # Rows from tiny to large, so that eps and where it is added show.
    scales = torch.tensor([1e-3, 3e-3, 1.0, 30.0]).view(4, 1)
    x = (torch.randn(4, _WIDTH, generator=random) + 0.5) * scales
    return x, stored.get("weight"), stored.get("bias"), copy_module(layer, training=True, **changes)(x)


def _agrees(
    record: FusedNorm, layer: nn.Module, x: Tensor, weight: Tensor | None, bias: Tensor | None, made: Tensor
) -> bool:
    if record.form == "rms_norm" and bias is not None:
        return False
    eps = getattr(layer, record.eps)
    weight = None if weight is None else weight + record.offset
    norm = Norm(record.form, weight, bias, torch.finfo(x.dtype).eps if eps is None else eps)
    expected = reference.normalize(x.double(), _double(norm))
    return made.shape == x.shape and bool(((made - expected).abs() <= _TOLERANCE * (1 + expected.abs())).all())


def _double(norm: Norm) -> Norm:
    weight, bias = (None if t is None else t.double() for t in (norm.weight, norm.bias))
    return Norm(norm.kind, weight, bias, norm.eps)


@functools.cache
def _writes_in_place(cls: type[nn.Module]) -> bool:
    """Whether the code of `cls`, as far as its source tells, changes any tensor in place; True if there is none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, (ast.AugAssign, ast.Delete)):
            return True
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Subscript) for target in targets):
                return True
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if name.endswith("_") and not name.endswith("__"):
            return True
    return False
