"""Recomputed regions for code that is no transformer layer, with guards against wrong gradients.

`region` says what the guards see and what they do not; `verify` compares the values of what is saved besides.
Parameters of modules that FSDP gathers inside a region are not compared. Forward hooks inside run again in the replay.
Nothing is guarded under `torch.compile`.
"""

from fused_remat.guards.errors import RematCache, RematDevice, RematError, RematMismatch, RematMutation, RematWarning
from fused_remat.guards.region import as_region, region, run_region

__all__ = [
    "RematCache",
    "RematDevice",
    "RematError",
    "RematMismatch",
    "RematMutation",
    "RematWarning",
    "as_region",
    "region",
    "run_region",
]
