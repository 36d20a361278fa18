"""The workspace: the byte budget of the scratch buffer that a streaming pass cuts its tiles to.

Who decides, first to last: the `workspace=` argument of a call (a plan gives the layers that it arranges theirs that
way), `with fused_remat.workspace(bytes):`, the environment
variable FUSED_REMAT_WORKSPACE (read once, at import), the default of the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fused_remat._override import Override

MIB = 2**20
DEFAULT_BYTES = {"cuda": 256 * MIB, "cpu": 32 * MIB}

_ENVIRONMENT_VARIABLE = "FUSED_REMAT_WORKSPACE"
_from_environment = os.environ.get(_ENVIRONMENT_VARIABLE)
in_context = Override()


def check_bytes(name: str, value: object, remedy: str = "") -> int:
    """`value` if it is an int of at least 1 (bytes). Raises TypeError or ValueError naming `name`, with the `remedy`
    for one that is below."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int (bytes), got {value!r}; 32 MiB is {32 * MIB}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1 byte, got {value}{'; ' * bool(remedy)}{remedy}")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2**63 bytes, got {value}")
    return value


def check_workspace(name: str, value: object) -> int:
    """As `check_bytes`, of a workspace."""
    return check_bytes(name, value, "a pass takes the smallest tile below what fits")


def resolve(workspace: int | None, device_type: str) -> int:
    """The budget in bytes of a call on a device of that type ("cpu", "cuda", ...)."""
    if workspace is not None:
        return check_workspace("workspace", workspace)
    if in_context.value is not None:
        return in_context.value
    if _from_environment is not None:
        if not _from_environment.isdecimal():
            raise ValueError(f"{_ENVIRONMENT_VARIABLE} must be a number of bytes, got {_from_environment!r}")
        return check_workspace(_ENVIRONMENT_VARIABLE, int(_from_environment))
    return DEFAULT_BYTES.get(device_type, DEFAULT_BYTES["cuda"])


@contextmanager
def workspace(bytes: int) -> Iterator[None]:
    """Give every fused call inside the `with` block a workspace of that many bytes.

    Backward uses the budget that its forward was called with. A budget below the smallest tile is exceeded by that
    tile alone; `fused_remat.explain` says by how much.

    Raises:
        TypeError: `bytes` is not an int.
        ValueError: `bytes` is below 1.
    """
    with in_context.during(check_workspace("bytes", bytes)):
        yield
