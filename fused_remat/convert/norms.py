"""Pre-norms: a fused call applies the norm whose result it reads, so that the residual stream alone is kept.

No block's code is rewritten. A converted norm does its work as ever and leaves a note on its result: which tensor it
read, and how it normalised it. A fused layer that is handed such a result computes from the tensor in the note, norm
included; the result and what autograd kept for it are freed when the block lets go of them. Whatever comes between (a
hook that returns something else, a cast, a write in place, other arithmetic) makes a tensor without a valid note, and
then the layer reads what it was handed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fused_remat import last_calls
from fused_remat.convert.rebind import is_fused_class
from fused_remat.plain import PLAIN_TENSOR_TYPES, is_plain_input, why_watched
from fused_remat.settings import Norm

_NOTE = "_fused_remat_norm"  # on the result of a converted norm, while it is traced
# Elsewhere notes lie beside the results, which go their own ways (to a file, to another process) without them.
_notes = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class FusedNorm:
    """How a norm can be applied by what reads it."""

    form: str  # a kind of `fused_remat.Norm`
    eps: str  # the attribute that holds it
    offset: float = 0.0  # added to the weight: 1 where the stored weight is its distance from one (Gemma)
    settings: tuple[tuple[str, Any], ...] = ()  # the norm's other attributes, compared at every call
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "norm"
    takes_norm: ClassVar[bool] = False

    def describe(self) -> str:
        return f"{self.form}, applied by the fused layers that read it"

    def run(self, layer: nn.Module, stock: Callable[[], Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        result = stock()
        if torch.is_grad_enabled() and len(args) + len(kwargs) == 1:
            (x,) = args or kwargs.values()
            if self._can_be_redone(layer, x, result):
                note = _Note(layer, self, x, result)
                if torch.compiler.is_compiling():
                    setattr(result, _NOTE, note)
                else:
                    _notes[result] = note
                    last_calls.note_fused(layer, x)
                return result
            last_calls.note_own(layer, "its input, its result or its weight is not what a fused layer could normalise")
        return result

    def _can_be_redone(self, layer: nn.Module, x: Tensor, result: Tensor) -> bool:
        if any(getattr(layer, name, None) != value for name, value in self.settings):
            return False
        if not is_fused_class(type(layer)):  # made anew on top of the fused class: parametrised, sharded
            return False
        if not (is_plain_input(x) and is_plain_input(result) and result.requires_grad and result.dtype == x.dtype):
            return False
        tensors = [tensor for tensor in layer._parameters.values() if tensor is not None]
        return all(type(tensor) in PLAIN_TENSOR_TYPES and tensor.dtype == x.dtype for tensor in tensors)

    def norm(self, layer: nn.Module, dtype: torch.dtype) -> Norm:
        """What `layer` does to a tensor of `dtype`."""
        weight, eps = layer._parameters.get("weight"), getattr(layer, self.eps)
        if weight is not None and self.offset:
            weight = weight + self.offset
        return Norm(self.form, weight, layer._parameters.get("bias"), torch.finfo(dtype).eps if eps is None else eps)


class _Note:
    """Who made a result from what, and how to see that both are still what they were."""

    def __init__(self, layer: nn.Module, record: FusedNorm, x: Tensor, result: Tensor) -> None:
        self.layer, self.record, self.x = layer, record, x
        self.weight = layer._parameters.get("weight")
        # A tracer knows no versions. (No norm is converted whose caller, as far as its source tells, writes in place.)
        self.versions = None if torch.compiler.is_compiling() else (x._version, result._version)

    def holds(self, result: Tensor) -> bool:
        if self.layer._parameters.get("weight") is not self.weight or why_watched() is not None:
            return False
        if self.versions is None or torch.compiler.is_compiling():
            return True
        observed = result._backward_hooks or result.retains_grad
        return not observed and self.versions == (self.x._version, result._version)


def forget(x: Tensor) -> None:
    """Whatever reads `x` from now on reads its values, and no norm's input: nothing else may be left of it later."""
    if torch.compiler.is_compiling():
        setattr(x, _NOTE, None)
    else:
        _notes.pop(x, None)


def source_of(x: Any) -> tuple[Tensor, Norm] | None:
    """The tensor that a norm made `x` from, and that norm, if a fused call can start there; else None."""
    if not torch.is_grad_enabled() or not isinstance(x, Tensor):
        return None
    note = getattr(x, _NOTE, None) if torch.compiler.is_compiling() else _notes.get(x)
    if note is None or not note.holds(x):
        return None
    return note.x, note.record.norm(note.layer, note.x.dtype)
