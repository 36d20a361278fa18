"""Questions to the table of attention kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NONE, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2
MIB = 2**20
TORCH = ("cudnn", "flash", "efficient")


@dataclass(frozen=True)
class Facts:
    """What the table is asked about; as it stands nothing is against any of its rows in forward."""

    backward: bool = False
    dtype: torch.dtype = BF16
    sizes: tuple[int, ...] = (16, 8, 8, 128, 128, 64, 64)  # B, H, Hk, Lq, Lk, E, Ev
    masks: bool = False
    causal: int = NONE
    window: tuple[int, int] = (-1, -1)
    extra_keys: int = 0
    dropout_p: float = 0.0
    softcap: float = 0.0
    aligned: bool = True
    knows_out: bool = True
    dweights: bool = False
    dmasks: bool = False
    scratch: int = 64 * MIB
    arch: int = 90
    multiprocessors: int = 132
    cudnn: int = 91501

    def but(self, **changes) -> Facts:
        return replace(self, **changes)

    def sized(self, **changes: int) -> Facts:
        names = ("batch", "heads", "kv_heads", "length_q", "length_k", "width", "value_width")
        sizes = dict(zip(names, self.sizes, strict=True)) | changes
        return self.but(sizes=tuple(sizes.values()))


FORWARD, BACKWARD = Facts(), Facts(backward=True)


def rows(facts: Facts) -> dict[str, list[str]]:
    """The table's rows in order, with the reasons of each."""
    f = facts
    texts = torch.ops.fused_remat.attention_routes(
        f.backward, f.dtype, f.sizes, f.masks, f.causal, *f.window, f.extra_keys, f.dropout_p, f.softcap, f.aligned,
        f.knows_out, f.dweights, f.dmasks, f.scratch, f.arch, f.multiprocessors, f.cudnn,
    )  # fmt: skip
    split = (text.partition(": ") for text in texts)
    return {name: reasons.split("; ") if reasons else [] for name, _, reasons in split}


def allocated(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def bytes_of_one(facts: Facts, row: str) -> int:
    """Of one sample and key-value head."""
    (reason,) = (reason for reason in rows(facts.but(scratch=0))[row] if "it allocates" in reason)
    assert "the workspace has 0 for it" in reason
    return int(re.search(r"it allocates (\d+) bytes", reason)[1])
