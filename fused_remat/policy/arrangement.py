"""A model that can be switched quickly between assignments: its layers are examined once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import nn

from fused_remat.convert.attention import FusedAttention
from fused_remat.convert.attention_call import parameter_names
from fused_remat.convert.attention_layer import FusedAttentionLayer
from fused_remat.convert.fingerprint import fingerprint
from fused_remat.convert.fused import Fused
from fused_remat.convert.gather import Found, norms_beside, note_on, uncovered, verdicts
from fused_remat.convert.keep import Keeps
from fused_remat.convert.own import Own, examine_own, note_on_own, own_kind
from fused_remat.convert.promises import InlineMLP
from fused_remat.convert.rebind import Record, original_class, rebind, records_of
from fused_remat.convert.report import Entry, Report
from fused_remat.convert.select import Selector, select
from fused_remat.functional.multi_head_attention import RESIDUALS as ATTENTION_RESIDUALS
from fused_remat.policy.assignment import Assignment
from fused_remat.policy.chains import are_consecutive, chains_of, innermost_block
from fused_remat.policy.region import Region, why_no_region
from fused_remat.policy.segment import Segment, SegmentPart
from fused_remat.settings import RESIDUALS, Keep, check_keep, check_residuals

_LAYERS = (Fused, InlineMLP, FusedAttention, FusedAttentionLayer, *get_args(Own))
Records = dict[str, Record]


@dataclass(frozen=True)
class LayerInfo:
    """A layer that can run fused: an MLP or attention, stock or of `fused_remat.nn`."""

    kind: str  # "mlp", "gated mlp" or "attention"
    class_name: str
    residuals: tuple[str, ...]  # what it can be told to keep
    fractions: bool  # whether it can keep a fraction of them
    norms: tuple[str, ...]  # paths of the norms whose work it may do, while it runs fused
    block: str  # path of the innermost block of a chain that holds it; "" if none does
    made_with: Keep | None  # the `keep` of a module of `fused_remat.nn`; None of a stock layer
    like: str  # path of the first layer of the model that differs from it in weights only; its own if it is the first


# Models that a policy or plan arranged, in this process: also those in which it left everything as it was.
_arranged: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_arranged(model: nn.Module) -> bool:
    """Whether an `Arrangement` of `model` holds. Copies and loaded models are new ones."""
    return model in _arranged


class Arrangement:
    """Examines a model once, changes nothing, and then arranges it as often as wanted.

    Args:
        model: any module; on the meta device, too.
        include, exclude: which layers may run fused, as in `fused_remat.convert`. Regions may be anywhere.
        need_weights: as in `fused_remat.convert`, for attentions that are not converted yet.

    Attributes:
        layers: by path, in model order, the layers that can run fused.
        selected: paths of the modules that `include` and `exclude` leave to be looked at.
        skipped: what looks like such a layer and cannot, with reasons.
        chains: paths of consecutive children of equal class of an nn.Sequential or nn.ModuleList, outer ones first.
        assignment: what `set` was last given; None after `revert` and before.
        report: what was done then, in the form of `fused_remat.convert`.

    Raises as `fused_remat.convert`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        include: Selector | Iterable[Selector] | None = None,
        exclude: Selector | Iterable[Selector] | None = None,
        need_weights: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        self.model = model
        chosen = select(model, include, exclude)
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._before = {m: dict(records_of(m)) for m in model.modules() if records_of(m)}
        plain = {module: _without_region(records) for module, records in self._before.items()}
        try:
            for module, records in plain.items():  # what a region hides is examined, too
                rebind(module, records)
            found, self.skipped = _found(model, chosen, need_weights)
            self._norms = list(norms_beside(model, chosen, found))
        finally:
            for module, records in self._before.items():
                rebind(module, records)
        self.chains = chains_of(model)
        self._found = {entry.name: (entry, layer, record) for entry, layer, record in found}
        self.layers: Mapping[str, LayerInfo] = dict(self._infos())
        self.selected = frozenset(name for name, _ in chosen)
        managed = {module for _, module in chosen}
        parts = {part for _, layer, record in found for part, _ in _parts(layer, record)}
        # Conversions of layers that were not to be looked at stay.
        self._others = {m: records for m, records in self._before.items() if m not in managed | parts}
        self._bound = set(self._before)
        self._was_arranged = is_arranged(model)
        self.assignment: Assignment | None = None
        self.report = Report(skipped=list(self.skipped))

    @property
    def others(self) -> tuple[str, ...]:
        """Paths of converted layers that are not to be looked at: they stay as they are."""
        return tuple(name for name, module in self.model.named_modules() if module in self._others)

    def set(self, assignment: Assignment) -> None:
        """Arrange the model so, whatever it was before.

        Raises, before anything is changed: TypeError if it is no `Assignment`; ValueError for a path that is no layer
        or module here, a `keep` that its layer cannot have, or a region whose paths are no neighbours.
        """
        if not isinstance(assignment, Assignment):
            raise TypeError(f"assignment must be a fused_remat.policy.Assignment, got {type(assignment).__name__}")
        keeps = {path: self._keep(path, keep) for path, keep in assignment.layers.items() if self._is_known(path)}
        keeps = {path: keep for path, keep in keeps.items() if keep is not None}
        for path in assignment.workspace if isinstance(assignment.workspace, Mapping) else ():
            self._is_known(path, "workspace")
        self._check_regions(assignment)
        was = {module: dict(records_of(module)) for module in self._bound}
        wanted = self._wanted(keeps, assignment)
        self._rebind(wanted)
        self.assignment = assignment
        _arranged.add(self.model)
        self.report = self._report(keeps, assignment, was)

    def revert(self) -> list[str]:
        """Give the model back what it was when this arrangement was made; the names of the modules that changed."""
        changed = self._rebind(self._before)
        self.assignment, self.report = None, Report(skipped=list(self.skipped))
        if not self._was_arranged:
            _arranged.discard(self.model)
        return [name for name, module in self.model.named_modules() if module in changed]

    def _rebind(self, wanted: Mapping[nn.Module, Records]) -> set[nn.Module]:
        changed = set()
        for module in {**wanted, **dict.fromkeys(self._bound)}:
            records = wanted.get(module, {})
            if records != records_of(module):
                rebind(module, records)
                changed.add(module)
        self._bound = set(wanted)
        return changed

    def _wanted(self, keeps: Mapping[str, Keep], assignment: Assignment) -> dict[nn.Module, Records]:
        """The records of every module that has some then."""
        wanted = {module: dict(records) for module, records in self._others.items()}
        for path, keep in keeps.items():
            _, layer, record = self._found[path]
            record = replace(record, keep=keep, workspace=assignment.workspace_of(path))
            wanted.setdefault(layer, {})[record.method] = record
            for part, its_record in _parts(layer, record):
                wanted.setdefault(part, {})[its_record.method] = its_record
        for path, info in self.layers.items():
            workspace = assignment.workspace_of(path)
            is_named = path in assignment.layers
            if info.made_with is not None and path not in keeps and (is_named or workspace is not None):
                _, layer, record = self._found[path]
                keep = info.residuals if is_named else info.made_with
                wanted[layer] = {record.method: replace(record, keep=keep, workspace=workspace)}
        for (_, norm, record), readers in self._norms:
            if any(reader in keeps for reader in readers):
                wanted.setdefault(norm, {})[record.method] = record
        for paths in assignment.regions:
            members = [self._modules[path] for path in paths]
            segment = Segment(paths, members)
            for index, (path, member) in enumerate(zip(paths, members, strict=True)):
                records = wanted.setdefault(member, {})
                inner, verify = _unwrapped(records.get("forward")), assignment.verify
                names = parameter_names(original_class(member))
                records["forward"] = (
                    SegmentPart(segment, index, names, inner, verify)
                    if len(paths) > 1
                    else Region(path, names, inner, verify)
                )
        return wanted

    def _is_known(self, path: str, where: str = "layers") -> bool:
        if path not in self._found:
            known = ", ".join(map(repr, list(self._found)[:4])) or "none"
            refused = next((entry.reason for entry in self.skipped if entry.name == path), "")
            raise ValueError(
                f"{where} names {path!r}, but it is no layer that can run fused{': ' * bool(refused)}{refused}; "
                f"those are {known}, ..."
            )
        return True

    def _keep(self, path: str, keep: Keep | None) -> Keep | None:
        """`keep` in the order of the layer's residuals, if the layer can have it."""
        if keep is None:
            return None
        kind = self._found[path][0].kind
        try:
            if kind == "attention":
                return check_residuals(keep, ATTENTION_RESIDUALS, "an attention")
            return check_keep(keep, gated=kind == "gated mlp")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None

    def _check_regions(self, assignment: Assignment) -> None:
        for paths in assignment.regions:
            unknown = [path for path in paths if path not in self._modules]
            if unknown:
                raise ValueError(f"regions has {unknown[0]!r}, but the model has no such module")
            for path in paths:
                reason = why_no_region(self._modules[path])
                if reason is not None:
                    raise ValueError(f"regions has {path!r}, {reason}; leave it out, e.g. with exclude=")
            if len(paths) > 1 and not are_consecutive(self.model, paths):
                raise ValueError(
                    f"regions has {paths!r}, which are no neighbours in one nn.Sequential or nn.ModuleList; give each "
                    "a region of its own"
                )
        modules = [self._modules[path] for path in assignment.paths]
        if len(set(modules)) < len(modules):
            raise ValueError(
                f"regions hold one module twice, which has several places in the model: {assignment.paths}"
            )

    def _infos(self) -> Iterator[tuple[str, LayerInfo]]:
        norms: dict[str, list[str]] = {}
        for (entry, _, _), readers in self._norms:
            for reader in readers:
                norms.setdefault(reader, []).append(entry.name)
        first: dict[Any, str] = {}
        for path, (entry, layer, record) in self._found.items():
            block = innermost_block(path, self.chains)
            is_attention = entry.kind == "attention"
            yield (
                path,
                LayerInfo(
                    kind=entry.kind,
                    class_name=entry.class_name,
                    residuals=ATTENTION_RESIDUALS if is_attention else RESIDUALS[entry.kind == "gated mlp"],
                    fractions=not is_attention,
                    norms=tuple(norms.get(path, ())),
                    block="" if block is None else block[0][block[1]],
                    made_with=layer.keep if isinstance(record, Own) else None,
                    like=first.setdefault((fingerprint(layer), record.kind), path),
                ),
            )

    def _report(self, keeps: Mapping[str, Keep], assignment: Assignment, was: Mapping[nn.Module, Records]) -> Report:
        """What `assignment` made of the model; layers that were so before are among the skipped."""
        report = Report(skipped=[entry for entry in self.skipped if entry.name not in assignment.paths])
        if assignment.verify != "off" and not assignment.regions:
            report.notes.append(f"verify={assignment.verify!r} compares nothing: no module is recomputed as a region")
        for name, layer in self.model.named_modules():
            now, before = _without_region(records_of(layer)), _without_region(was.get(layer, {}))
            entry = Entry(name, original_class(layer).__name__)
            if layer in self._others:
                continue
            for method, record in now.items():
                if record.describe():  # else its block says it
                    done = _settled(record, before.get(method)) or replace(
                        entry,
                        kind=record.kind,
                        became=record.describe(),
                        note=self._note(name, layer, record, before, assignment),
                    )
                    if isinstance(done, str):
                        report.skipped.append(replace(entry, reason=done))
                    else:
                        report.converted.append(done)
            if not now and any(record.describe() for record in before.values()):
                again = "runs its own code" if own_kind(layer) is None else f"keeps {layer.keep}, as it was made,"
                report.skipped.append(replace(entry, reason=f"{again} again"))
        had = {paths for records in was.values() for record in records.values() for paths in _region_paths(record)}
        for paths in assignment.regions:
            entry = self._region_entry(paths, keeps)
            if paths in had:
                report.skipped.append(replace(entry, kind="", became="", reason=f"already a {entry.became}"))
            else:
                report.converted.append(entry)
        return report

    def _note(self, name: str, layer: nn.Module, record: Record, before: Records, assignment: Assignment) -> str:
        old = before.get(record.method)
        was = f"was {old.describe()}" if old is not None else note_on_own(layer, record)
        keeps_all = isinstance(record, Own) and assignment.layers.get(name) is None
        inside = "" if keeps_all else _note_inside(name, record, assignment)
        return "; ".join(filter(None, [was, note_on(self.model, name, record), inside]))

    def _region_entry(self, paths: tuple[str, ...], keeps: Mapping[str, Keep]) -> Entry:
        inside = [p for p in keeps if any(p == path or p.startswith(path + ".") for path in paths)]
        blocks = f"{len(paths)} blocks, {paths[0]} ... {paths[-1]}" if len(paths) > 1 else "the module"
        holds = f", {len(inside)} fused layers inside" if inside else ""
        became = f"recomputed region of {blocks}: keeps what it is called with{holds}"
        why = dict.fromkeys(f"not fused: {entry.reason}" for entry in self.skipped if entry.name in paths)
        return Entry(paths[0], original_class(self._modules[paths[0]]).__name__, "region", became, "; ".join(why))


