"""What the tests of multi-head attention from x share: operands, settings, and how a call is put together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention_cases import BACKENDS, MASKS, assert_same, backends_of, gradients
from mlp_cases import REFUSED_ON_A_CPU, kernels_of, needs_extension, refused_on_a_cpu, relative_error
from torch import Tensor

import fused_remat
from fused_remat import LowRank, Norm

__all__ = [
    "BACKENDS",
    "REFUSED_ON_A_CPU",
    "assert_same",
    "backends_of",
    "gradients",
    "kernels_of",
    "needs_extension",
    "refused_on_a_cpu",
    "relative_error",
]
RESIDUALS = ("q", "k", "v", "out")
ADAPTED = RESIDUALS  # what may have a low-rank adapter
SCALES = {"q": 0.5, "k": 2.0, "v": -0.7, "out": 1.3}


@dataclass(frozen=True)
class Block:
    """Sizes and parts of one block; `heads`, `kv_heads`, `width` E, `value_width` Ev, `model` D of the query."""

    batch: int = 2
    length: int = 5
    model: int = 6
    heads: int = 2
    kv_heads: int = 2
    width: int = 4
    value_width: int | None = None
    out: int | None = None
    length_k: int | None = None  # cross-attention if given
    model_k: int | None = None
    model_v: int | None = None
    separate_value: bool = False
    packed: bool = True
    bias: bool = True
    bias_kv: bool = False
    zero_key: bool = False
    norm: str | None = None
    norm_weight: bool = True
    qk_norm: bool = False
    rotary: int = 0  # features that are rotated
    interleaved: bool = False
    blocked: bool = False  # w_q, w_k, w_v are [heads, width, D] (biases: [heads, width]) with heads far apart
    ranks: tuple[int, int, int, int] = (0, 0, 0, 0)  # of the adapters of q, k, v and the output projection
    mask: str = "none"
    settings: tuple[tuple[str, object], ...] = ()

    def operands(self, dtype: torch.dtype = torch.float64, *, requires_grad: bool = True) -> dict[str, Tensor]:
        """Tensors by the names that `call` knows, scaled so that values stay of order 1; masks need gradients too."""
        value_width = self.value_width or self.width
        rows = (self.heads * self.width, self.kv_heads * self.width, self.kv_heads * value_width)
        length_k = self.length_k or self.length
        features = (self.model, self.model_k or self.model, self.model_v or self.model_k or self.model)
        shapes = {"query": (self.batch, self.length, self.model)}
        if self.length_k or self.model_k:
            shapes["key"] = (self.batch, length_k, features[1])
        if self.separate_value or self.model_v:
            shapes["value"] = (self.batch, length_k, features[2])
        if self.packed:
            shapes["in_proj_weight"] = (sum(rows), self.model)
            shapes |= {"in_proj_bias": (sum(rows),)} if self.bias else {}
        else:
            for part, row, feature in zip("qkv", rows, features, strict=True):
                shapes[f"w_{part}"] = (row, feature)
                shapes |= {f"b_{part}": (row,)} if self.bias else {}
        out = self.out or self.model
        projections = (*zip(rows, features, strict=True), (out, self.heads * value_width))
        for part, rank, (d_out, d_in) in zip(ADAPTED, self.ranks, projections, strict=True):
            shapes |= {f"{part}_a": (rank, d_in), f"{part}_b": (d_out, rank)} if rank else {}
        shapes["out_proj_weight"] = (out, self.heads * value_width)
        shapes |= {"out_proj_bias": (out,)} if self.bias else {}
        shapes |= {"bias_k": (rows[1],), "bias_v": (rows[2],)} if self.bias_kv else {}
        if self.norm and self.norm_weight:
            shapes["norm_weight"] = (self.model,)
            shapes |= {"norm_bias": (self.model,)} if self.norm == "layer_norm" else {}
        shapes |= {"q_norm": (self.width,), "k_norm": (self.width,)} if self.qk_norm else {}
        made = {}
        for name, shape in shapes.items():
            scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
            made[name] = (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)
            if self.blocked and name[:2] in ("w_", "b_"):
                made[name] = apart(made[name], self.heads if name[2] == "q" else self.kv_heads)
            made[name].requires_grad_(requires_grad)
        for name, mask in MASKS[self.mask](self.batch, self.heads, self.length, length_k, dtype).items():
            made[name] = mask.requires_grad_(requires_grad and mask.is_floating_point())
        return made

    def angles(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if not self.rotary:
            return None
        rates = 10.0 ** -torch.arange(self.rotary // 2, dtype=torch.float64)
        angles = torch.arange(self.length, dtype=torch.float64).unsqueeze(1) * rates
        angles = angles.repeat_interleave(2, dim=1) if self.interleaved else torch.cat((angles, angles), dim=1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def call(self, given: dict[str, Tensor], *, backend: str | None = None, seed: int = 0, **changes):
        """`fused_remat.multi_head_attention` on a named backend, with torch's generator at `seed`."""
        torch.manual_seed(seed)
        if backend is None:
            return self._call(given, changes)
        with fused_remat.backend(backend):
            return self._call(given, changes)

    def _call(self, given: dict[str, Tensor], changes: dict[str, object]):
        get = given.get
        weight = get("in_proj_weight") if self.packed else tuple(get(f"w_{part}") for part in "qkv")
        bias = get("in_proj_bias") if self.packed or not self.bias else tuple(get(f"b_{part}") for part in "qkv")
        norm = Norm(self.norm, get("norm_weight"), get("norm_bias"), 1e-5) if self.norm else None
        settings = {
            "attn_mask": get("attn_mask"), "key_padding_mask": get("key_padding_mask"), "bias_k": get("bias_k"),
            "bias_v": get("bias_v"), "add_zero_attn": self.zero_key, "norm": norm, "q_norm": get("q_norm"),
            "k_norm": get("k_norm"), "rotary": self.angles(given["query"].dtype),
            "rotary_interleaved": self.interleaved, **adapters(given),
        }  # fmt: skip
        return fused_remat.multi_head_attention(
            given["query"], get("key"), get("value"), weight, bias, given["out_proj_weight"], get("out_proj_bias"),
            self.heads, self.kv_heads, **{**settings, **dict(self.settings), **changes},
        )  # fmt: skip

    def reference(self, given: dict[str, Tensor], **changes):
        """The same call on the reference path."""
        ignored = ("keep", "workspace")
        return self.call(given, backend="reference", **{k: v for k, v in changes.items() if k not in ignored})


def apart(rows: Tensor, heads: int) -> Tensor:
    """[heads * width, ...] as a leaf [heads, width, ...] whose heads lie apart, with NaN between them."""
    by_heads = rows.unflatten(0, (heads, -1))
    return torch.stack((torch.full_like(by_heads, torch.nan), by_heads, by_heads), dim=1)[:, 1]


def adapters(given: dict[str, Tensor]) -> dict[str, LowRank]:
    """The arguments of `multi_head_attention` for the factors among the operands."""
    return {f"{p}_adapter": LowRank(given[f"{p}_a"], given[f"{p}_b"], SCALES[p]) for p in ADAPTED if f"{p}_a" in given}


def results(block: Block, given: dict[str, Tensor], dy: Tensor, dweights: Tensor | None = None, **changes):
    """y, the weights where `dweights` is given, and the gradients of all operands that require one, by name."""
    outputs = block.call(given, need_weights=dweights is not None, **changes)
    outputs = outputs if dweights is not None else (outputs,)
    named = dict(zip(("y", "weights"), (o.detach() for o in outputs), strict=False))
    douts = (dy,) if dweights is None else (dy, dweights)
    return named | {f"d{name}": g for name, g in gradients(outputs, given, douts).items()}
