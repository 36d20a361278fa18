"""What `profile` found out, as an object, a table and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fused_remat.profile.growth import Growth
from fused_remat.profile.kept import KeptTensor
from fused_remat.profile.modules import ModuleBytes
from fused_remat.profile.recompute import Recompute, alive_at_peak
from fused_remat.profile.verdict import rounded, shares_of_peak
from fused_remat.recording import Recording

SCHEMA = 1
_TOP = 20


@dataclass(frozen=True)
class Profile:
    """One optimizer step of a model: what its memory consists of.

    Attributes:
        recording: every allocation of the step (see `fused_remat.recording.Recording`): the peak, its phase and module.
        kept: every storage that forward keeps for backward, the largest first, with the operation and the source line
            that keep it.
        unseen_bytes: kept bytes that the allocator counts and autograd's hooks do not see, so that they are in no entry
            of `kept`; `unseen_modules` are those that made them.
        modules: bytes by module (parameters, kept, transient peaks).
        recompute: how far recompute could lower the peak.
        verdict: one sentence. advice: what to try before recompute, the cheapest first. notes: what to know about these
            numbers.
        growth: by axis of the sweep.
        about: model class, inputs, loss, optimizer, device, versions.
    """

    recording: Recording
    kept: tuple[KeptTensor, ...]
    unseen_bytes: int
    unseen_modules: tuple[str, ...]
    modules: tuple[ModuleBytes, ...]
    recompute: Recompute
    verdict: str
    advice: list[str]
    notes: list[str]
    about: Mapping[str, Any]
    growth: Mapping[str, Growth] = field(default_factory=dict)

    @property
    def top(self) -> list[KeptTensor]:
        """The 20 largest of `kept`."""
        return list(self.kept[:_TOP])

    @property
    def shares(self) -> dict[str, float]:
        """The parts of the peak, which add up to 1: activations, parameters, gradients, optimizer state, temporary
        buffers, inputs and outputs."""
        return shares_of_peak(self.recording)

    @property
    def kept_by_module(self) -> dict[str, int]:
        """Bytes of `kept` by the module whose operation saves them first, in order of forward."""
        found: dict[str, int] = {}
        for tensor in self.kept:
            found[tensor.module] = found.get(tensor.module, 0) + tensor.nbytes
        order = {module.path: position for position, module in enumerate(self.modules)}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    def largest_size(self, axis: str, budget: int | str) -> int:
        """The largest size of the sweep's `axis` whose peak is *predicted* to be within the budget.

        See `Growth.largest_size`. Raises ValueError where no sweep of that name was run.
        """
        if axis not in self.growth:
            swept = ", ".join(map(repr, self.growth)) or "none; pass sweep= to profile"
            raise ValueError(f"axis must be one that was swept ({swept}), got {axis!r}")
        return self.growth[axis].largest_size(budget)

    def __str__(self) -> str:
        from fused_remat.profile.table import as_text

        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return {
            "schema": SCHEMA,
            "kind": "profile",
            **self.about,
            "source": self.recording.source,
            "peak_bytes": self.recording.peak_bytes,
            "peak_phase": self.recording.peak_phase,
            "peak_module": self.recording.peak_module,
            "at_peak": alive_at_peak(self.recording),
            "shares_of_peak": rounded(self.shares),
            "static": dict(self.recording.static),
            "gradient_bytes": gradient_bytes(self.recording),
            "kept_bytes": self.recording.kept_bytes,
            "kept": [tensor.to_dict() for tensor in self.kept],
            "unseen_bytes": self.unseen_bytes,
            "unseen_modules": list(self.unseen_modules),
            "modules": [module.to_dict() for module in self.modules],
            "recompute": self.recompute.to_dict(),
            "verdict": self.verdict,
            "advice": list(self.advice),
            "notes": list(self.notes),
            "growth": {axis: growth.to_dict() for axis, growth in self.growth.items()},
            "recording": self.recording.to_dict(),
        }


def gradient_bytes(recording: Recording) -> int:
    """Bytes of the gradients that the step leaves, those alive before it included."""
    return recording.static.get("gradients", 0) + sum(a.nbytes for a in recording.allocations if a.kind == "gradients")
