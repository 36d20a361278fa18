"""The units of a model: which modules are decided about one by one, and what each of them may do.

`policy.chains.units_of` says which modules are units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fused_remat.policy import Arrangement, Assignment, LayerInfo
from fused_remat.policy.chains import units_of
from fused_remat.settings import Keep

FRACTIONS = (0.75, 0.5, 0.25)
_EVERY_PART = ("q", "k", "v", "out")


@dataclass(frozen=True)
class Doing:
    """What a unit does: its layers as they are (`fused` False), or fused with these residuals kept.

    As they are, modules of `fused_remat.nn` keep all their residuals.
    `mlp` and `attention` are None where the unit has no such layer.
    """

    fused: bool = False
    mlp: Keep | None = None
    attention: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        if not self.fused:
            return "as it is"
        parts = [] if self.mlp is None else [f"mlp keeps {_kept_name(self.mlp)}"]
        parts += [] if self.attention is None else [f"attention keeps {_kept_name(self.attention)}"]
        return "fused: " + ", ".join(parts)

    @property
    def letter(self) -> str:
        """K: everything is kept. F: a fraction. R: something is rebuilt."""
        letters = {self.letter_of("mlp"), self.letter_of("attention")}
        return "F" if "F" in letters else "R" if "R" in letters else "K"

    def letter_of(self, kind: str) -> str:
        """That of its layers of one kind alone, as `LayerInfo.kind` has it."""
        keep = self.attention if kind == "attention" else self.mlp
        if not self.fused or keep in (None, 1.0, _EVERY_PART):
            return "K"
        return "F" if isinstance(keep, float) and keep > 0 else "R"


AS_IT_IS = Doing()


@dataclass(frozen=True)
class Place:
    """A unit of the model."""

    path: str
    chain: int  # number of its chain; units outside of chains have one of their own
    layers: Mapping[str, LayerInfo]  # those in it that can run fused

    def doings(self) -> tuple[Doing, ...]:
        """Everything that this unit may do, without regions; as it is first."""
        kinds = {info.kind for info in self.layers.values()}
        if not kinds:
            return (AS_IT_IS,)
        mlps: tuple[Keep | None, ...] = (1.0, *FRACTIONS, ()) if kinds - {"attention"} else (None,)
        attentions = (_EVERY_PART, ("out",), ()) if "attention" in kinds else (None,)
        return (AS_IT_IS, *(Doing(True, mlp, attention) for mlp in mlps for attention in attentions))

    def inside(self) -> tuple[Doing, ...]:
        """Of `doings` those that it may do inside a region, where what is kept lives for a moment only."""
        ends = [doing for doing in self.doings() if doing.mlp in (None, 1.0, ())]
        return tuple(d for d in ends if d.attention in (None, _EVERY_PART) or d.mlp in (None, ()))

    @property
    def has_own(self) -> bool:
        """Whether modules of `fused_remat.nn` are in it, which take a workspace as it is, too."""
        return any(info.made_with is not None for info in self.layers.values())

    def says(self, doing: Doing) -> str:
        """What `doing` is for this unit, in words."""
        everything = self.has_own and not doing.fused
        return f"{doing.name}, fused_remat's layers keep everything" if everything else doing.name

    def keeps(self, doing: Doing) -> Iterator[tuple[str, Keep | None]]:
        """What `doing` is for each layer of this unit, as `Assignment.layers` has it."""
        for path, info in self.layers.items():
            keep = doing.attention if info.kind == "attention" else doing.mlp
            if doing.fused:
                yield path, info.residuals if keep == 1.0 else keep
            elif info.made_with is not None:
                yield path, None


def assignment_of(
    places: Mapping[str, Place],
    doings: Mapping[str, Doing],
    regions: list[tuple[str, ...]],
    workspace: int | Mapping[str, int] | None = None,
) -> Assignment:
    """The assignment in which the units (by path) do this; those that are not named do `AS_IT_IS`.

    `workspace`: as `Assignment` has it; where no layer is named none counts.
    """
    layers = {path: keep for unit, place in places.items() for path, keep in place.keeps(doings.get(unit, AS_IT_IS))}
    return Assignment(layers, tuple(regions), workspace=workspace if layers else None)


def places_of(arrangement: Arrangement) -> list[Place]:
    """The units of the arrangement's model, in the order of its modules."""
    layers = arrangement.layers
    chains = {path: number for number, chain in enumerate(arrangement.chains) for path in chain}
    found = units_of(arrangement.model, arrangement.chains, layers)
    alone = len(arrangement.chains)
    return [Place(path, chains.get(path, alone + i), _inside(path, layers)) for i, path in enumerate(found)]


def _inside(path: str, layers: Mapping[str, LayerInfo]) -> dict[str, LayerInfo]:
    return {name: info for name, info in layers.items() if name == path or not path or name.startswith(path + ".")}


def _kept_name(keep: Keep) -> str:
    if isinstance(keep, float):
        return "everything" if keep == 1.0 else f"{keep:.0%}"
    return "+".join(keep) or "nothing"
