"""The masks of an attention call: checked, and brought into the form that the ops take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Corner = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]

_LONGEST = 2**62  # of a window's sides, as the ops take integers of 64 bits
CAUSAL_CODES = {None: 0, "top_left": 1, "bottom_right": 2}  # as csrc/attention.h numbers them


@dataclass(frozen=True)
class Band:
    """Which keys a query may see by position: `causal` corner or None, and (left, right) of a window."""

    causal: Corner | None
    window: Window

    def codes(self) -> tuple[int, int, int]:
        """(causal, window_left, window_right) as the ops take them; -1 is a side without limit."""
        left, right = (-1 if side is None else min(side, _LONGEST) for side in self.window)
        return CAUSAL_CODES[self.causal], left, right


def check_band(is_causal: bool, causal: Corner | None, window: Window | None) -> Band:
    """The band that these arguments ask for. Raises TypeError or ValueError naming the one that is wrong."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}; name a corner with causal=")
    if not isinstance(causal, (str, type(None))) or causal not in CAUSAL_CODES:
        raise ValueError(f"causal must be 'top_left', 'bottom_right' or None, got {causal!r}")
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window must be a pair (left, right) of ints or None, got {window!r}")
        for side in window:
            if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 0):
                raise ValueError(f"window sides must be ints of at least 0, or None for no limit; got {window!r}")
    return Band(causal or ("top_left" if is_causal else None), (None, None) if window is None else tuple(window))


def broadcast_mask(name: str, mask: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """`mask` as a 4-D view, not expanded, that broadcasts to `shape` [B, H, Lq, Lk].

    Raises ValueError where it does not broadcast.
    """
    if mask is None:
        return None
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"{name} must broadcast to [B, H, Lq, Lk] = {list(shape)}, got {list(mask.shape)}; add dims of size 1 "
            "where it is shared, e.g. mask[:, None] for one mask per sample"
        )
    return mask.view(sizes) if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]


def check_key_padding_mask(mask: Tensor | None, batch: int, length_k: int) -> None:
    """Raises ValueError unless `mask` is None or [B, Lk]."""
    if mask is not None and tuple(mask.shape) != (batch, length_k):
        raise ValueError(f"key_padding_mask must be [B, Lk] = [{batch}, {length_k}], got {list(mask.shape)}")
