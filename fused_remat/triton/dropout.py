"""Dropout masks in Triton kernels: the bits of `csrc/philox.h` and of `fused_remat/reference.py`.

An element is numbered by its place in the whole [B, H, Lq, Lk] or [M, F], never by tile, so that tile sizes, head
groups and backends cannot change a mask. Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(seed, index, threshold):
    """Which elements survive. `seed` int64 scalar; `index` int64 tile of linear indices; `threshold` of the host."""
    word0, word1, word2, word3 = tl.randint4x(seed, index >> 2)
    lane = index & 3
    word = tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))
    return (word.to(tl.int64) & 0xFFFFFFFF) >= threshold


def drop_threshold(p: float) -> int:
    """An element is dropped iff its 32-bit word is below this; halves round to even, as in C++. `p` in [0, 1)."""
    return round(p * 2**32)
