"""`include` and `exclude`: which modules a conversion looks at."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable

from torch import nn

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]


def select(
    model: nn.Module, include: Selector | Iterable[Selector] | None, exclude: Selector | Iterable[Selector] | None
) -> list[tuple[str, nn.Module]]:
    """Each selected module once, under its first name, in model order. Raises as `fused_remat.convert` documents."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    chosen = set(names) if include is None else _matching(names, "include", include)
    dropped = set() if exclude is None else _matching(names, "exclude", exclude)
    return [(names[module][0], module) for module in names if module in chosen and module not in dropped]


def _matching(
    names: dict[nn.Module, list[str]], argument: str, selectors: Selector | Iterable[Selector]
) -> set[nn.Module]:
    single = isinstance(selectors, str) or callable(selectors) or not isinstance(selectors, Iterable)
    matching: set[nn.Module] = set()
    for selector in [selectors] if single else list(selectors):
        _check(argument, selector)
        found = {module for module, paths in names.items() if any(_matches(selector, path, module) for path in paths)}
        if isinstance(selector, str) and not found:
            known = ", ".join(repr(paths[0]) for paths in list(names.values())[1:4])
            raise ValueError(f"{argument} names {selector!r}, but the model has no such module; it has {known}, ...")
        matching |= found
    return matching


def _check(argument: str, selector: Selector) -> None:
    if isinstance(selector, type):
        if not issubclass(selector, nn.Module):
            raise TypeError(f"{argument} has the class {selector.__qualname__}, which is not an nn.Module")
    elif not isinstance(selector, str) and not callable(selector):
        raise TypeError(
            f"{argument} must be a name, a glob pattern, a module class or a function of (name, module), "
            f"or a list of these; got {selector!r}"
        )


def _matches(selector: Selector, path: str, module: nn.Module) -> bool:
    if isinstance(selector, type):
        return isinstance(module, selector)
    if isinstance(selector, str):
        parts = path.split(".")
        above = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return any(fnmatch.fnmatchcase(prefix, selector) for prefix in above)
    return bool(selector(path, module))
