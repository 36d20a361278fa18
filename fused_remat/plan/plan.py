"""A plan: what to do with every layer, what that takes, and which model it is for. A small JSON file."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fused_remat.convert.report import Report
from fused_remat.plan.fingerprint import differences
from fused_remat.plan.peak import Peak
from fused_remat.policy import Arrangement, Assignment
from fused_remat.show.sketch import Sketch

SCHEMA = 1


@dataclass(frozen=True)
class FrontPoint:
    """A plan that no other beats: its predicted peak, its cost, and its measured peak where it was run."""

    peak: int  # bytes
    cost: int  # FLOP redone, by formula; with minimise="time" nanoseconds above the step as it is
    measured: int | None = None  # bytes; None: not run, or
    ran_out: bool = False  # memory did not suffice when it ran

    def to_dict(self) -> dict[str, int | bool | None]:
        """For JSON."""
        return {
            "predicted_peak_bytes": self.peak, "cost": self.cost, "measured_peak_bytes": self.measured,
            "out_of_memory": self.ran_out,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FrontPoint:
        """From the form of `to_dict`."""
        return cls(data["predicted_peak_bytes"], data["cost"], data["measured_peak_bytes"], data["out_of_memory"])


@dataclass(frozen=True)
class UnitRow:
    """What one unit of the plan does. `region`: number of its recomputed region; None: in none. `layers`: letters of
    the layers in it that run fused, by path."""

    path: str
    letter: str  # K: keeps everything. F: keeps a fraction. R: rebuilds
    does: str
    region: int | None
    predicted_kept: int | None  # bytes; None: not predicted
    measured_kept: int | None  # bytes; None: not run
    redone: int  # FLOP
    layers: dict[str, str] = field(default_factory=dict)


class ModelRef(weakref.ref):
    """Of the model that was planned. Copies of a plan share it; a pickle has None in its place, as a file has."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelRef:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@dataclass(frozen=True)
