"""Tiles of the attention kernels: block_m queries by block_n keys.

Rows were found by compiling: no spills, and shared memory within the architecture. Masks that are tensors and dropout
want registers of their own, hence smaller tiles.
"""

from __future__ import annotations

from itertools import product

from fused_remat.triton.configs import Config, Key
from fused_remat.triton.targets import INTERPRETER

OPS = ("attention_fwd", "attention_delta", "attention_dkdv", "attention_dq", "attention_dmask", "attention_weights")
# Of q or v, the wider, rounded up to one of these. A float64 number takes the room of two; only such heads are wider.
WIDTHS = (64, 128, 256, 512)
VARIANTS = ("plain", "masked", "everything")
# Of operands that are not aligned to 16 bytes: their addresses take the registers of masks and dropout.
UNALIGNED = "everything"

# (queries, keys[, stages = 2[, tma]]); tma is on by default from 90 on.
Tile = tuple[int, ...]

# op -> variant -> architecture -> a tile for each of WIDTHS up to 256
_HALF: dict[str, dict[str, dict[int, tuple[Tile, Tile, Tile]]]] = {
    "attention_fwd": {
        "plain": {
            80: ((128, 64), (128, 64, 3), (64, 32)),
            90: ((128, 128), (128, 128), (128, 64)),
            100: ((128, 128), (128, 128), (128, 64)),
        },
        "masked": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 64), (128, 64), (128, 32)),
            100: ((128, 64), (128, 64, 2, False), (128, 32)),
        },
        "everything": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 64), (128, 32, 2, False), (128, 32)),
            100: ((128, 64), (128, 32), (64, 32)),
        },
    },
    "attention_delta": {
        "plain": {
            80: ((128, 64), (128, 64, 3), (64, 32)),
            90: ((128, 128), (128, 128), (128, 64)),
            100: ((128, 128), (128, 128), (128, 64)),
        },
        "masked": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 64), (128, 64), (64, 64)),
            100: ((128, 64), (128, 32), (64, 64)),
        },
        "everything": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 64), (128, 32, 2, False), (64, 32)),
            100: ((64, 64), (64, 64), (64, 32)),
        },
    },
    "attention_dkdv": {
        "plain": {
            80: ((64, 128), (64, 64), (32, 64)),
            90: ((64, 128), (64, 128, 2, False), (32, 64, 2, False)),
            100: ((64, 128), (64, 128), (32, 64)),
        },
        "masked": {
            80: ((32, 128), (32, 64), (16, 32)),
            90: ((64, 128), (32, 128, 2, False), (16, 64)),
            100: ((32, 128), (32, 128), (32, 64)),
        },
        "everything": {
            80: ((32, 128), (32, 64), (16, 32)),
            90: ((32, 128), (16, 128), (16, 64)),
            100: ((32, 128), (32, 128), (32, 64)),
        },
    },
    "attention_dq": {
        "plain": {
            80: ((128, 64), (64, 64), (64, 32)),
            90: ((128, 128), (128, 64), (64, 64)),
            100: ((128, 128), (128, 64), (64, 64)),
        },
        "masked": {
            80: ((64, 32), (64, 32), (32, 32)),
            90: ((128, 64), (128, 64), (64, 32)),
            100: ((128, 64), (64, 64), (64, 32, 2, False)),
        },
        "everything": {
            80: ((64, 32), (64, 32), (32, 32)),
            90: ((128, 32), (128, 32), (64, 16)),
            100: ((64, 64), (64, 64), (64, 32)),
        },
    },
}
_HALF["attention_dmask"] = _HALF["attention_dq"]
_HALF["attention_weights"] = _HALF["attention_dq"] | {
    "everything": {
        80: ((32, 32), (32, 32), (32, 32)),
        90: ((64, 32), (64, 32), (64, 16)),
        100: ((64, 32), (64, 32), (64, 32)),
    },
}

# float32 on tensor cores: a tile for each of WIDTHS.
_TF32 = {"attention_dkdv": ((32, 64), (32, 64), (16, 16)), "attention_dq": ((64, 32), (64, 32), (32, 32))}
_TF32_ELSE = ((64, 64), (64, 32), (32, 32))
# Where a block has 99 KiB of shared memory: what does not fit from 80, see `configs.architecture_row`.
_SMALL_HALF = {("attention_dkdv", 256): (32, 32), ("attention_dq", 256): (32, 32), ("attention_dmask", 256): (32, 32)}
_SMALL_TF32 = ((32, 32), (32, 32), (16, 16))
# Other float32, and float64: (queries, keys, warps) for each of WIDTHS.
_IEEE = {
    "attention_fwd": ((64, 32, 8), (32, 32, 8), (32, 32, 8), (16, 16, 4)),
    "attention_dkdv": ((32, 32, 8), (16, 32, 4), (16, 32, 8), (16, 16, 4)),
    "attention_dq": ((64, 32, 8), (32, 32, 8), (32, 16, 8), (16, 16, 4)),
}
_IEEE_ELSE = ((32, 32, 4), (16, 16, 4), (16, 16, 4), (16, 16, 4))
# So small that the shapes of tests cross the edges of tiles.
_INTERPRETED = (64, 32)


def _half(arch: int, queries: int, keys: int, stages: int = 2, tma: bool = True) -> Config:
    return Config(queries, keys, num_stages=stages, tma=tma and arch >= 90)


def _rows() -> dict[Key, Config]:
    rows: dict[Key, Config] = {}
    for op, variant, (place, width) in product(OPS, VARIANTS, enumerate(WIDTHS)):
        for precision in ("half", "tf32", "ieee"):
            rows[op, width, precision, INTERPRETER, variant] = Config(*_INTERPRETED, num_warps=4)
        for arch, tiles in _HALF[op][variant].items():
            rows[op, width, "half", arch, variant] = _half(arch, *tiles[min(place, 2)])
            rows[op, width, "tf32", arch, variant] = Config(*_TF32.get(op, _TF32_ELSE)[min(place, 2)])
            queries, keys, warps = _IEEE.get(op, _IEEE_ELSE)[place]
            rows[op, width, "ieee", arch, variant] = Config(queries, keys, num_warps=warps, num_stages=1)
        rows[op, width, "tf32", 86, variant] = Config(*_SMALL_TF32[min(place, 2)], num_warps=4)
    for (op, width), tile in _SMALL_HALF.items():
        rows[op, width, "half", 86, "plain"] = Config(*tile)
    return rows


TABLE = _rows()
