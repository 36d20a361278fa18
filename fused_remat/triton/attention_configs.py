"""Tiles of the attention kernels: block_m queries by block_n keys.

Rows were found by compiling: no spills, and shared memory within the architecture. Masks that are tensors and dropout
want registers of their own, hence smaller tiles.
"""

from __future__ import annotations

from fused_remat.triton.configs import Config, Key
from fused_remat.triton.targets import INTERPRETER

OPS = ("attention_fwd", "attention_delta", "attention_dkdv", "attention_dq", "attention_dmask", "attention_weights")
WIDTHS = (64, 128, 256)  # of q or v, the wider; rounded up to one of these
VARIANTS = ("plain", "masked", "everything")

# op -> variant -> architecture -> (queries, keys) or (queries, keys, stages) for each of WIDTHS
_HALF = {
    "attention_fwd": {
        "plain": {
            80: ((128, 64), (128, 64, 3), (64, 32)),
            90: ((128, 128), (128, 64), (128, 32)),
            100: ((128, 128), (128, 128), (128, 64)),
        },
        "masked": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 64), (128, 32), (64, 32)),
            100: ((128, 64), (128, 64), (64, 64)),
        },
        "everything": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 32), (128, 32), (64, 16)),
            100: ((128, 64), (128, 32), (64, 32)),
        },
    },
    "attention_delta": {
        "plain": {
            80: ((128, 64), (128, 64, 3), (64, 32)),
            90: ((128, 128), (128, 64), (64, 64)),
            100: ((128, 128), (128, 128), (64, 64)),
        },
        "masked": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 64), (128, 32), (64, 32)),
            100: ((128, 64), (128, 64), (64, 64)),
        },
        "everything": {
            80: ((128, 32), (64, 32), (64, 16)),
            90: ((128, 32), (128, 32), (64, 16)),
            100: ((128, 64), (128, 32), (64, 32)),
        },
    },
    "attention_dkdv": {
        "plain": {
            80: ((64, 128), (64, 64), (32, 64)),
            90: ((64, 128), (64, 128), (32, 64)),
            100: ((64, 128), (64, 128), (32, 64)),
        },
        "masked": {
            80: ((32, 128), (32, 64), (16, 32)),
            90: ((32, 128), (32, 128), (16, 64)),
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
            90: ((128, 128), (128, 64), (64, 32)),
            100: ((128, 128), (64, 128), (64, 64)),
        },
        "masked": {
            80: ((64, 32), (64, 32), (32, 32)),
            90: ((128, 32), (128, 32), (64, 16)),
            100: ((128, 64), (64, 64), (64, 32)),
        },
        "everything": {
            80: ((64, 32), (64, 32), (32, 32)),
            90: ((128, 32), (128, 32), (64, 16)),
            100: ((128, 64), (64, 64), (64, 32)),
        },
    },
}
_HALF["attention_dmask"] = _HALF["attention_weights"] = _HALF["attention_dq"]

# float32 and float64: a tile for each of WIDTHS, whatever the op.
_TF32 = ((64, 32), (32, 32), (16, 16))
_IEEE = ((32, 32), (16, 16), (16, 16))
# So small that the shapes of tests cross the edges of tiles.
_INTERPRETED = (64, 32)


def _rows() -> dict[Key, Config]:
    rows: dict[Key, Config] = {}
    for op in OPS:
        for variant in VARIANTS:
            for place, width in enumerate(WIDTHS):
                for precision in ("half", "tf32", "ieee"):
                    rows[op, width, precision, INTERPRETER, variant] = Config(*_INTERPRETED, num_warps=4)
                for arch, tiles in _HALF[op][variant].items():
                    queries, keys, *stages = tiles[place]
                    rows[op, width, "half", arch, variant] = Config(queries, keys, num_stages=(*stages, 2)[0])
                    rows[op, width, "tf32", arch, variant] = Config(*_TF32[place], num_warps=4)
                    rows[op, width, "ieee", arch, variant] = Config(*_IEEE[place], num_warps=4, num_stages=1)
    return rows


TABLE = _rows()
