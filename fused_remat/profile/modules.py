"""Bytes by module, and equal layers folded into one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fused_remat._folding import name_of, neighbours
from fused_remat.profile.kept import LOSS, KeptTensor, storages
from fused_remat.profile.recompute import highest_sum
from fused_remat.recording import Recording

_ABOUT = 1.25
_SHORT_LIVED = ("temporary", "rebuilt")


@dataclass(frozen=True)
class ModuleBytes:
    """What one module, with everything below it, holds.

    Attributes:
        path: as in `named_modules`; "" is the model, "(the loss)" what follows it.
        parameter_bytes: distinct storages.
        kept_bytes: of the storages that its operations are the first to save for backward.
        forward_transient_bytes, backward_transient_bytes: the highest sum, at one moment, of what is made in it and
            freed within the same phase; values rebuilt by recompute are among them.
    """

    path: str
    class_name: str
    parameter_bytes: int
    kept_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass
class Row:
    """One module, or several built alike that follow each other: `module` is the one that keeps most, `name` says which
    they are, `kept_bytes` are those of all together."""

    name: str
    depth: int
    module: ModuleBytes
    count: int
    kept_bytes: int


@dataclass
class _Node:
    module: ModuleBytes
    children: dict[str, _Node] = field(default_factory=dict)

    def structure(self) -> tuple[Any, ...]:
        """Equal for modules that are built alike."""
        below = tuple((name, child.structure()) for name, child in self.children.items())
        return self.module.class_name, self.module.parameter_bytes, below

    def is_like(self, other: _Node) -> bool:
        """Whether both are built alike and keep about as much (what all layers share is kept by the first)."""
        small, large = sorted((self.module.kept_bytes, other.module.kept_bytes))
        return large <= small * _ABOUT and self.structure() == other.structure()


def bytes_by_module(model: nn.Module, kept: Iterable[KeptTensor], recording: Recording) -> tuple[ModuleBytes, ...]:
    """An entry for every module, in the order of `named_modules`, and one for the loss if that keeps anything."""
    kept_in: dict[str, int] = {}
    for tensor in kept:
        for path in _with_parents(tensor.module):
            kept_in[path] = kept_in.get(path, 0) + tensor.nbytes
    transient = {phase: _transient(recording, phase) for phase in ("forward", "backward")}
    named = [(path, type(module).__name__, _parameter_bytes(module)) for path, module in model.named_modules()]
    if LOSS in kept_in:
        named.append((LOSS, "", 0))
    return tuple(
        ModuleBytes(
            path, class_name, parameters, kept_in.get(path, 0),
            transient["forward"].get(path, 0), transient["backward"].get(path, 0),
        )
        for path, class_name, parameters in named
    )  # fmt: skip


def folded(modules: Iterable[ModuleBytes], *, rows: int = 20) -> list[Row]:
    """At most about that many rows, the model first: equal siblings are one row, the smallest modules are left out."""
    root = _tree(modules)
    total = max(root.module.kept_bytes, 1)
    for share in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 2.0):
        found = list(_rows(root, "", 0, share * total))
        if len(found) <= rows:
            break
    return found


def patterns(modules: Iterable[ModuleBytes]) -> dict[str, str]:
    """The path of each module with stars for the numbers of layers that have equal ones beside them."""
    found: dict[str, str] = {}

    def visit(node: _Node, pattern: str) -> None:
        found[node.module.path] = pattern
        built = Counter(child.structure() for child in node.children.values())
        for name, child in node.children.items():
            is_one_of_many = name.isdecimal() and built[child.structure()] > 1
            visit(child, ".".join(filter(None, [pattern, "*" if is_one_of_many else name])))

    visit(_tree(modules), "")
    return found


@dataclass
class Alike:
    """Kept tensors of equal layers: `tensor` is one of them, `module` the path that they share, with stars."""

    tensor: KeptTensor
    module: str
    count: int = 1


def alike(kept: Iterable[KeptTensor], modules: Iterable[ModuleBytes]) -> list[Alike]:
    """The kept tensors, those of equal layers that differ in nothing else together; those with most bytes first."""
    pattern = patterns(modules)
    groups: dict[tuple[Any, ...], Alike] = {}
    for tensor in kept:
        key = (pattern[tensor.module], tensor.op, tensor.shape, tensor.dtype, tensor.source, tensor.nbytes)
        if key in groups:
            groups[key].count += 1
            groups[key].module = key[0] if groups[key].module != tensor.module else tensor.module
        else:
            groups[key] = Alike(tensor, tensor.module)
    return sorted(groups.values(), key=lambda same: -same.count * same.tensor.nbytes)


def _rows(node: _Node, base: str, depth: int, least: float) -> Iterable[Row]:
    """The rows below `node`; names are relative to the path `base`."""
    if depth == 0:
        yield Row(name_of([node.module.path]), 0, node.module, 1, node.module.kept_bytes)
    for group in _groups(node):
        first = max(group, key=lambda node: node.module.kept_bytes)
        if not _matters(first.module, least):
            continue
        only_folds = len(group) == 1 and first.children and len(_groups(first)) == 1 and len(first.children) > 1
        if only_folds:  # a container of equal layers: its row would repeat theirs
            yield from _rows(first, base, depth or 1, least)
            continue
        name = _relative(name_of([node.module.path for node in group]), base)
        kept = sum(node.module.kept_bytes for node in group)
        yield Row(name, max(depth, 1), first.module, len(group), kept)
        yield from _rows(first, first.module.path, max(depth, 1) + 1, least)


def _matters(module: ModuleBytes, least: float) -> bool:
    return module.kept_bytes > least or (least == 0 and module.kept_bytes > 0)


def _groups(node: _Node) -> list[list[_Node]]:
    """The children, equal ones that follow each other together (only those with numbers for names)."""

    def alike(one: _Node, other: _Node) -> bool:
        return _last_name(one).isdecimal() and _last_name(other).isdecimal() and one.is_like(other)

    return neighbours(node.children.values(), alike)


def _last_name(node: _Node) -> str:
    return node.module.path.rpartition(".")[2]


def _relative(path: str, base: str) -> str:
    return path[len(base) + 1 :] if base and path.startswith(f"{base}.") else path


def _tree(modules: Iterable[ModuleBytes]) -> _Node:
    nodes: dict[str, _Node] = {}
    for module in modules:
        node = nodes[module.path] = _Node(module)
        if module.path == LOSS:
            nodes[""].children[LOSS] = node
        elif module.path:
            parent, _, name = module.path.rpartition(".")
            nodes[parent].children[name] = node
    return nodes[""]


def _with_parents(path: str) -> list[str]:
    """`path` and the paths of the modules around it."""
    if path == LOSS:
        return [path]
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def _transient(recording: Recording, phase: str) -> Mapping[str, int]:
    intervals: dict[str, list[tuple[float, float, int]]] = {}
    for a in recording.allocations:
        if a.phase == phase and a.kind in _SHORT_LIVED:
            for path in _with_parents(a.module):
                intervals.setdefault(path, []).append((a.born, a.died, a.nbytes))
    return {path: highest_sum(own) for path, own in intervals.items()}


def _parameter_bytes(module: nn.Module) -> int:
    return sum(dict(pair for p in module.parameters() for pair in storages(p)).values())
