"""Which modules of a model are alike: what is found out about one holds for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fused_remat.convert.rebind import RECORDS
from fused_remat.plain import PLAIN_TENSOR_TYPES, has_values

# What says where a module is, or what state it is in, instead of what it computes; and the containers of nn.Module.
PLACE = frozenset(("training", RECORDS, *vars(nn.Module())))
COUNTED = frozenset(("layer_idx", "layer_id", "gradient_checkpointing"))
VALUES = (str, int, float, bool, tuple)

_LARGEST = 1 << 24  # bytes of a buffer whose values are compared


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that differ in nothing but the values of parameters and their place in a model."""
    # transformers counts its layers for their caches; elsewhere a number of the layer may mean anything.
    place = PLACE | COUNTED if type(module).__module__.startswith("transformers.") else PLACE
    mine = {name: value for name, value in vars(module).items() if name not in place}
    own = tuple((n, repr(v) if v is None or isinstance(v, VALUES) else id(v)) for n, v in mine.items())
    parameters = tuple((n, _shape(t)) for n, t in module._parameters.items())
    buffers = tuple((n, _contents(t)) for n, t in module._buffers.items())
    children = tuple((n, None if c is None else fingerprint(c)) for n, c in module._modules.items())
    return type(module), type(module).forward, own, parameters, buffers, children


def _shape(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else "lazy" if is_lazy(tensor) else tuple(tensor.shape)


def _contents(tensor: torch.Tensor | None) -> Any:
    if tensor is None or is_lazy(tensor) or not has_values(tensor):
        return _shape(tensor)
    if type(tensor) not in PLAIN_TENSOR_TYPES or tensor.is_quantized or tensor.layout != torch.strided:
        return id(tensor)
    if tensor.nbytes > _LARGEST:  # weights of some quantised layers: they are not read to find their like
        return id(tensor)
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
    return tuple(tensor.shape), tensor.dtype, hash(flat.numpy().tobytes()) if tensor.numel() else 0
