"""What an attention layer is made of: its parts, found by what people call them, and the settings beside them.

A layout is a proposal; `attention_probe` accepts or refuses it by what the layer's code computes. So a new name is one
word in a table here, and a wrong proposal costs nothing but a few milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fused_remat.convert.adapters import base_of
from fused_remat.convert.attention_call import ROLES, implementation, parameter_names
from fused_remat.convert.fused import Path, find
from fused_remat.convert.patterns import features, is_linear_like
from fused_remat.plain import held

# What the linears are called, by the part that they play.
Q_NAMES = ("q_proj", "query", "q", "wq", "to_q", "q_lin", "linear_q")
K_NAMES = ("k_proj", "key", "k", "wk", "to_k", "k_lin", "linear_k")
V_NAMES = ("v_proj", "value", "v", "wv", "to_v", "v_lin", "linear_v")
PACKED_NAMES = ("qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "wqkv", "to_qkv", "in_proj")
OUT_NAMES = ("o_proj", "out_proj", "o", "proj", "c_proj", "dense", "wo", "to_out", "out_lin", "linear_out", "out")
# Where q, k and v sit in one child and the output projection in another: BERT and its descendants.
NESTED = (("self", "output"), ("attention", "output"))

Q_NORM_NAMES = ("q_norm", "q_layernorm", "query_norm")
K_NORM_NAMES = ("k_norm", "k_layernorm", "key_norm")
DROPOUTS_AFTER = ("proj_drop", "resid_dropout", "resid_drop", "out_drop")

# Attributes, in order of preference.
WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head")
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")
SCALES = ("scaling", "scale", "softmax_scale")
SOFTCAPS = ("attn_logit_softcapping", "softcap")
PREFIXES = ("num_prefix_tokens",)  # first tokens without a position
BIAS_METHODS = ("_get_rel_pos_bias",)
PROBABILITIES = ("attention_dropout", "attn_drop", "attn_dropout", "dropout", "dropout_p")

# Whether a row of `qkv` belongs to q, k or v: by thirds, or within each head.
BLOCKS, HEADS = "blocks", "heads"


@dataclass(frozen=True)
class AttentionLayout:
    """Which child plays which part (paths below the layer, () where there is none), and with which settings.

    `out` of the attention goes through the linear at `out` and `after`; `norm`, if any, takes the sum of that and x.
    """

    q: Path  # the linear of q, k and v together where `packing` says so
    k: Path
    v: Path
    out: Path
    num_heads: int
    num_kv_heads: int
    core: Path = ()  # the module that holds the settings, if not the layer
    packing: str = ""
    own_biases: tuple[str, ...] = ()  # of q, k and v, where the layer itself holds them (EVA)
    q_norm: Path = ()
    k_norm: Path = ()
    after: tuple[Path, ...] = ()
    norm: Path = ()
    through: tuple[Path, ...] = ()
    dropout: Path = ()  # a module or number below the layer: the probability for attention weights
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False  # by itself, where no mask is given
    interleaved: bool = False  # pairs of the rotary embedding, if it is given one
    bias_method: str = ""  # makes a bias [1, H, L, L] for the scores (Swin)
    accepts: frozenset[str] = frozenset()  # what its code was seen to do: names of scenarios, ALONE and OTHER_KEYS

    @property
    def linears(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((self.q, self.k, self.v, self.out)))


def first_name(module: nn.Module, names: tuple[str, ...]) -> Path:
    """The first of `names` that is a child of `module`, as a path; () if none is."""
    return next(((name,) for name in names if module._modules.get(name) is not None), ())


def setting(layer: nn.Module, core: Path, names: tuple[str, ...], kinds: tuple[type, ...]) -> tuple[Path, Any]:
    """The first attribute or child of these names and kinds that the module at `core` has: its path and value."""
    module = find(layer, core)
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, kinds) and not isinstance(value, bool):
            return (*core, name), value
    return (), None


def layouts(layer: nn.Module) -> Iterator[AttentionLayout]:
    """Layouts that the children of `layer` allow, the likelier ones first."""
    for parts in named_parts(layer) or _by_shapes(layer):
        for heads in _with_heads(layer, parts):
            yield from _with_settings(layer, heads)


def _linear(layer: nn.Module, path: Path) -> bool:
    return bool(path) and is_linear_like(find(layer, path))


def named_parts(layer: nn.Module) -> list[AttentionLayout]:
    """Layouts without settings, of children that are called what attentions call theirs; empty if there are none."""
    for core, output in ((None, None), *NESTED):
        inner, outer = (layer, layer) if core is None else (layer._modules.get(core), layer._modules.get(output))
        if inner is None or outer is None:
            continue
        before, beside = ((), ()) if core is None else ((core,), (output,))
        out = (*beside, *first_name(outer, OUT_NAMES))
        packed = (*before, *first_name(inner, PACKED_NAMES))
        three = tuple((*before, *first_name(inner, names)) for names in (Q_NAMES, K_NAMES, V_NAMES))
        around = AttentionLayout((), (), (), out, 0, 0, core=before)
        around = replace(around, q_norm=_below(before, inner, Q_NORM_NAMES), k_norm=_below(before, inner, K_NORM_NAMES))
        if core is None:
            around = replace(around, after=tuple((n,) for n in DROPOUTS_AFTER if n in layer._modules))
        else:
            kinds = {name: child for name, child in outer._modules.items() if (name,) != out[1:]}
            norms = tuple((output, n) for n, child in kinds.items() if "norm" in type(child).__name__.lower())
            around = replace(
                around,
                after=tuple((output, n) for n, child in kinds.items() if type(child) is nn.Dropout),
                norm=norms[0] if norms else (),
                through=(before, beside),
            )
        if not _linear(layer, out) or out == beside:
            continue
        if packed != before and _linear(layer, packed):
            return [replace(around, q=packed, k=packed, v=packed, packing=how) for how in (BLOCKS, HEADS)]
        if before not in three and all(_linear(layer, path) for path in three):
            return [replace(around, q=three[0], k=three[1], v=three[2])]
    return []


def _below(before: Path, module: nn.Module, names: tuple[str, ...]) -> Path:
    found = first_name(module, names)
    if not found or type(module._modules[found[0]]) is nn.Identity:
        return ()
    return (*before, *found)


def _by_shapes(layer: nn.Module) -> list[AttentionLayout]:
    """Four linears, or two of which one makes q, k and v, whatever they are called."""
    linears = [(name,) for name, child in layer._modules.items() if is_linear_like(child)]
    if len(linears) == 4:
        roles = itertools.permutations(linears)
        return [AttentionLayout(q, k, v, out, 0, 0) for out, q, k, v in ((r[3], *r[:3]) for r in roles)]
    if len(linears) != 2:
        return []
    first, last = linears
    sizes = features(base_of(find(layer, first))), features(base_of(find(layer, last)))
    if None in sizes or sizes[0][1] != 3 * sizes[1][0]:
        return []
    return [AttentionLayout(first, first, first, last, 0, 0, packing=how) for how in (BLOCKS, HEADS)]


def _with_heads(layer: nn.Module, parts: AttentionLayout) -> Iterator[AttentionLayout]:
    """`parts` with the numbers of heads that its attributes and the rows of its linears allow."""
    sizes = {path: features(base_of(find(layer, path))) for path in parts.linears}
    if None in sizes.values():
        return
    out_columns = sizes[parts.out][0]
    _, width = setting(layer, parts.core, WIDTHS, (int,))
    _, count = setting(layer, parts.core, COUNTS, (int,))
    if width is None and count is None:
        module = find(layer, parts.core)
        counts = [v for n, v in vars(module).items() if type(v) is int and "head" in n.lower() and v > 0]
    else:
        counts = [count if width is None else out_columns // max(width, 1)]
    for heads in dict.fromkeys(counts):
        if heads < 1 or out_columns % heads:
            continue
        width = out_columns // heads
        rows = sizes[parts.k][1] if not parts.packing else (sizes[parts.q][1] - out_columns) // 2
        if rows > 0 and rows % width == 0 and heads % (rows // width) == 0:
            kv_heads = rows // width
            if parts.packing != HEADS or kv_heads == heads:
                yield replace(parts, num_heads=heads, num_kv_heads=kv_heads)


def _with_settings(layer: nn.Module, parts: AttentionLayout) -> Iterator[AttentionLayout]:
    """`parts` with every combination of settings that its attributes suggest."""
    core = find(layer, parts.core)
    if all(isinstance(held(core, name), nn.Parameter) for name in ("q_bias", "v_bias")):
        parts = replace(parts, own_biases=("q_bias", "k_bias", "v_bias"))
    method = next((name for name in BIAS_METHODS if callable(getattr(core, name, None))), "")
    parts = replace(parts, bias_method=method)
    _, scale = setting(layer, parts.core, SCALES, (float, int))
    _, softcap = setting(layer, parts.core, SOFTCAPS, (float, int))
    scales = dict.fromkeys((None if scale is None else float(scale), None))
    causal = getattr(core, "is_causal", False) is True
    rotates = any(ROLES.get(name) in ("rotary", "rope") for name in parameter_names(type(layer)))
    pairings = (False, True) if rotates else (False,)
    softcaps = dict.fromkeys((softcap, None))
    causals = (causal,) if implementation(layer, parts.core) is not None else (causal, not causal)
    for path in _dropouts(parts, core):
        for by, cap, pairs, is_causal in itertools.product(scales, softcaps, pairings, causals):
            yield replace(parts, dropout=path, scale=by, softcap=cap, causal=is_causal, interleaved=pairs)


def _dropouts(parts: AttentionLayout, core: nn.Module) -> list[Path]:
    """What may hold the probability for attention weights: modules and numbers, known names first, and nothing."""
    modules = [n for n, child in core._modules.items() if isinstance(child, nn.Dropout)]
    numbers = [n for n, value in vars(core).items() if type(value) in (float, int) and 0.0 <= value < 1.0]
    names = [n for n in (*modules, *numbers) if (*parts.core, n) not in parts.after]
    known = sorted((n for n in names if n in PROBABILITIES), key=PROBABILITIES.index)
    return [*((*parts.core, n) for n in dict.fromkeys((*known, *names))), ()]
