"""The attention implementers of `csrc/attention.h` in Triton: which kernels run on which tiles."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat._triton import allows_tf32
from fused_remat.triton import attention_tiles, configs, launch, targets
from fused_remat.triton.attention_bwd import attention_dkdv_kernel, attention_dq_kernel
from fused_remat.triton.attention_configs import UNALIGNED
from fused_remat.triton.attention_delta import attention_delta_kernel
from fused_remat.triton.attention_fwd import attention_fwd_kernel
from fused_remat.triton.attention_tiles import Grid, Heads, Numbers, Rows, Spec
from fused_remat.triton.attention_weights import attention_dmask_kernel, attention_weights_kernel
from fused_remat.triton.dropout import drop_threshold

LOG2E = attention_tiles.LOG2E.value
# Positions are compared as 32-bit numbers; no length comes near.
FARTHEST = 2**30
# Row strides from here on take a tile of 256 rows beyond 32-bit offsets.
WIDE_STRIDE = 2**22
# Up to here the quick tanh's error, in scores, is below what rounded products have.
QUICK_SOFTCAP = 128.0
# What the two kinds of tanh take their arguments in.
_CAP_UNIT = {"quick": 2.0 * LOG2E, "exact": 1.0}


class Facts(NamedTuple):
    """What the choice of a kernel depends on; see `Spec`."""

    arch: int
    dtype: torch.dtype
    width: int
    value_width: int
    length_q: int
    length_k: int
    attn_mask: str
    mask_rows: bool
    key_mask: str
    low: bool
    high: bool
    extra_keys: bool
    dropout: bool
    cap: str
    wide: bool
    tma: bool  # whether the operands lie as TMA wants them
    precision: str


@configs.plan_cache
def plan(op: str, facts: Facts, flags: tuple[tuple[str, bool], ...]) -> tuple[Spec, configs.Config]:
    """What the kernel is compiled for, and its launch options."""
    given = dict(flags)
    # A cap wants registers, which the plain tiles of forward and delta have.
    cap = bool(facts.cap) and op not in ("attention_fwd", "attention_delta")
    extras = bool(facts.attn_mask or facts.key_mask) + facts.dropout + cap + given.get("dweights", False)
    variant = ("plain", "masked", "everything")[min(extras, 2)]
    double = facts.dtype == torch.float64
    key = op, max(facts.width, facts.value_width) * (2 if double else 1), facts.dtype, facts.arch
    config = configs.choose(*key, variant if facts.tma else UNALIGNED)
    spec = Spec(
        block_m=config.block_m,
        block_n=config.block_n,
        width=facts.width,
        value_width=facts.value_width,
        double=double,
        precision=facts.precision,
        attn_mask=facts.attn_mask,
        mask_rows=facts.mask_rows,
        key_mask=facts.key_mask,
        low=facts.low,
        high=facts.high,
        extra_keys=facts.extra_keys,
        dropout=facts.dropout,
        cap=facts.cap,
        even_q=facts.length_q % config.block_m == 0,
        even_k=facts.length_k % config.block_n == 0,
        wide=facts.wide,
        tma=config.tma and facts.tma,
        warp_specialize=config.warp_specialize,
    )
    return replace(spec, **given), config


class Call:
    """The arguments that all implementers share, as kernels take them."""

    def __init__(
        self,
        operands: tuple[Tensor, ...],  # q, k, and what else is loaded by tiles: v, dout
        value_width: int,
        attn_mask: Tensor | None,  # 4-D, each dim that of [B, H, Lq, Lk - extra_keys] or 1
        key_mask: Tensor | None,  # [B, 1, 1, Lk - extra_keys]
        seed: Tensor,
        band_low: int,
        band_high: int,
        extra_keys: int,
        dropout_p: float,
        scale: float,
        softcap: float,
        head0: int,
        num_heads: int,
        factor: float = 1.0,
        *,
        written: tuple[Tensor | None, ...] = (),  # by tiles
    ) -> None:
        self.operands = operands
        q, k = operands[:2]
        self.batch, self.heads, self.length_q, width = q.shape
        self.kv_heads, self.length_k = k.shape[1], k.shape[2]
        masked_keys = self.length_k - extra_keys
        self.attn_mask, self.key_mask = _grid(attn_mask), _grid(key_mask)
        precision = "tf32" if q.dtype == torch.float32 and allows_tf32() else "ieee"
        self.facts = Facts(
            arch=targets.arch_of(q),
            dtype=q.dtype,
            width=width,
            value_width=value_width,
            length_q=self.length_q,
            length_k=self.length_k,
            attn_mask=_mask_kind(attn_mask),
            mask_rows=self.attn_mask is not None and self.attn_mask.row != 0,
            key_mask=_mask_kind(key_mask),
            low=band_low > 1 - self.length_q,
            high=band_high < masked_keys - 1,
            extra_keys=extra_keys > 0,
            dropout=dropout_p > 0.0,
            cap=_cap_kind(softcap, q.dtype, precision),
            wide=any(t is not None and t.stride(2) >= WIDE_STRIDE for t in (*operands, *written)),
            tma=all(_suits_tma(t) for t in operands),
            precision=precision,
        )
        fraction = _bits if q.dtype == torch.float64 else float
        unit = 1.0 if "float" in (self.facts.attn_mask, self.facts.key_mask) else LOG2E
        self.numbers = Numbers(
            length_q=self.length_q,
            length_k=self.length_k,
            masked_keys=masked_keys,
            heads=self.heads,
            group=self.heads // max(self.kv_heads, 1),
            low=_clamp(band_low),
            high=_clamp(band_high),
            scale=fraction(scale * (_CAP_UNIT[self.facts.cap] / softcap if softcap else unit)),
            unit=fraction(scale),
            softcap=fraction(softcap * unit) if softcap else None,
            seed=seed if dropout_p > 0.0 else None,
            threshold=drop_threshold(dropout_p),
            keep_scale=fraction(1.0 / (1.0 - dropout_p)),
            head0=head0,
            num_heads=num_heads,
            factor=fraction(factor),
        )

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.length_q

    def plan(self, op: str, **flags: bool) -> tuple[Spec, configs.Config]:
        return plan(op, self.facts, tuple(flags.items()))

    def tiles(self, spec: Spec) -> list[Heads | TensorDescriptor]:
        """The operands as the kernel loads them: q, k, v, dout."""
        blocks = (
            (spec.block_m, spec.block_e),
            (spec.block_n, spec.block_e),
            (spec.block_n, spec.block_v),
            (spec.block_m, spec.block_v),
        )
        if not spec.tma:
            return [_heads(t) for t in self.operands]
        return [
            TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, *block])
            for t, block in zip(self.operands, blocks, strict=False)
        ]


def _bits(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]


def _clamp(distance: int) -> int:
    return max(-FARTHEST, min(distance, FARTHEST))


def _mask_kind(mask: Tensor | None) -> str:
    return "" if mask is None else "bool" if mask.dtype == torch.bool else "float"


def _cap_kind(softcap: float, dtype: torch.dtype, precision: str) -> str:
    if not softcap:
        return ""
    rounded = dtype.itemsize == 2 or precision == "tf32"
    return "quick" if rounded and softcap <= QUICK_SOFTCAP else "exact"


def _heads(t: Tensor) -> Heads:
    return Heads(t, *t.stride()[:3])


def _rows(t: Tensor) -> Rows:
    return Rows(t, *t.stride()[:2])


def _grid(t: Tensor | None) -> Grid | None:
    if t is None:
        return None
    return Grid(t, *(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)))


def _suits_tma(t: Tensor) -> bool:
    """Base and strides are multiples of 16 bytes, and the last dim is dense."""
    *strides, last = t.stride()
    nbytes = t.element_size()
    return (
        last == 1
        and t.numel() > 0
        and t.data_ptr() % 16 == 0
        and all(stride > 0 and stride * nbytes % 16 == 0 for stride in strides)
    )


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _launch(kernel, programs: int, config: configs.Config, spec: Spec, *args) -> None:
    launch.launch(kernel, (programs,), *args, SPEC=spec, num_warps=config.num_warps, num_stages=config.num_stages)


# Implementers: arguments in the order of the schemas of csrc/library_attention.cpp ------------------------------------


def attention_fwd(
    q, k, v, attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale, softcap, head0, num_heads,
    scratch, out, lse,
) -> None:  # fmt: skip
    """out and lse from q, k, v; see `csrc/attention.h`."""
    call = Call(
        (q, k, v), v.shape[3], attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale, softcap,
        head0, num_heads, written=(out,),
    )  # fmt: skip
    if call.rows == 0:
        return
    spec, config = call.plan("attention_fwd")
    programs = call.batch * call.heads * _cdiv(call.length_q, spec.block_m)
    _launch(
        attention_fwd_kernel, programs, config, spec, *call.tiles(spec), call.attn_mask, call.key_mask, _heads(out),
        _rows(lse), call.numbers,
    )  # fmt: skip


def attention_delta(
    q, k, v, attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale, softcap, head0, num_heads,
    scratch, lse, dout, dweights, factor, rebuild, out, delta, correction,
) -> None:  # fmt: skip
    """delta and correction, and out where it is to be rebuilt; see `csrc/attention.h`."""
    call = Call(
        (q, k, v), v.shape[3], attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale, softcap,
        head0, num_heads, factor, written=(out,),
    )  # fmt: skip
    if call.rows == 0:
        return
    spec, config = call.plan("attention_delta", rebuild=rebuild, dweights=dweights is not None)
    programs = call.batch * call.heads * _cdiv(call.length_q, spec.block_m)
    _launch(
        attention_delta_kernel, programs, config, spec, *call.tiles(spec), call.attn_mask, call.key_mask, _rows(lse),
        _heads(dout), _grid(dweights), _heads(out), _rows(delta), _rows(correction), call.numbers,
    )  # fmt: skip


def attention_bwd(
    q, k, v, attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale, softcap, head0, num_heads,
    scratch, lse, correction, delta, dout, out, dweights, factor, dq, dk, dv, dattn_mask, dkey_mask,
) -> None:  # fmt: skip
    """The gradients that are not None, each zeroed; see `csrc/attention.h`."""
    call = Call(
        (q, k, v, dout), v.shape[3], attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale,
        softcap, head0, num_heads, factor, written=(dq, dk, dv),
    )  # fmt: skip
    if call.rows == 0 or call.length_k == 0:
        return
    masks = (call.attn_mask, call.key_mask, _rows(lse), _rows(correction), _rows(delta))
    has_weights = dweights is not None
    dweights = _grid(dweights)
    if dk is not None or dv is not None:
        spec, config = call.plan("attention_dkdv", dweights=has_weights, dk=dk is not None, dv=dv is not None)
        q_, k_, v_, dout_ = call.tiles(spec)
        programs = call.batch * call.kv_heads * _cdiv(call.length_k, spec.block_n)
        _launch(
            attention_dkdv_kernel, programs, config, spec, q_, k_, v_, *masks, dout_, dweights,
            None if dk is None else _heads(dk), None if dv is None else _heads(dv), call.numbers,
        )  # fmt: skip
    if dq is not None:
        spec, config = call.plan("attention_dq", dweights=has_weights)
        q_, k_, v_, dout_ = call.tiles(spec)
        programs = call.batch * call.heads * _cdiv(call.length_q, spec.block_m)
        _launch(
            attention_dq_kernel, programs, config, spec, q_, k_, v_, *masks, dout_, dweights, _heads(dq), call.numbers
        )
    for dmask in (dattn_mask, dkey_mask):
        if dmask is not None and dmask.numel() > 0:
            _add_mask_gradient(call, masks, dweights, dmask)


def _add_mask_gradient(call: Call, masks: tuple, dweights: Grid | None, dmask: Tensor) -> None:
    own_batches, own_heads, rows, cols = dmask.shape
    flags = {"sum_queries": rows == 1, "sum_keys": cols == 1, "dweights": dweights is not None}
    spec, config = call.plan("attention_dmask", **flags)
    q, k, v, dout = call.tiles(spec)
    programs = own_batches * own_heads * (1 if spec.sum_queries else _cdiv(rows, spec.block_m))
    programs *= 1 if spec.sum_keys else _cdiv(cols, spec.block_n)
    _launch(
        attention_dmask_kernel, programs, config, spec, q, k, v, *masks, dout, dweights, _grid(dmask),
        call.batch // own_batches, call.heads // own_heads, call.numbers,
    )  # fmt: skip


def attention_weights(
    q, k, attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale, softcap, head0, num_heads,
    scratch, lse, factor, weights,
) -> None:  # fmt: skip
    """weights += factor * probabilities after dropout; see `csrc/attention.h`."""
    call = Call(
        (q, k), 0, attn_mask, key_mask, seed, band_low, band_high, extra_keys, dropout_p, scale, softcap, head0,
        num_heads, factor,
    )  # fmt: skip
    if call.rows == 0 or call.length_k == 0:
        return
    spec, config = call.plan("attention_weights")
    owners = weights.shape[1]
    programs = call.batch * owners
    programs *= _cdiv(call.length_q, spec.block_m) * _cdiv(call.length_k, spec.block_n)
    _launch(
        attention_weights_kernel, programs, config, spec, *call.tiles(spec), call.attn_mask, call.key_mask, _rows(lse),
        _grid(weights), call.heads // owners, call.numbers,
    )  # fmt: skip
