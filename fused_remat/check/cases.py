"""The calls that are checked, small and odd-sized, on a GPU in even sizes too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fused_remat
from fused_remat.settings import Norm

Tensors = dict[str, Tensor]

# Angles, which no gradient is asked of.
CONSTANT = ("cos", "sin")


@dataclass(frozen=True)
class Sizes:
    """`tokens` M or L, `width` D, `hidden` F, `head` E. `name` stands behind that of a case."""

    tokens: int
    width: int
    hidden: int
    head: int
    workspace: int = 16 * 1024
    batch: int = 2
    name: str = ""


# The workspace makes every op go piece by piece.
TINY = Sizes(tokens=5, width=6, hidden=7, head=4, workspace=1024, batch=1)  # for finite differences
SMALL = Sizes(tokens=63, width=33, hidden=129, head=18)
LARGE = Sizes(tokens=341, width=129, hidden=341, head=72, workspace=256 * 1024)

# For kernels of a GPU that odd sizes never come to: of libraries and of CUTLASS, which take rows that begin on 16 bytes
# and scratch for a head, and copies of 16 bytes. Multiples of 8, and of nothing else that a tile would be full with.
ALIGNED = Sizes(tokens=328, width=136, hidden=344, head=64, workspace=8 * 2**20, name="aligned")
# For one kernel a pass, of which blocks add up what others made where there are more than 1024 tokens.
NARROW = Sizes(tokens=1100, width=64, hidden=256, head=64, workspace=4 * 2**20, name="narrow")


@dataclass(frozen=True)
class Case:
    """`shapes`: tensor name -> shape; masks are made by name. `arguments`: tensors -> keywords of the op."""

    op: str
    name: str
    shapes: Callable[[Sizes], Mapping[str, tuple[int, ...]]]
    arguments: Callable[[Tensors, Sizes], dict[str, Any]]

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(fused_remat, self.op)

    def tensors(self, sizes: Sizes) -> Tensors:
        """The case's tensors in float64 on the CPU, of order 1; the same ones each time."""
        generator = torch.Generator().manual_seed(0)
        return {name: _made(name, shape, generator) for name, shape in self.shapes(sizes).items()}


def _made(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=generator)
    if name == "bool_mask":
        values = values < 0.7
        values[..., 0] = True
        values[..., -1, :] = False  # a row with nothing to attend to
        return values
    if name == "padding":
        values = values < 0.7
        values[..., 0] = True
        return values
    if name in CONSTANT:
        angles = torch.arange(shape[0], dtype=torch.float64).unsqueeze(1) * 10.0 ** -torch.arange(shape[1]).double()
        return angles.cos() if name == "cos" else angles.sin()
    return values * shape[-1] ** -0.5 if name.startswith("w_") else values


def _mlp(name: str, *, gated: bool = False, bias: bool = True, norm: str | None = None, **settings: Any) -> Case:
    def shapes(s: Sizes) -> Mapping[str, tuple[int, ...]]:
        made = {"x": (s.tokens, s.width), "w_up": (s.hidden, s.width), "w_down": (s.width, s.hidden)}
        made |= {"b_up": (s.hidden,), "b_down": (s.width,)} if bias else {}
        made |= {"w_gate": (s.hidden, s.width)} if gated else {}
        made |= {"norm_weight": (s.width,)} if norm else {}
        return made | ({"norm_bias": (s.width,)} if norm == "layer_norm" else {})

    def arguments(tensors: Tensors, s: Sizes) -> dict[str, Any]:
        given = {name: t for name, t in tensors.items() if not name.startswith("norm")}
        folded = Norm(norm, tensors["norm_weight"], tensors.get("norm_bias")) if norm else None
        return {**given, "norm": folded, "workspace": s.workspace, **settings}

    return Case("mlp", name, shapes, arguments)


