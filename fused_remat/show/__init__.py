"""Pictures of what is kept, rebuilt and where the peak is: PNG, SVG, one offline HTML page, and letters for a terminal.

Nothing heavy is imported before a picture is drawn; without matplotlib only `strip` and `print_strip` work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_remat.show.growth_picture import Curve, curves_of, growth
    from fused_remat.show.layer_strip import print_strip, strip
    from fused_remat.show.life_picture import life_bars
    from fused_remat.show.memory_picture import memory
    from fused_remat.show.report import write_report
    from fused_remat.show.tradeoff_picture import Point, points_of, tradeoff

__all__ = [
    "Curve",
    "Point",
    "curves_of",
    "growth",
    "life_bars",
    "memory",
    "points_of",
    "print_strip",
    "strip",
    "tradeoff",
    "write_report",
]

_WHERE = {
    "Curve": "growth_picture",
    "Point": "tradeoff_picture",
    "curves_of": "growth_picture",
    "growth": "growth_picture",
    "life_bars": "life_picture",
    "memory": "memory_picture",
    "points_of": "tradeoff_picture",
    "print_strip": "layer_strip",
    "strip": "layer_strip",
    "tradeoff": "tradeoff_picture",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_WHERE[name]}"
    if name not in ("Curve", "Point", "curves_of", "points_of", "print_strip", "strip"):
        from fused_remat.show.theme import require_matplotlib

        require_matplotlib()  # before a module that needs numpy, which comes with it
    return getattr(importlib.import_module(module), name)
