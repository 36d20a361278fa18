"""The chains of a model, children of equal class that run one after the other; its units, and its blocks without fused
layers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, pairwise

from torch import nn

from fused_remat.convert.rebind import original_class

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def chains_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Paths of two or more consecutive children of equal class of one nn.Sequential or nn.ModuleList, in their order.

    Outer chains come before the chains in their blocks. A module that has several places in the model is in no chain.
    """
    places: dict[nn.Module, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        places[module] = places.get(module, 0) + 1
    chains = []
    for path, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            children = [(name, child) for name, child in module._modules.items() if child is not None]
            for (_, once), run in groupby(children, key=lambda item: (original_class(item[1]), places[item[1]] == 1)):
                paths = tuple(f"{path}.{name}" if path else name for name, _ in run)
                if once and len(paths) > 1:
                    chains.append(paths)
    return tuple(chains)


def are_consecutive(model: nn.Module, paths: tuple[str, ...]) -> bool:
    """Whether these are, in this order, neighbours in one nn.Sequential or nn.ModuleList."""
    parents = {path.rpartition(".")[0] for path in paths}
    if len(parents) != 1:
        return False
    parent = model.get_submodule(parents.pop())
    if not isinstance(parent, _CONTAINERS):
        return False
    names = [name for name, child in parent._modules.items() if child is not None]
    wanted = [path.rpartition(".")[2] for path in paths]
    modules = [parent._modules[name] for name in wanted]
    first = names.index(wanted[0])
    return names[first : first + len(wanted)] == wanted and len(set(modules)) == len(modules)


def innermost_block(path: str, chains: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], int] | None:
    """The chain, and the place in it, of the innermost block that holds `path` or is it; None if none does."""
    found = None
    for chain in chains:  # outer ones first
        for place, block in enumerate(chain):
            if path == block or path.startswith(block + "."):
                found = chain, place
    return found


def blocks_without(model: nn.Module, layers: set[str]) -> Iterator[str]:
    """Paths of the innermost repeated blocks that hold none of `layers` and more than one module that computes."""
    composite = {path: module for path, module in model.named_modules() if computing_modules(module) > 1}
    classes = [original_class(module) for module in composite.values()]
    chained = {path for chain in chains_of(model) for path in chain if path in composite}

    def is_block(path: str, module: nn.Module) -> bool:
        if any(inner.startswith(path + ".") for inner in chained) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return False
        return path in chained or (classes.count(original_class(module)) > 1 and not isinstance(module, nn.Sequential))

    def walk(path: str, module: nn.Module) -> Iterator[str]:
        for name, child in module._modules.items():
            below = f"{path}.{name}" if path else name
            if below not in composite or below in layers:
                continue
            if not any(layer.startswith(below + ".") for layer in layers) and is_block(below, child):
                yield below
            else:
                yield from walk(below, child)

    yield from walk("", model)


def units_of(model: nn.Module, chains: tuple[tuple[str, ...], ...], layers: Collection[str]) -> list[str]:
    """Paths of the modules that are decided about one by one, in the order of the model's modules.

    A unit is a block of a chain. Where chains lie inside of each other the outer one counts, unless the inner blocks
    are composed themselves and hold at least half of the modules that compute: then the outer blocks are stages. What
    lies outside of chains is a unit where it is composed of several modules or can run fused (`layers`); everything
    else (an embedding, a head) is none.
    """
    blocks = {path for chain in chains for path in chain}
    computing = {path: computing_modules(module) for path, module in model.named_modules(remove_duplicate=False)}

    def inner(path: str) -> list[str]:
        """Composed blocks of the chains inside `path`."""
        below = [b for b in blocks if b.startswith(f"{path}." if path else "") and b != path]
        return [b for b in below if computing[b] > 1 and b not in layers]

    def is_stage(path: str) -> bool:
        inside = [b for b in inner(path) if not any(b.startswith(other + ".") for other in inner(path) if other != b)]
        return bool(inside) and 2 * sum(computing[b] for b in inside) >= computing[path]

    def walk(path: str, module: nn.Module) -> Iterator[str]:
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        has_blocks = any(b.startswith(f"{path}." if path else "") and b != path for b in blocks)
        is_composed = path and computing[path] > 1 and not is_list and not has_blocks
        if path in layers or (not is_stage(path) if path in blocks else is_composed):
            yield path
        else:
            for name, child in module._modules.items():
                if child is not None:
                    yield from walk(f"{path}.{name}" if path else name, child)

    return list(dict.fromkeys(walk("", model)))


def equal_segments(blocks: Sequence[str]) -> list[tuple[str, ...]]:
    """n blocks cut into ceil(sqrt(n)) segments, as equal as n allows.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1: a uniform chain of n layers in k
    segments peaks at n/k + k layers, lowest at k = sqrt(n).
    """
    count = math.isqrt(len(blocks) - 1) + 1 if blocks else 0
    cuts = [len(blocks) * i // count for i in range(count + 1)] if count else []
    return [tuple(blocks[first:end]) for first, end in pairwise(cuts)]


def computing_modules(module: nn.Module) -> int:
    """Modules without children in `module`, those that do nothing apart."""
    return sum(not m._modules and not isinstance(m, nn.Identity) for m in module.modules())
