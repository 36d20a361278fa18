"""What the arguments of an attention layer's forward mean, by their names: one table for every library.

A call is read into `Inputs`, or refused with a reason; then the layer runs its own code. An argument that is not in the
tables and not None or False is such a reason: what nobody understood is never dropped.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.convert.fused import Path, find
from fused_remat.plain import is_dtensor, is_plain_input

# Roles of arguments. The first argument of a forward is x whatever its name.
ROLES = {
    "hidden_states": "x",
    "encoder_hidden_states": "keys",
    "key_value_states": "keys",
    "attention_mask": "mask",
    "attn_mask": "mask",
    "mask": "mask",
    "encoder_attention_mask": "keys_mask",
    "position_embeddings": "rotary",
    "rope": "rope",
    "position_bias": "bias",
    "is_causal": "causal",
    "cache": "cache",
    "past_key_values": "cache",
    "past_key_value": "cache",
    "layer_past": "cache",
    "output_attentions": "weights",
}
# What the attention functions of transformers are handed along with every call and do not read. Where a forward names
# one of these itself, it may.
PASSED_ALONG = frozenset(
    ("position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states", "num_items_in_batch",
     "token_type_ids", "seq_idx")
)  # fmt: skip
# Packed sequences, for attention functions that take them so; all others are given a mask.
PACKED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))

# What a call may use, and a layer has to be seen doing first.
ALONE, OTHER_KEYS = "without other keys", "with other keys"
CAUSAL, NO_BIAS = "asked to be causal", "without a position bias"


def mask_feature(kind: str, dims: int) -> str:
    """The name of a form of mask, "bool" or "float"."""
    return f"with a {kind} mask of {dims} dims"


# What transformers calls the attention functions that fused calls can stand for.
IMPLEMENTATIONS = ("sdpa", "eager", "fused_remat")


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call by their meaning."""

    x: Tensor  # [B, L, D]
    keys: Tensor | None = None  # [B, S, D]
    mask: Tensor | None = None  # broadcasts to [B, H, L, S]
    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin, [1 or B, L, R]
    bias: Tensor | None = None  # [1 or B, H, L, S], added to the scores
    causal: bool | None = None  # None: as the layer is


def parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names of what forward takes after self, without `*args` and `**kwargs`."""
    return tuple(parameter.name for parameter in _parameters(cls.forward))


def required_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Those of `parameter_names` that have no default."""
    return tuple(parameter.name for parameter in _parameters(cls.forward) if parameter.default is parameter.empty)


