"""`profile`: where the memory of an optimizer step goes, which lines keep it, how it grows, and what would help.

In reading order: `guard` refuses where the numbers would be wrong; `kept` lists what forward keeps and the line that
keeps it; `modules` adds up by module and folds equal layers; `recompute` bounds what recompute could do; `axes`, `laws`
and `growth` run a sweep; `verdict` says it in words; `profile` holds the result, `table` prints it; `run` joins them.
"""

from __future__ import annotations

from fused_remat.profile.axes import Axis
from fused_remat.profile.growth import Growth, Point, TensorLaw
from fused_remat.profile.kept import KeptTensor, Saver
from fused_remat.profile.laws import Law
from fused_remat.profile.modules import ModuleBytes
from fused_remat.profile.profile import Profile
from fused_remat.profile.recompute import Recompute
from fused_remat.profile.run import profile

__all__ = [
    "Axis",
    "Growth",
    "KeptTensor",
    "Law",
    "ModuleBytes",
    "Point",
    "Profile",
    "Recompute",
    "Saver",
    "TensorLaw",
    "profile",
]
