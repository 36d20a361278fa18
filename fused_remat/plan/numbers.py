"""The numbers of every unit and everything it may do, read where it stands: from recordings of the whole step.

Units that are alike share the work: in one recording each of them does something else, so that a chain of equal blocks
needs few recordings however much there is to choose from. Smaller workspaces are read for those units alone that the
smallest makes a difference to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from fused_remat._folding import name_of
from fused_remat.convert.rebind import original_class
from fused_remat.guards import RematError
from fused_remat.plan import ranks
from fused_remat.plan.places import AS_IT_IS, Doing, Place, assignment_of
from fused_remat.plan.reading import Parts, Taken, called_once, taken
from fused_remat.plan.solver import Solution
from fused_remat.plan.timeline import Option, Unit
from fused_remat.policy import Assignment
from fused_remat.recording import Recording

Record = Callable[[Assignment], Recording]
_MOST_TILES = 128  # workspaces in the peak as it is, about which tiles grow
_NEVER = 1 << 62
_ALONE = 1 << 20  # numbers of chains of one unit each


@dataclass(frozen=True)
class Variant:
    """What a unit does in one recording."""

    doing: Doing
    region: bool = False
    workspace: int | None = None  # bytes; None: the largest of those that are read


@dataclass(frozen=True)
class Numbers:
    """Everything the solver needs for one workspace, and what leads back from its answer.

    `units` alternate with fixed parts; `places[i]` and `doings[i]` are those of `units[i]`, None and () for fixed ones.
    """

    base: Recording  # everything as it is
    parts: Parts
    units: tuple[Unit, ...]
    places: tuple[Place | None, ...]
    doings: tuple[tuple[Doing, ...], ...]
    notes: tuple[str, ...]
    recordings: int
    workspace: int  # bytes, of every layer that runs fused
    tried: tuple[int, ...]  # bytes: the workspaces that were read, whether or not they change anything

    def as_it_is(self) -> Assignment:
        """That of the model whose every unit keeps everything."""
        return assignment_of({p.path: p for p in self.places if p is not None}, {}, [], self.workspace)

    def assignment(self, solution: Solution) -> Assignment:
        """What a solution means for the model."""
        doings, regions = {}, []
        for choice in solution.choices:
            span = range(choice.first, choice.last + 1)
            for unit, option in zip(span, choice.options, strict=True):
                if self.places[unit] is not None:
                    doings[self.places[unit].path] = self.doings[unit][option]
            if choice.region:
                regions.append(tuple(self.places[unit].path for unit in span))
        return assignment_of({p.path: p for p in self.places if p is not None}, doings, regions, self.workspace)


def read_numbers(
    model: nn.Module, places: Sequence[Place], record: Record, workspaces: Sequence[int],
    *, expect: Callable[[int], None] = lambda recordings: None,
) -> tuple[Numbers, ...]:  # fmt: skip
    """Records the step as it is and as often as it takes for every unit to have done everything; `expect` is told how
    often that will be, once it is known.

    `record(assignment)` is the recording of the step when the model is arranged so. `workspaces`: bytes, the largest
    first. There are numbers for that one, and for those of the others that change some. Those below a 128th of
    the peak as it is are not read: a prediction runs through every tile, and of those there are very many.
    """
    by_path, workspace = {place.path: place for place in places}, workspaces[0]
    base = record(assignment_of(by_path, {}, [], workspace))
    paths = called_once(base, list(by_path))
    everything = assignment_of({path: by_path[path] for path in paths}, {}, [], workspace)
    if everything != assignment_of(by_path, {}, [], workspace):  # the others stay as they were made
        base = record(everything)
    notes = [base.blind_note] if base.blind_note else []
    notes += [
        f"{path} is not called exactly once in forward, and stays as it is"
        for path in by_path
        if path not in set(paths)
    ]
    parts = taken(base, paths)
    read = [nbytes for nbytes in workspaces[1:] if nbytes * _MOST_TILES >= base.peak_bytes]
    workspaces = ranks.of_first_rank([workspace, *read])
    reader = _Variants(model, [by_path[path] for path in paths], parts, record, workspaces)
    expect(reader.expected())
    try:
        found = reader.read(regions=True)
    except RematError as error:
        notes.append(f"nothing runs as a region: {error}")
        found = reader.read(regions=False)
    alone = reader.alone(found)
    notes += alone.values()
    every: list[Numbers] = []
    for nbytes in workspaces:
        read = [_under(nbytes, variants) for variants in found]
        units, of_unit, doings = _units(reader.places, replace(parts, before=reader.before()), read)
        units = tuple(replace(unit, chain=_ALONE + i) if unit.chain in alone else unit for i, unit in enumerate(units))
        if all((units, doings) != (other.units, other.doings) for other in every):
            every.append(
                Numbers(
                    base, parts, units, of_unit, doings, tuple(notes), 1 + reader.recordings, nbytes, tuple(workspaces)
                )
            )
    return tuple(every)


def _under(workspace: int, found: dict[Variant, Taken]) -> dict[Variant, Taken]:
    """What the variants of a unit take under a workspace; where that makes no difference, as under the largest."""
    largest = {variant: took for variant, took in found.items() if variant.workspace is None}
    return {variant: found.get(replace(variant, workspace=workspace), took) for variant, took in largest.items()}


class _Variants:
    """Records all variants of all units, in as few steps as the units that are alike allow."""

    def __init__(self, model: nn.Module, places: list[Place], parts: Parts, record: Record, workspaces: Sequence[int]):
        self.places, self.parts, self.record, self.recordings = places, parts, record, 0
        self.workspace, *self.smaller = workspaces
        self._before = [parts.before]
        self.groups: dict[Any, list[int]] = {}
        for i, place in enumerate(places):
            key = _structure(model.get_submodule(place.path)), parts.units[i].flop
            self.groups.setdefault(key, []).append(i)

    def expected(self) -> int:
        """How many recordings `read` and `alone` will make, if everything runs as regions."""
        members = self.groups.values()
        others = max((-(-len(self._others(group[0])) // len(group)) for group in members), default=0)
        regions = max((-(-len(self._regions(group[0])) // len(group)) for group in members), default=0)
        chains = [place.chain for place in self.places]
        return others + regions + sum(chains.count(chain) > 1 for chain in set(chains))

    def read(self, *, regions: bool) -> list[dict[Variant, Taken]]:
        """For every unit what each variant takes."""
        every = [{Variant(AS_IT_IS): own} for own in self.parts.units]
        rest = {key: self._others(members[0]) for key, members in self.groups.items()}
        for _, took in self._recorded(rest, {}):
            self._share(took, every)
        changing = self._changing(every)
        rest = {key: [v for v in self._smaller(i) if v not in every[i]] for key, i in changing.items()}
        for _, took in self._recorded(rest, {}):
            self._share(took, every)
        if regions:
            # Beside regions are regions, which keep what they are called with: what the unit before puts out.
            fill = {i: Variant(AS_IT_IS, True) for i, place in enumerate(self.places) if place.path}
            rest = {k: self._regions(members[0]) for k, members in self.groups.items() if members[0] in fill}
            for key in rest.keys() & changing.keys():
                rest[key] += self._smaller(changing[key], region=True)
            for parts, took in self._recorded(rest, fill):
                others = {i for key, variants in took.items() for i in self._doers(key, variants)}
                for i in fill.keys() - others:
                    every[i].setdefault(Variant(AS_IT_IS, True), parts.units[i])
                self._share(took, every)
        return every

    def _others(self, unit: int) -> list[Variant]:
        """The last of `doings` rebuilds the most, and so shows whether the smallest workspace makes a difference."""
        others = [Variant(doing) for doing in self.places[unit].doings() if doing != AS_IT_IS]
        return others + [replace(variant, workspace=nbytes) for variant in others[-1:] for nbytes in self.smaller[-1:]]

    def _changing(self, every: list[dict[Variant, Taken]]) -> dict[Any, int]:
        """The groups, each with one of its units, to which the smallest workspace makes a difference (on rank 0: all
        ranks record the same)."""
        shown = [(key, members[0]) for key, members in self.groups.items() if self.places[members[0]].layers]
        if not self.smaller:
            return {}
        last = [Variant(self.places[i].doings()[-1]) for _, i in shown]
        differs = [
            every[i][variant] != every[i][replace(variant, workspace=self.smaller[-1])]
            for (_, i), variant in zip(shown, last, strict=True)
        ]
        return dict(pair for pair, is_so in zip(shown, ranks.of_first_rank(differs), strict=True) if is_so)

    def _smaller(self, unit: int, *, region: bool = False) -> list[Variant]:
        """What may depend on the workspace, under the smaller ones."""
        place = self.places[unit]
        doings = [d for d in (place.inside() if region else place.doings()) if d.fused or place.has_own]
        return [Variant(doing, region, nbytes) for nbytes in self.smaller for doing in doings]

    def _regions(self, unit: int) -> list[Variant]:
        """As it is first: the others of the first recording are that, too."""
        return [Variant(doing, True) for doing in self.places[unit].inside()]

    def _recorded(
        self, rest: dict[Any, list[Variant]], fill: dict[int, Variant]
    ) -> Iterator[tuple[Parts, dict[Any, dict[Variant, Taken]]]]:
        """Recordings until nothing is left of `rest`, with what its groups showed in each.

        The units in the middle of a group come first: the ends of a chain are not like the others.
        """
        while any(rest.values()):
            does, members = dict(fill), {}
            for key, variants in rest.items():
                members[key] = dict(zip(self._doers(key, variants), variants, strict=False))
                does.update(members[key])
                rest[key] = variants[len(members[key]) :]
            parts = self._take(does)
            yield (
                parts,
                {
                    key: {variant: self._relative(parts.units[i], i) for i, variant in shown.items()}
                    for key, shown in members.items()
                },
            )

    def _doers(self, key: Any, variants: Collection[Variant]) -> list[int]:
        """The units of a group that do these variants, in their order."""
        return sorted(self.groups[key], key=lambda i: i in (0, len(self.places) - 1))[: len(variants)]

    def _share(self, took: dict[Any, dict[Variant, Taken]], every: list[dict[Variant, Taken]]) -> None:
        for key, variants in took.items():
            for i in self.groups[key]:
                for variant, relative in variants.items():
                    every[i].setdefault(variant, self._absolute(relative, i))

    def _take(self, does: dict[int, Variant]) -> Parts:
        self.recordings += 1
        doings = {self.places[i].path: variant.doing for i, variant in does.items()}
        regions = [(self.places[i].path,) for i, variant in does.items() if variant.region]
        workspaces = {
            path: does[i].workspace if i in does and does[i].workspace else self.workspace
            for i, place in enumerate(self.places)
            for path in place.layers
        }
        assignment = assignment_of({place.path: place for place in self.places}, doings, regions, workspaces)
        took = taken(self.record(assignment), [place.path for place in self.places])
        self._before.append(took.before)
        return replace(took, units=tuple(map(self._with_the_rest, took.units, took.before, self.parts.before)))

    @staticmethod
    def _with_the_rest(unit: Taken, before: Taken, base: Taken) -> Taken:
        """A unit may let go of what it kept a moment after its backward: what the part before it, whose backward is
        next, has more of than in the step as it is counts for the unit, whatever else that one does."""
        if before.backward <= base.backward:
            return unit
        return replace(unit, backward=max(unit.backward, before.backward - before.kept + unit.gradient))

    def alone(self, found: list[dict[Variant, Taken]]) -> dict[int, str]:
        """By number, chains whose blocks do not run as one region, with the reason: one try for each."""
        chains: dict[int, list[str]] = {}
        for place, variants in zip(self.places, found, strict=True):
            if Variant(AS_IT_IS, True) in variants:
                chains.setdefault(place.chain, []).append(place.path)
        refused = {}
        for chain, paths in chains.items():
            if len(paths) > 1:
                try:
                    self.recordings += 1
                    with _quiet_fakes():
                        by_path = {place.path: place for place in self.places}
                        self.record(assignment_of(by_path, {}, [tuple(paths)], self.workspace))
                except Exception as error:  # blocks that get something else than the first got may raise anything
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                    refused[chain] = f"{name_of(paths)} run again one by one, not together: {reason}"
        return refused

    def before(self) -> tuple[Taken, ...]:
        """The fixed parts, each number the highest of all recordings: a region may keep what nobody kept otherwise.

        But the backward of those in front of a unit is that of the step as it is, see `_with_the_rest`.
        """
        highest = [
            Taken(*(max(getattr(part, f.name) for part in same) for f in fields(Taken)))
            for same in zip(*self._before, strict=True)
        ]
        fronts = zip(highest[:-1], self.parts.before, strict=False)
        return (*(replace(part, backward=base.backward) for part, base in fronts), highest[-1])

    def _relative(self, took: Taken, unit: int) -> Taken:
        """Units that are alike may differ by their place (the first hands no gradient on): by as much in all of it."""
        own = self.parts.units[unit]
        return replace(
            took, kept=took.kept - own.kept, forward=took.forward - own.forward, backward=took.backward - own.backward
        )

    def _absolute(self, took: Taken, unit: int) -> Taken:
        own = self.parts.units[unit]
        return replace(
            took,
            kept=max(took.kept + own.kept, 0),
            forward=took.forward + own.forward,
            backward=took.backward + own.backward,
        )


def _units(
    places: list[Place], parts: Parts, found: list[dict[Variant, Taken]]
) -> tuple[tuple[Unit, ...], tuple[Place | None, ...], tuple[tuple[Doing, ...], ...]]:
    units: list[Unit] = []
    of_unit: list[Place | None] = []
    doings: list[tuple[Doing, ...]] = []
    for i, part in enumerate(parts.before):
        if part.made or part.gradient or i in (0, len(places)):
            option = Option("fixed", part.kept, part.forward, part.backward)
            name = "before the units" if i == 0 else "after the units" if i == len(places) else "between units"
            units.append(Unit(name, (option,), part.gradient))
            of_unit.append(None)
            doings.append(())
        if i < len(places):
            unit, chosen = _unit(places[i], parts.units[i], found[i])
            units.append(unit)
            of_unit.append(places[i])
            doings.append(chosen)
    return tuple(units), tuple(of_unit), tuple(doings)


def _unit(place: Place, own: Taken, found: dict[Variant, Taken]) -> tuple[Unit, tuple[Doing, ...]]:
    region = found.get(Variant(AS_IT_IS, True))
    options = []
    for doing in place.doings():
        took, again = found[Variant(doing)], found.get(Variant(doing, True))
        option = Option(
            name=doing.name,
            kept=took.kept,
            forward=took.forward,
            backward=took.backward,
            cost=took.redone - own.redone,
            changes=len(place.layers) if doing.fused else 0,
            again=again.backward if again else -1,
            again_cost=again.redone - own.redone if again else 0,
        )
        options.append((option, doing))
    kept = _undominated(options)
    unit = Unit(
        path=place.path,
        options=tuple(option for option, _ in kept),
        gradient=own.gradient,
        chain=place.chain if region else -1,
        output=region.kept if region else 0,
        waiting=region.kept if region else 0,
        passing=region.forward if region else 0,
        replay=own.flop,
    )
    return unit, tuple(doing for _, doing in kept)


def _undominated(options: list[tuple[Option, Doing]]) -> list[tuple[Option, Doing]]:
    """Without those that another equals or beats in everything (the first of equals stays)."""

    def numbers(option: Option) -> tuple[int, ...]:
        return (
            option.kept, option.forward, option.backward, option.cost, option.changes,
            _NEVER if option.again < 0 else option.again, option.again_cost,
        )  # fmt: skip

    def beats(one: Option, other: Option) -> bool:
        return all(a <= b for a, b in zip(numbers(one), numbers(other), strict=True))

    left = []
    for i, (option, doing) in enumerate(options):
        beaten = any(
            beats(other, option) and (j < i or numbers(other) != numbers(option))
            for j, (other, _) in enumerate(options)
            if j != i
        )
        if not beaten:
            left.append((option, doing))
    return left


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """torch logs whatever an operator on fake tensors raises; here it may raise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that differ in nothing but the values of their parameters, as far as their form tells."""
    classes = tuple(
        (name, original_class(m), m.extra_repr() if not m._modules else "") for name, m in module.named_modules()
    )
    parameters = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module.named_parameters())
    return classes, parameters
