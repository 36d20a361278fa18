"""Policies by name, and rules by the names of modules: from words to an `Assignment`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fused_remat.convert.keep import Keeps, check_keeps
from fused_remat.policy.arrangement import Arrangement
from fused_remat.policy.assignment import Assignment
from fused_remat.policy.chains import blocks_without, equal_segments, innermost_block, units_of
from fused_remat.settings import Keep

REGION = "region"


@dataclass(frozen=True)
class Policy:
    """What a name stands for."""

    keeps: Keeps | None  # of the layers that can run fused; None: they run their own code
    regions: bool  # whether blocks without such a layer are recomputed
    says: str
    segments: bool = False  # whether chains are cut into equal segments, each recomputed as one region


POLICIES: dict[str, Policy] = {
    "everything": Policy(
        None, False, "nothing is dropped: every layer runs its own code, those of fused_remat keep all their residuals"
    ),
    "selective": Policy(
        Keeps(mlp=("up", "gate"), attention=("q", "k", "v", "out")),
        False,
        "activations, norms and the core of attention are rebuilt; the output of every matrix product is kept, and "
        "none is redone",
    ),
    "full": Policy(
        Keeps(mlp=(), attention=()),
        True,
        "MLPs and attentions keep the residual stream alone, norms included; blocks that hold no such layer keep what "
        "they are called with",
    ),
    "sqrt": Policy(
        None,
        False,
        "each chain of n blocks is cut into ceil(sqrt(n)) equal segments (Chen et al. 2016), each recomputed as one "
        "region, which keeps what its first block is called with; every layer runs its own code",
        segments=True,
    ),
}


def policies() -> dict[str, str]:
    """The names that `fused_remat.convert(model, policy=...)` knows, each with what it does.

    From the most that forward keeps to the least: "everything", "selective", "full", "sqrt".

    Beside a name, `policy` takes rules, a mapping of module names to what is done there, of which the first that
    matches a module or one above it counts:

        {"encoder.layers.0": "everything",    # a policy by name
         "*.mlp": 0.25,                        # what MLPs keep, as `keep` of `convert`
         "*.attention": ("out",),              # what attentions keep
         "decoder.stage*": "region"}           # modules that are recomputed as a whole, whatever they are

    `*` matches dots, too. Layers that no rule matches run their own code, modules of `fused_remat` (MLP, GatedMLP,
    MultiheadAttention) with the `keep` that they were made with. `every=n` applies a policy to every n-th block of
    each chain of equal blocks, from the first on. A `fused_remat.plan` is a policy as well.

    "sqrt" is for chains whose blocks run one after the other, each on what the one before returned and on the same
    other arguments. Where the code between them reads an output, `fused_remat.policy.SegmentError` says so in forward.
    """
    return {name: policy.says for name, policy in POLICIES.items()}


def assignment_of(arrangement: Arrangement, policy: Any, every: int = 1, verify: str | None = None) -> Assignment:
    """What `policy` says about the model of `arrangement`; `verify`: see `Assignment`, None: its own, or "off".

    Raises: TypeError: `policy` is none of a name, a mapping of rules, an `Assignment`, or a plan that holds one, or
    `every` is no int. ValueError: an unknown name; `every` below 1, beside a plan or "sqrt"; a rule that matches
    nothing; "sqrt" without a chain; another `verify`.
    """
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every must be an int of at least 1, got {every!r}")
    if every < 1:
        raise ValueError(f"every must be an int of at least 1, got {every!r}")
    if (check_model := getattr(policy, "check_model", None)) is not None:  # a plan is for one model
        check_model(arrangement.model)
    given = getattr(policy, "assignment", policy)
    if isinstance(given, Assignment):
        if every != 1:
            raise ValueError(f"every={every} goes with a policy by name or rules; a plan says it for every block")
        return given.verified(verify)
    if isinstance(policy, Mapping):
        chosen = _Rules.of(arrangement, policy)
    elif isinstance(policy, str):
        chosen = _Rules(arrangement, {"*": _meaning(policy)})
    else:
        raise TypeError(
            f"policy must be one of {_names()}, a mapping of module names to these, or a plan; got {policy!r}"
        )
    return chosen.assignment(every).verified(verify)


def _names() -> str:
    return ", ".join(map(repr, POLICIES))


def _meaning(value: Any, rule: str = "") -> Policy | str:
    """What a policy's name or a rule's value stands for."""
    where = f"policy[{rule!r}]" if rule else "policy"
    if isinstance(value, str):
        if rule and value == REGION:
            return REGION
        if value not in POLICIES:
            raise ValueError(f"{where} must be one of {_names()}{' or ' + repr(REGION) if rule else ''}; got {value!r}")
        return POLICIES[value]
    if value is None:
        raise TypeError(f"{where} must be a policy's name, 'region' or what to keep, got None; 'everything' keeps all")
    try:
        return Policy(check_keeps(value), False, "")
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


@dataclass(frozen=True)
class _Rules:
    """Rules by glob, in their order; every module has the first that matches it or a module above it."""

    arrangement: Arrangement
    rules: Mapping[str, Policy | str]

    @classmethod
    def of(cls, arrangement: Arrangement, policy: Mapping[Any, Any]) -> _Rules:
        if not policy:
            raise ValueError("policy holds no rules; give at least one, e.g. {'*': 'full'}")
        for rule in policy:
            if not isinstance(rule, str):
                raise TypeError(f"policy must map module names to what is done there, got {rule!r} as a name")
        rules = cls(arrangement, {rule: _meaning(value, rule) for rule, value in policy.items()})
        rules.check()
        return rules

    def check(self) -> None:
        """Raises ValueError for a rule that decides nothing."""
        names = [name for name, _ in self.arrangement.model.named_modules() if name]
        first = {name: self.first(name) for name in names}
        decided = {first[name] for name in self._deciding(names)}
        decided |= {first[path] for paths in self._segments() for path in paths}
        for rule, meaning in self.rules.items():
            matching = [name for name in names if _matches(rule, name)]
            if not matching:
                known = ", ".join(map(repr, names[:3]))
                raise ValueError(f"policy names {rule!r}, but the model has no such module; it has {known}, ...")
            if not any(first[name] == rule for name in matching):
                earlier = list(dict.fromkeys(first[name] for name in matching))
                raise ValueError(
                    f"policy names {rule!r} after {', '.join(map(repr, earlier))}, which matches all the same modules: "
                    "the first that matches counts; put it before"
                )
            if meaning != REGION and rule not in decided:
                raise ValueError(
                    f"policy names {rule!r}, where there is nothing to decide: no layer that can run fused and "
                    f"no block (for example {matching[0]!r}); 'region' recomputes any module"
                )

    def _deciding(self, names: list[str]) -> list[str]:
        """Of `names`, those that a policy can say something about."""
        refused = {entry.name for entry in self.arrangement.skipped}
        blocks = set(blocks_without(self.arrangement.model, set(self.arrangement.layers)))
        return [name for name in names if name in self.arrangement.layers or name in refused or name in blocks]

    def first(self, name: str) -> str | None:
        """The rule for the module `name`; None if there is none."""
        return next((rule for rule in self.rules if _matches(rule, name)), None)

    def meaning(self, name: str) -> Policy | str | None:
        rule = self.first(name)
        return self.rules["*"] if rule is None and "*" in self.rules else None if rule is None else self.rules[rule]

    def assignment(self, every: int) -> Assignment:
        arrangement, cuts = self.arrangement, [m for m in self.rules.values() if isinstance(m, Policy) and m.segments]
        if cuts and every != 1:
            raise ValueError(f"every={every} goes with what is decided block by block; 'sqrt' cuts whole chains")
        segments = self._segments()
        if cuts and not segments:
            raise ValueError(
                "policy is 'sqrt', but there is no chain to cut: no consecutive children of equal class in an "
                "nn.Sequential or nn.ModuleList; 'full' and 'region' need none"
            )

        def is_passed_over(name: str) -> bool:
            block = innermost_block(name, arrangement.chains)
            return block is not None and block[1] % every != 0

        layers: dict[str, Keep | None] = {}
        for name, info in arrangement.layers.items():
            meaning = self.meaning(name)
            keeps = meaning.keeps if isinstance(meaning, Policy) and not is_passed_over(name) else None
            if meaning is not None or info.made_with is None:
                layers[name] = None if keeps is None else _keep(keeps, info)
        regions = [(name,) for name in self._regions([path for paths in segments for path in paths])]
        regions = [*segments, *(paths for paths in regions if not is_passed_over(paths[0]))]
        order = {name: i for i, (name, _) in enumerate(arrangement.model.named_modules())}
        return Assignment(layers, tuple(sorted(regions, key=lambda paths: order[paths[0]])))

    def _segments(self) -> list[tuple[str, ...]]:
        """Of each chain the neighbours that "sqrt" decides about, cut into equal segments."""
        arrangement, segments = self.arrangement, []
        units = set(units_of(arrangement.model, arrangement.chains, arrangement.layers))

        def is_meant(path: str) -> bool:
            meaning = self.meaning(path)
            wanted = isinstance(meaning, Policy) and meaning.segments
            return wanted and path in units and path in arrangement.selected

        for chain in arrangement.chains:
            for meant, run in groupby(chain, is_meant):
                segments += equal_segments(list(run)) if meant else []
        return segments

    def _regions(self, above: Sequence[str]) -> list[str]:
        """Modules that rules name as regions, the outermost of each branch and none in `above`, which are regions
        already; and what "full" recomputes."""
        arrangement, model, named = self.arrangement, self.arrangement.model, []
        for name, _ in model.named_modules():
            meant = (
                name
                and name in arrangement.selected
                and self.meaning(name) == REGION
                and fnmatch.fnmatchcase(name, self.first(name))
            )
            if meant and not any(name == other or name.startswith(other + ".") for other in [*named, *above]):
                named.append(name)
        fused = {*arrangement.layers, *arrangement.others}
        refused = [entry.name for entry in arrangement.skipped if entry.name]
        others = []
        for name in dict.fromkeys([*blocks_without(model, fused), *refused]):
            meaning = self.meaning(name)
            outer = [*named, *others, *above]
            inside = any(name == other or name.startswith(other + ".") for other in outer)
            holds = any(layer == name or layer.startswith(name + ".") for layer in fused)
            wanted = isinstance(meaning, Policy) and meaning.regions and name in arrangement.selected
            if wanted and not inside and not holds:
                others.append(name)
        return [*named, *others]


def _keep(keeps: Keeps, info: Any) -> Keep:
    """What a layer keeps of what `keeps` names, whatever of it the layer has."""
    keep = keeps.attention if info.kind == "attention" else keeps.mlp
    return tuple(name for name in info.residuals if name in keep) if isinstance(keep, tuple) else keep


def _matches(rule: str, name: str) -> bool:
    """Whether `rule` is a glob of the module `name` or of one above it."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:depth]), rule) for depth in range(1, len(parts) + 1))