def _attention(name: str, *, mask: str = "", kv_heads: int = 4, more_keys: int = 0, **settings: Any) -> Case:
    def shapes(s: Sizes) -> Mapping[str, tuple[int, ...]]:
        keys = s.tokens + more_keys
        made = {
            "q": (s.batch, 4, s.tokens, s.head),
            "k": (s.batch, kv_heads, keys, s.head),
            "v": (s.batch, kv_heads, keys, s.head),
        }
        made |= {"bool_mask": (s.batch, 1, s.tokens, keys)} if mask == "bool" else {}
        made |= {"float_mask": (4, s.tokens, keys)} if mask == "float" else {}
        return made | ({"padding": (s.batch, keys)} if mask == "padding" else {})

    def arguments(tensors: Tensors, s: Sizes) -> dict[str, Any]:
        names = {"bool_mask": "attn_mask", "float_mask": "attn_mask", "padding": "key_padding_mask"}
        given = {names.get(name, name): t for name, t in tensors.items()}
        return {**given, "return_lse": True, "workspace": s.workspace, **settings}

    return Case("attention", name, shapes, arguments)


def _block(
    name: str, *, kv_heads: int = 4, norm: str | None = None, qk_norm: bool = False, rotary: bool = False,
    cross: bool = False, padding: bool = False, **settings: Any,
) -> Case:  # fmt: skip
    def shapes(s: Sizes) -> Mapping[str, tuple[int, ...]]:
        rows = (4 + 2 * kv_heads) * s.head
        made = {"x": (s.batch, s.tokens, s.width), "w_in": (rows, s.width), "b_in": (rows,)}
        made |= {"w_out": (s.width, 4 * s.head), "b_out": (s.width,)}
        made |= {"memory": (s.batch, s.tokens + 2, s.width)} if cross else {}
        made |= {"norm_weight": (s.width,)} if norm else {}
        made |= {"q_norm": (s.head,), "k_norm": (s.head,)} if qk_norm else {}
        made |= {"cos": (s.tokens, s.head), "sin": (s.tokens, s.head)} if rotary else {}
        return made | ({"padding": (s.batch, s.tokens)} if padding else {})

    def arguments(tensors: Tensors, s: Sizes) -> dict[str, Any]:
        get = tensors.get
        return {
            "query": tensors["x"], "key": get("memory"), "value": None, "in_proj_weight": tensors["w_in"],
            "in_proj_bias": tensors["b_in"], "out_proj_weight": tensors["w_out"], "out_proj_bias": tensors["b_out"],
            "num_heads": 4, "num_kv_heads": kv_heads, "norm": Norm(norm, tensors["norm_weight"]) if norm else None,
            "q_norm": get("q_norm"), "k_norm": get("k_norm"),
            "rotary": (tensors["cos"], tensors["sin"]) if rotary else None, "key_padding_mask": get("padding"),
            "workspace": s.workspace, **settings,
        }  # fmt: skip

    return Case("multi_head_attention", name, shapes, arguments)


CASES = (
    _mlp("gelu"),
    _mlp("relu2, no bias, kept", bias=False, activation="relu2", keep=("up",)),
    _mlp("gelu_tanh, LayerNorm", norm="layer_norm", activation="gelu_tanh"),
    _mlp("gated silu", gated=True, activation="silu"),
    _mlp("gated sigmoid, RMSNorm", gated=True, bias=False, norm="rms_norm", activation="sigmoid"),
    _mlp("dropout", dropout_p=0.25),
    _mlp("gated, dropout, a quarter kept", gated=True, dropout_p=0.25, keep=0.25),
    _attention("full"),
    _attention("causal, grouped heads", kv_heads=2, is_causal=True),
    _attention("window, bottom right", more_keys=3, causal="bottom_right", window=(3, 0)),
    _attention("bool mask, an empty row", mask="bool"),
    _attention("float mask and its gradient", mask="float"),
    _attention("padding", mask="padding"),
    _attention("causal, dropout", is_causal=True, dropout_p=0.25),
    _block("causal, LayerNorm", norm="layer_norm", is_causal=True),
    _block("nothing kept, grouped heads", kv_heads=2, keep=()),
    _block("rotary, q and k norms", kv_heads=2, qk_norm=True, rotary=True, is_causal=True),
    _block("rotary, interleaved, all kept", rotary=True, rotary_interleaved=True, keep=("q", "k", "v", "out")),
    _block("averaged weights, padding", padding=True, need_weights=True),
    _block("weights per head", need_weights=True, average_attn_weights=False),
    _block("cross-attention", cross=True, dropout_p=0.25),
)