def _settled(record: Record, before: Record | None) -> str:
    """Why there was nothing to do for `record`; "" if there was."""
    return f"already converted: {record.describe()}" if record == before else ""


def _region_paths(record: Record) -> list[tuple[str, ...]]:
    """Of the region that begins with the module of `record`, if any."""
    if isinstance(record, Region):
        return [(record.path,)]
    return [record.segment.paths] if isinstance(record, SegmentPart) and record.index == 0 else []


def _note_inside(name: str, record: Record, assignment: Assignment) -> str:
    """What it costs that a fused layer is inside a recomputed region."""
    inside = any(name == path or name.startswith(path + ".") for path in assignment.paths)
    if not inside or not isinstance(record, _LAYERS):
        return ""
    return (
        f"inside a region: {record.kind} is rebuilt twice, once by the region (its forward runs again there) and once "
        "in its own backward; leave it stock there, or the block out of the region"
    )


def _parts(layer: nn.Module, record: Record) -> list[tuple[nn.Module, Record]]:
    return list(record.parts(layer)) if isinstance(record, InlineMLP) else []


def _unwrapped(record: Record | None) -> Record | None:
    """What a module is besides a region."""
    return record.inner if isinstance(record, (Region, SegmentPart)) else record


def _without_region(records: Records) -> Records:
    unwrapped = {method: _unwrapped(record) for method, record in records.items()}
    return {method: record for method, record in unwrapped.items() if record is not None}


def _found(
    model: nn.Module, chosen: list[tuple[str, nn.Module]], need_weights: bool
) -> tuple[list[Found], list[Entry]]:
    """The layers that run fused or can, and those that cannot with reasons."""
    found, skipped = [], []

    def add(name: str, layer: nn.Module, record: Record) -> None:
        entry = Entry(name, original_class(layer).__name__, kind=record.kind, became=record.describe())
        found.append((entry, layer, record))

    stock, ours = [], []
    for name, layer in chosen:
        records = [r for r in records_of(layer).values() if isinstance(r, _LAYERS)]
        for record in records:
            add(name, layer, record)
        if not records_of(layer):
            own = examine_own(layer)
            (stock if own is None else ours).append((name, layer, own))
    examined = verdicts([(name, layer) for name, layer, _ in stock], Keeps(), need_weights)
    for name, layer, verdict in (*ours, *examined):
        if isinstance(verdict, str):
            skipped.append(Entry(name, type(layer).__name__, reason=verdict))
        else:
            add(name, layer, verdict)
    order = {layer: i for i, (_, layer) in enumerate(chosen)}
    found.sort(key=lambda item: order[item[1]])
    return found, uncovered(skipped, found)