@functools.cache
def _parameters(forward: Any) -> tuple[inspect.Parameter, ...]:
    parameters = list(inspect.signature(inspect.unwrap(forward)).parameters.values())[1:]
    return tuple(p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def implementation(layer: nn.Module, core: Path) -> str | None:
    """Which attention function of transformers `layer` calls; None if it is no layer of that kind."""
    return getattr(getattr(find(layer, core), "config", None), "_attn_implementation", None)


def wants_weights(layer: nn.Module, core: Path) -> bool:
    """Whether the model's configuration asks for attention weights, or transformers is recording them."""
    if getattr(getattr(find(layer, core), "config", None), "output_attentions", False) is True:
        return True
    return not torch.compiler.is_compiling() and _is_recording()


def _is_recording() -> bool:
    recorder = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    outputs = None if recorder is None else recorder.get()
    return outputs is not None and any("attention" in name for name in outputs)


def changed_defaults(cls: type[nn.Module]) -> tuple[str, ...]:
    """Those of `parameter_names` whose default is neither None nor False: None and False mean something there."""
    defaults = {parameter.name: parameter.default for parameter in _parameters(cls.forward)}
    return tuple(
        n for n, v in defaults.items() if v is not inspect.Parameter.empty and v is not None and v is not False
    )


def read(
    names: tuple[str, ...], meaningful: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | str:
    """The values by role, None and False left out, or why they cannot all be understood.

    `meaningful`: the names for which None and False mean something.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or not given:
        return "it got another number of arguments than its forward has"
    values: dict[str, Any] = {}
    for name, value in given.items():
        role = "x" if name == names[0] else ROLES.get(name)
        if (value is None or (value is False and role != "causal")) and name not in meaningful:
            continue
        if role is None:
            if name in PACKED and name not in names:
                values["packed"] = value
            elif name not in PASSED_ALONG or name in names:
                return f"it got the argument {name}, which no fused call knows"
        elif value is None:
            return f"it got None for {name}, which its code may understand as something"
        elif role in values:
            return f"it got two arguments that mean {role}"
        else:
            values[role] = value
    return values


def inputs_of(values: dict[str, Any], unrotated: int = 0) -> Inputs | str:
    """The tensors of a call, or why a fused call cannot take them; the first `unrotated` tokens have no position."""
    if "cache" in values:
        return "it got a cache of keys and values"
    if "weights" in values:
        return "it was asked for attention weights"
    if "x" not in values:
        return "it got no input"
    if "packed" in values and "mask" not in values:
        return "it got packed sequences without a mask"
    keys = values.get("keys")
    mask = values.get("mask")
    if keys is not None and "keys_mask" in values:
        mask = values["keys_mask"]
    if "rope" in values and "rotary" in values:
        return "it got two kinds of position embeddings"
    pair = _of_timm(values["rope"], unrotated) if "rope" in values else values.get("rotary", ())
    if not isinstance(pair, (tuple, list)) or len(pair) not in (0, 2):
        return "its position embeddings are no pair of cos and sin"
    read_from = [t for t in (values["x"], keys) if t is not None and not is_dtensor(t)]  # the weights have a say there
    tensors = [t for t in (*read_from, mask, values.get("bias"), *pair) if t is not None]
    if not all(isinstance(t, Tensor) and is_plain_input(t) for t in tensors):
        return "an input is no plain tensor"
    if values["x"].dim() != 3 or (keys is not None and keys.dim() != 3):
        return "its input is not [batch, length, features]"
    if mask is not None and (mask.dim() not in (2, 3, 4) or not (mask.dtype == torch.bool or mask.is_floating_point())):
        return "its mask is neither bool nor floating, or not [batch, heads, length, length]"
    causal = values.get("causal")
    if causal is not None and not isinstance(causal, bool):
        return "is_causal is no bool"
    return Inputs(values["x"], keys, mask, tuple(pair) or None, values.get("bias"), causal)


def _of_timm(rope: Any, unrotated: int) -> tuple[Tensor, ...] | None:
    """cos and sin [L, E] of timm's embedding [L - unrotated, 2 E], which holds sin and cos; None if it is another."""
    if not isinstance(rope, Tensor) or rope.dim() != 2:
        return None
    sin, cos = rope.chunk(2, dim=-1)
    shape = (unrotated, cos.shape[-1])
    return torch.cat((cos.new_ones(shape), cos)), torch.cat((sin.new_zeros(shape), sin))


def features_of(inputs: Inputs, names: tuple[str, ...], implementation: str | None) -> set[str]:
    """What a call uses of what a layer, with these argument names, may have been seen doing."""
    roles = {ROLES.get(name) for name in names}
    used = {ALONE if inputs.keys is None else OTHER_KEYS}
    if inputs.mask is not None:
        used.add(mask_feature("bool" if inputs.mask.dtype == torch.bool else "float", inputs.mask.dim()))
    if inputs.causal and ("causal" in roles or implementation is None):  # else transformers' functions read it
        used.add(CAUSAL)
    if "bias" in roles and inputs.bias is None:
        used.add(NO_BIAS)
    return used


def why_dtypes_differ(x: Tensor, *others: Tensor | None) -> str | None:
    """Why these cannot enter one op with x; under autocast they always can."""
    if torch.is_autocast_enabled(x.device.type):
        return None
    if any(other is not None and other.dtype != x.dtype for other in others):
        return "its inputs have different dtypes"
    return None


def visible_by(
    inputs: Inputs, implementation: str | None, causal: bool
) -> tuple[Tensor | None, Tensor | None, bool] | str:
    """Mask, mask of keys and causality by which the layer's own code would let queries see keys; or why not.

    `implementation` of transformers: "eager" adds the mask to the scores and knows no causality; "sdpa" is causal by
    itself where it gets no mask and several queries. Elsewhere causality and mask are what was asked for.
    """
    mask, bias = inputs.mask, inputs.bias
    wanted = causal if inputs.causal is None else inputs.causal
    if mask is not None and mask.dim() == 3:
        return "its mask has 3 dims"
    if implementation == "eager":
        wanted = False
        if mask is not None and mask.dtype == torch.bool:
            return "its mask is bool, which its eager attention adds"
    elif implementation is not None:
        # Of a single query that attends to itself both are the same, and shapes stay unread.
        wanted = wanted and mask is None and (inputs.keys is None or inputs.x.shape[1] > 1)
    elif wanted and mask is not None:
        return "it got a mask and is_causal"
    if implementation is not None and mask is not None and mask.dim() != 4:
        return "its mask is not [batch, heads, length, length]"
    if bias is None or mask is None:
        return (mask if bias is None else bias), None, wanted
    if mask.dtype != torch.bool:
        return mask + bias, None, wanted
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.shape[0] in (1, inputs.x.shape[0]):
        padding = mask[:, 0, 0].expand(inputs.x.shape[0], mask.shape[-1])
        return bias, padding, wanted
    return torch.where(mask, bias, torch.finfo(bias.dtype).min), None, wanted
