"""A converted attention layer of any library but torch's own: the fused call from x."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fused_remat import functional, last_calls, tensor_parallel
from fused_remat.convert.adapters import adapted
from fused_remat.convert.attention_call import (
    IMPLEMENTATIONS,
    ROLES,
    Inputs,
    features_of,
    implementation,
    inputs_of,
    read,
    visible_by,
    wants_weights,
    why_dtypes_differ,
)
from fused_remat.convert.attention_layout import BLOCKS, HEADS, PREFIXES, AttentionLayout
from fused_remat.convert.fused import Path, find, note_own_code, why_changed
from fused_remat.convert.keep import of_workspace
from fused_remat.convert.norms import FusedNorm, source_of
from fused_remat.plain import PLAIN_TENSOR_TYPES, is_dtensor, why_watched
from fused_remat.settings import LowRank, Norm

_CACHED = (
    "a converted attention got a cache of keys and values while gradients are recorded; it runs its own code, which "
    "keeps every activation. Pass use_cache=False (or set model.config.use_cache = False) while training"
)


@dataclass(frozen=True)
class FusedAttentionLayer:
    """What conversion found and the fused call relies on; compared with the layer at every call."""

    layout: AttentionLayout
    keep: tuple[str, ...]
    names: tuple[str, ...]  # of the arguments of forward
    meaningful: tuple[str, ...]  # those for which None and False are no way of leaving them out
    returns: str  # "y", "y, weights" or "y, bias, weights"
    linear: type[nn.Module]  # nn.Linear, or transformers' Conv1D, which stores its weight transposed
    parts: tuple[tuple[Path, type[nn.Module]], ...]  # the replaced modules that are not linears, with their classes
    settings: tuple[tuple[Path, str, Any], ...]  # (part, attribute, value) that the replaced code reads
    children: tuple[tuple[Path, tuple[str, ...]], ...]  # names of all modules that the replaced code may call
    head_norms: tuple[FusedNorm, FusedNorm] | None = None  # of q and k
    workspace: int | None = None  # bytes; None: whatever is in force when it is called
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "attention"

    @property
    def takes_norm(self) -> bool:
        """Whether a norm of its input can be folded into the fused call: nothing else adds it."""
        return not self.layout.norm

    @property
    def covers(self) -> tuple[Path, ...]:
        """Modules below the layer whose own code the fused call replaces."""
        return self.layout.through

    def describe(self) -> str:
        heads = f"{self.layout.num_heads} heads"
        if self.layout.num_kv_heads != self.layout.num_heads:
            heads += f" on {self.layout.num_kv_heads}"
        return f"attention, {heads}, keep={self.keep}{of_workspace(self.workspace)}"

    def why_not_split(self, linears: list[nn.Module]) -> str | None:
        """Why the fused call cannot run on shards of `linears`; None if it can."""
        layout = self.layout
        if len(linears) != 4 or layout.packing or layout.own_biases or layout.bias_method or self.head_norms:
            return "its weights are DTensors and not those of q, k, v and the output alone"
        return tensor_parallel.why_not_heads(linears[:-1], linears[-1], layout.num_heads, layout.num_kv_heads)

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        call = self.understood(layer, args, kwargs)
        if isinstance(call, str):
            note_own_code(layer, call)
            return stock()
        return self._pack(layer, call, run(layer, self, call))

    def understood(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        """The call, if the fused one computes the same; else why the layer must run its own code."""
        values = read(self.names, self.meaningful, args, kwargs)
        if isinstance(values, str):
            return values
        if "cache" in values and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            warnings.warn(_CACHED, stacklevel=2)
        inputs = inputs_of(values, prefix(layer, self.layout))
        if isinstance(inputs, str):
            return inputs
        return why_changed(layer, self) or why_watched() or self._call(layer, inputs)

    def _call(self, layer: nn.Module, inputs: Inputs) -> Call | str:
        layout = self.layout
        stands_for, roles = implementation(layer, layout.core), {ROLES.get(name) for name in self.names}
        unseen = features_of(inputs, self.names, stands_for) - layout.accepts
        if unseen:
            return f"its code was not seen {' and '.join(sorted(unseen))} to do what a fused call does"
        if (inputs.keys is None and bool(roles & {"rotary", "rope"})) != (inputs.rotary is not None):
            return "its code was not seen with just these position embeddings"
        if inputs.rotary is not None and inputs.rotary[0].shape[-2] != inputs.x.shape[1]:
            return "its position embeddings are not those of its input"
        if wants_weights(layer, layout.core):
            return "it was asked for attention weights"
        if stands_for not in (None, *IMPLEMENTATIONS):
            return f"its attention function is now {stands_for!r}"
        inputs = with_bias(layer, layout, inputs)
        if isinstance(inputs, str):
            return inputs
        seen = visible_by(inputs, stands_for, layout.causal)
        if isinstance(seen, str):
            return seen
        p = probability(layer, layout)
        if p >= 1.0:
            return "every attention weight is dropped"
        reason = why_not_shared(layer, layout, inputs, seen[0], p)
        if reason is not None:
            return reason
        biases = own_biases(layer, layout)
        if not all(b is None or type(b) in PLAIN_TENSOR_TYPES for b in biases):
            return "a bias is no plain tensor"
        differ = why_dtypes_differ(inputs.x, inputs.keys, *(inputs.rotary or ()), find(layer, layout.q).weight)
        return differ or Call(inputs, *seen, p)

    def _pack(self, layer: nn.Module, call: Call, y: Tensor) -> Any:
        if self.returns == "y":
            return y
        return (y, None) if self.returns == "y, weights" else (y, call.inputs.bias, None)


@dataclass(frozen=True)
class Call:
    """A call that can run fused."""

    inputs: Inputs
    mask: Tensor | None
    key_mask: Tensor | None
    causal: bool
    dropout_p: float


def prefix(layer: nn.Module, layout: AttentionLayout) -> int:
    """First tokens that have no position."""
    core = find(layer, layout.core)
    return next((getattr(core, name) for name in PREFIXES if hasattr(core, name)), 0)


def with_bias(layer: nn.Module, layout: AttentionLayout, inputs: Inputs) -> Inputs | str:
    """`inputs` with the bias that the layer itself makes for its scores, and a mask per window for every window."""
    core = find(layer, layout.core)
    x, mask, bias = inputs.x, inputs.mask, inputs.bias
    if layout.bias_method:
        bias = getattr(core, layout.bias_method)()
        if type(bias) not in PLAIN_TENSOR_TYPES:
            return "its relative position bias is no plain tensor"
        if mask is not None and mask.dim() == 3 and x.shape[0] % mask.shape[0] == 0:
            mask = mask.unsqueeze(1).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
    elif bias is None and hasattr(core, "compute_bias"):  # T5: from the relative positions, or none
        keys = x.shape[1] if inputs.keys is None else inputs.keys.shape[1]
        if getattr(core, "has_relative_attention_bias", False):
            bias = core.compute_bias(x.shape[1], keys, device=x.device)
        else:
            bias = x.new_zeros((1, layout.num_heads, x.shape[1], keys))
    return Inputs(x, inputs.keys, mask, inputs.rotary, bias, inputs.causal)


def probability(layer: nn.Module, layout: AttentionLayout) -> float:
    """Of dropping an attention weight in this call."""
    if not layout.dropout or not find(layer, layout.core).training:
        return 0.0
    holder = getattr(find(layer, layout.dropout[:-1]), layout.dropout[-1])
    if isinstance(holder, nn.Dropout):
        return holder.p if holder.training else 0.0
    return float(holder)


def own_biases(layer: nn.Module, layout: AttentionLayout) -> tuple[Tensor | None, ...]:
    """Of q, k and v, where the layer itself holds them."""
    core = find(layer, layout.core)
    return tuple(getattr(core, name, None) for name in layout.own_biases)


def why_not_shared(
    layer: nn.Module, layout: AttentionLayout, inputs: Inputs, mask: Tensor | None, dropout_p: float
) -> str | None:
    """Why ranks that hold some heads of `layer` each cannot share this call; None if they can, or hold all heads."""
    linears = [find(layer, path) for path in layout.linears]
    read_from = [t for t in (inputs.x, inputs.keys) if t is not None]
    if not tensor_parallel.is_split(linears):
        return "an input is a DTensor and its weights are not" if any(map(is_dtensor, read_from)) else None
    if dropout_p > 0.0:
        return "it drops weights of heads of which this rank has some"
    if mask is not None and mask.dim() == 4 and mask.shape[1] != 1:
        return "its mask is one per head, and this rank has some of the heads"
    return next(filter(None, (tensor_parallel.why_not_entered(linears, t) for t in read_from)), None)


Parts = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...] | None, tuple[LowRank | None, ...]]


def projections(layer: nn.Module, fused: FusedAttentionLayer) -> Parts | tuple[Tensor, Tensor | tuple | None, None]:
    """Weights, biases and adapters of q, k and v as `fused_remat.multi_head_attention` takes them: views, no copies.

    One packed weight and bias where rows of q, k and v follow each other and nothing is added to them.
    """
    layout = fused.layout
    linears = [adapted(find(layer, path), fused.linear) for path in dict.fromkeys((layout.q, layout.k, layout.v))]
    weights = [_out_in(part.linear.weight, fused) for part in linears]
    own = own_biases(layer, layout)
    biases = own or tuple(part.linear.bias for part in linears)
    adapters = tuple(part.adapter for part in linears)
    if not layout.packing:
        return tuple(weights), biases, adapters
    if layout.packing == BLOCKS and adapters[0] is None:
        return weights[0], own or biases[0], None
    both = adapters[0]
    factors = [] if both is None else [part.flatten(0, -2) for part in split_rows(layout, both.b)]
    return (
        split_rows(layout, weights[0]),
        own or (None if biases[0] is None else split_rows(layout, biases[0])),
        tuple(LowRank(both.a, part, both.scale) for part in factors) or (None,) * 3,
    )


def _out_in(weight: Tensor, fused: FusedAttentionLayer) -> Tensor:
    return weight if fused.linear is nn.Linear else weight.t()


def split_rows(layout: AttentionLayout, packed: Tensor) -> tuple[Tensor, ...]:
    """What `packed` [rows, ...] holds of q, k and v: [rows of it, ...], or [heads, rows of a head, ...] where each
    head has its own."""
    if layout.packing == HEADS:
        return packed.unflatten(0, (layout.num_heads, 3, -1)).unbind(1)
    width = packed.shape[0] // (layout.num_heads + 2 * layout.num_kv_heads)
    return packed.split((layout.num_heads * width, layout.num_kv_heads * width, layout.num_kv_heads * width))


def run(layer: nn.Module, fused: FusedAttentionLayer, call: Call) -> Tensor:
    """y of the call."""
    layout, x = fused.layout, call.inputs.x
    linears = [find(layer, path) for path in layout.linears]
    split = tensor_parallel.split(linears[:-1], linears[-1]) if tensor_parallel.is_split(linears) else None
    # A rank with some of the heads would have its part of the gradient of the norm's weight only.
    source = source_of(x) if fused.takes_norm and split is None else None
    read_from, norm = (x, None) if source is None else source
    keys = None if call.inputs.keys is x else call.inputs.keys
    ranks, none = 1 if split is None else split.ranks, (None,) * 3
    if split is None:
        weights, biases, adapters = projections(layer, fused)
        out = adapted(find(layer, layout.out), fused.linear)
        w_out, b_out, adapters = _out_in(out.linear.weight, fused), out.linear.bias, (*(adapters or none), out.adapter)
    else:
        read_from, keys = split.enter(x), None if keys is None else split.enter(keys)
        (*weights, w_out), (*biases, b_out), adapters = split.weights, split.biases, (*none, None)
    last_calls.note_fused(layer, read_from, *(() if keys is None else (keys,)))
    y = functional.multi_head_attention(
        read_from,
        keys,
        None,
        weights,
        biases,
        w_out,
        b_out,
        layout.num_heads // ranks,
        layout.num_kv_heads // ranks,
        attn_mask=call.mask,
        key_padding_mask=call.key_mask,
        is_causal=call.causal,
        dropout_p=call.dropout_p,
        scale=layout.scale,
        norm=norm,
        rotary=call.inputs.rotary,
        rotary_interleaved=layout.interleaved,
        keep=fused.keep,
        workspace=fused.workspace,
        **_head_settings(layer, fused),
        **_adapters(adapters),
    )
    y = y if split is None else split.leave(y)
    for path in layout.after:
        y = find(layer, path)(y)
    return find(layer, layout.norm)(y + x) if layout.norm else y


def _adapters(adapters: tuple[LowRank | None, ...]) -> dict[str, LowRank]:
    names = ("q_adapter", "k_adapter", "v_adapter", "out_adapter")
    return {name: adapter for name, adapter in zip(names, adapters, strict=True) if adapter is not None}


def _head_settings(layer: nn.Module, fused: FusedAttentionLayer) -> dict[str, Any]:
    """The arguments that few layers have."""
    layout, settings = fused.layout, {}
    if layout.softcap is not None:
        settings["softcap"] = layout.softcap
    if fused.head_norms is not None:
        norms: list[Norm] = [
            record.norm(find(layer, path), find(layer, layout.q).weight.dtype)
            for record, path in zip(fused.head_norms, (layout.q_norm, layout.k_norm), strict=True)
        ]
        settings |= {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "qk_norm_eps": norms[0].eps}
    return settings