class Plan:
    """What `fused_remat.plan` found.

    Attributes:
        assignment: what is done to every layer.
        predicted: the peak of the step under the plan, on fake tensors; None where the model cannot run on them.
        measured: that of the run that it was chosen by; None with fake=True.
        everything_kept: the predicted peak of the model as it is (in bytes).
        budget: as it was given; `budget_bytes`: what that is, None for "min" and "knee".
        front: every plan that no other beats, cheapest first; those that were run have `measured`.
        chosen: the index of this plan in `front`.
        passed_over: indices of plans that were predicted to fit (or nearly) and were above the budget when run, or for
            which memory ran out.
        units: what each unit does.
        outside: (what, bytes) of the step that no plan changes: what is there before it, and the highest of what comes
            before and after the units.
        about: model class, parameters by dtype, loss, optimizer, mode and autocast of the step that was planned for.
        sketch: memory over the step in the run that it was chosen by (predicted with fake=True), thinned, for pictures;
            a pipeline stage's has what the other micro-batches hold. Of several ranks it is that of the first.
    """

    assignment: Assignment
    predicted: Peak | None
    measured: Peak | None
    everything_kept: int
    budget: str
    budget_bytes: int | None
    minimise: str
    count: tuple[str, ...]
    in_flight: int
    device: str
    device_bytes: int | None
    front: tuple[FrontPoint, ...]
    chosen: int
    passed_over: tuple[int, ...]
    units: tuple[UnitRow, ...]
    outside: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    fingerprint: dict[str, Any]
    inputs: tuple[str, ...]
    versions: dict[str, str]
    about: dict[str, Any]
    sketch: Sketch | None = None
    _model: ModelRef | None = field(default=None, compare=False, repr=False)

    @property
    def peak(self) -> int:
        """In bytes: measured where it was, else predicted."""
        return (self.measured or self.predicted).peak

    def apply(self, model: nn.Module | None = None, *, verify: str | None = None) -> Report:
        """Arrange `model` (None: the one that was planned) as the plan says; `report.revert()` takes it back.

        Args:
            verify: whether regions compare what they rebuilt with what forward made, as `verify` of
                `fused_remat.convert`. None: as `assignment` says, which is "off" in plans that were made.

        Raises:
            TypeError: `model` is not a module.
            ValueError: an unknown `verify`; or it is another model than the one that was planned; the message
                names what differs.
        """
        target = model
        if target is None:
            target = self._model() if self._model is not None else None
            if target is None:
                raise ValueError("this plan was loaded, or its model is gone; pass the model: plan.apply(model)")
        if not isinstance(target, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(target).__name__}")
        self.check_model(target)
        assignment = self.assignment.verified(verify)
        arrangement = Arrangement(target)
        arrangement.set(assignment)
        report = arrangement.report
        report.undo = arrangement.revert
        return report

    def check_model(self, model: nn.Module) -> None:
        """Raises ValueError, which names what differs, unless `model` is the one that was planned, up to its values."""
        found = differences(self.fingerprint, model)
        if found:
            raise ValueError(f"the plan is for another model (nothing was changed): {'; '.join(found)}")

    def explain(self) -> str:
        """The plan as a table: the same plan gives the same text."""
        from fused_remat.plan.explain import explain

        return explain(self)

    def __str__(self) -> str:
        return self.explain()

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for JSON."""
        return {
            "schema": SCHEMA,
            "kind": "fused_remat plan",
            "assignment": self.assignment.to_dict(),
            "predicted": self.predicted.to_dict() if self.predicted else None,
            "measured": self.measured.to_dict() if self.measured else None,
            "everything_kept_bytes": self.everything_kept,
            "budget": self.budget,
            "budget_bytes": self.budget_bytes,
            "minimise": self.minimise,
            "count": list(self.count),
            "in_flight": self.in_flight,
            "device": self.device,
            "device_bytes": self.device_bytes,
            "front": [point.to_dict() for point in self.front],
            "chosen": self.chosen,
            "passed_over": list(self.passed_over),
            "units": [vars(unit) for unit in self.units],
            "outside": [list(item) for item in self.outside],
            "notes": list(self.notes),
            "fingerprint": self.fingerprint,
            "inputs": list(self.inputs),
            "versions": dict(self.versions),
            "about": dict(self.about),
            "sketch": self.sketch.to_dict() if self.sketch else None,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """From the form of `to_dict`. Raises ValueError where it is none, or of another schema."""
        if not isinstance(data, dict):
            raise ValueError(f"expected a fused_remat plan of schema {SCHEMA}, got {type(data).__name__}")
        if data.get("kind") != "fused_remat plan" or data.get("schema") != SCHEMA:
            got = f"{data.get('kind')!r}, schema {data.get('schema')!r}"
            raise ValueError(f"expected a fused_remat plan of schema {SCHEMA}, got {got}")
        try:
            found = cls(
                assignment=Assignment.from_dict(data["assignment"]),
                predicted=Peak.from_dict(data["predicted"]) if data["predicted"] else None,
                measured=Peak.from_dict(data["measured"]) if data["measured"] else None,
                everything_kept=data["everything_kept_bytes"],
                budget=data["budget"],
                budget_bytes=data["budget_bytes"],
                minimise=data["minimise"],
                count=tuple(data["count"]),
                in_flight=data["in_flight"],
                device=data["device"],
                device_bytes=data["device_bytes"],
                front=tuple(map(FrontPoint.from_dict, data["front"])),
                chosen=data["chosen"],
                passed_over=tuple(data["passed_over"]),
                units=tuple(UnitRow(**unit) for unit in data["units"]),
                outside=tuple((name, nbytes) for name, nbytes in data["outside"]),
                notes=tuple(data["notes"]),
                fingerprint=data["fingerprint"],
                inputs=tuple(data["inputs"]),
                versions=data["versions"],
                about=data["about"],
                sketch=Sketch.from_dict(data["sketch"]) if data["sketch"] else None,
            )
        except KeyError as error:
            raise ValueError(f"the plan has no {error}") from None
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the plan is damaged: {error}") from error
        if not (isinstance(found.chosen, int) and 0 <= found.chosen < len(found.front)):
            raise ValueError(f"the plan is damaged: chosen is {found.chosen!r}, of {len(found.front)} in its front")
        if found.measured is None and found.predicted is None:
            raise ValueError("the plan is damaged: it has neither a measured nor a predicted peak")
        return found

    def to_json(self) -> str:
        """As text; the same plan gives the same bytes."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """From the form of `to_json`. Raises ValueError where it is none."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a fused_remat plan, but this is no JSON: {error}") from None
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote. Raises OSError, or ValueError where it is no plan."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))
