"""What is done to every layer and block of a model: the one form in which policies and plans say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fused_remat.budget import check_workspace
from fused_remat.guards.region import VERIFY
from fused_remat.settings import Keep


@dataclass(frozen=True)
class Assignment:
    """Which layers run fused and what they keep, and which modules are recomputed as regions.

    Attributes:
        layers: path of a layer that `fused_remat.convert` can fuse, or of a module of `fused_remat.nn` -> what it is
            to keep, as `keep` of its kind: a tuple of residual names, or for an MLP a fraction. None: everything; a
            stock layer runs its own code. One that is not named is as it was made.
        regions: each the paths of one recomputed region: a single module, or consecutive children of one nn.Sequential
            or nn.ModuleList that run as one.
        verify: "off", "once" or "always": whether regions compare what they rebuilt with what forward made.
        workspace: bytes of the workspace of every layer in `layers`, and of all modules of `fused_remat.nn`, whatever
            is in force where they are called; or a mapping of path to that. None, or a path that is not named:
            whatever is in force.

    Raises TypeError or ValueError where it has another form.
    """

    layers: Mapping[str, Keep | None] = field(default_factory=dict)
    regions: tuple[tuple[str, ...], ...] = ()
    verify: str = "off"
    workspace: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise TypeError(f"layers must be a mapping of path to keep, got {type(self.layers).__name__}")
        for path, keep in self.layers.items():
            fits = keep is None or isinstance(keep, (tuple, list)) or type(keep) in (int, float)
            if not isinstance(path, str) or not fits:
                raise TypeError(f"layers has {path!r}: {keep!r}; expected a path and a tuple, a fraction or None")
        if isinstance(self.regions, str) or any(isinstance(paths, str) for paths in self.regions):
            raise TypeError(f"regions must be tuples of paths, got {self.regions!r}; write ((path,), ...)")
        if self.verify not in VERIFY:
            raise ValueError(f"verify must be one of {', '.join(map(repr, VERIFY))}; got {self.verify!r}")
        if isinstance(self.workspace, Mapping):
            object.__setattr__(
                self, "workspace", {p: check_workspace(f"workspace[{p!r}]", n) for p, n in self.workspace.items()}
            )
        elif self.workspace is not None:
            check_workspace("workspace", self.workspace)
        layers = {path: tuple(keep) if isinstance(keep, list) else keep for path, keep in self.layers.items()}
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "regions", tuple(tuple(paths) for paths in self.regions))
        repeated = {path for path in self.paths if self.paths.count(path) > 1}
        if repeated or not all(self.regions):
            raise ValueError(f"regions must hold every path once and at least one each; got {self.regions!r}")

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all modules in regions."""
        return tuple(path for paths in self.regions for path in paths)

    def verified(self, verify: str | None) -> Assignment:
        """The same with another `verify`; None: this one. Raises ValueError as the constructor."""
        return self if verify is None else replace(self, verify=verify)

    def workspace_of(self, path: str) -> int | None:
        """In bytes, of the layer at `path`; None: whatever is in force where it is called."""
        return self.workspace.get(path) if isinstance(self.workspace, Mapping) else self.workspace

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for JSON."""
        layers = {path: list(keep) if isinstance(keep, tuple) else keep for path, keep in self.layers.items()}
        return {
            "layers": layers, "regions": [list(paths) for paths in self.regions], "verify": self.verify,
            "workspace_bytes": self.workspace,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Assignment:
        """From the form of `to_dict`. Raises TypeError or ValueError where it has another."""
        unknown = set(data) - {"layers", "regions", "verify", "workspace_bytes"}
        if unknown:
            raise ValueError(f"an assignment has no {', '.join(sorted(map(repr, unknown)))}")
        given = dict(data)
        return cls(workspace=given.pop("workspace_bytes", None), **given)
