"""What a function can reach besides its arguments: modules, tensors, generators and plain values.

Looked into: closures, default arguments, `functools.partial`, the object of a bound method, the globals and attributes
of classes and Python modules that the code names, other functions reached that way, and objects and functions that
modules hold. Plain containers that modules hold are theirs to put back, see `state`. Not looked into: torch, NumPy and
the standard library, objects more than two levels deep, and containers of more than 256 items.
"""

from __future__ import annotations

import enum
import functools
import io
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from fused_remat.guards.arguments import version
from fused_remat.guards.code import attributes_of, globals_of
from fused_remat.guards.containers import CONTAINERS, ITEMS
from fused_remat.guards.randomness import Source, source_of

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_COMPARED = (*_PLAIN, type, types.BuiltinFunctionType, torch.dtype, torch.device, enum.Enum, range)  # not looked into
_NOT_LOOKED_INTO = frozenset((*_PLAIN, Tensor, nn.Parameter))
_KEPT_BY_TORCH = frozenset(vars(nn.Module()))
# Packages whose functions and objects are not looked into, but for their plain holders of values.
_SKIPPED = frozenset(("torch", "numpy", "fused_remat", *sys.stdlib_module_names)) - {"types", "collections", "argparse"}
_EXACTLY_PLAIN = frozenset(_PLAIN)
_HELD_BY_CLASSES = frozenset((*_PLAIN, Tensor, list, dict, set, deque))
_NO_GENERATORS = (types.FunctionType, types.MethodType, functools.partial, list, tuple, dict, set, frozenset, deque)
_NOTHING = object()
_DEPTH = 5  # functions, containers and objects within one another
_IN_MODULE = 2  # the depth at which what a module holds begins


class Reach:
    """What `fn` reaches now.

    Attributes:
        roots: modules; what is inside them is not listed apart.
        tensors: references to tensors, by the name under which the function finds them.
        values: numbers, strings, classes and functions, and lengths of containers, by name.
        sources: generators.
        iterators: names of iterators, which a replay could only go on with.
        state, counts: as `tensors` and `values`, inside objects of other classes.
        held: objects and functions that modules hold, with their names.
        versions: of all these tensors, by name: how often each was changed in place so far.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Any = ()) -> None:
        self.roots: list[nn.Module] = []
        self.tensors: dict[str, TensorWeakRef] = {}
        self.values: dict[str, Any] = {}
        self.sources: list[Source] = []
        self.iterators: list[str] = []
        self.state: dict[str, TensorWeakRef] = {}
        self.counts: dict[str, Any] = {}
        self.versions: dict[str, int] = {}
        self.held: list[tuple[str, Any]] = []
        self._seen: set[int] = set()
        self._visit(fn, "", 0, inside=False)
        for name, value in arguments:
            self._visit(value, name, 0, inside=None)

    def look_inside(self, modules: Iterable[tuple[str, nn.Module]], held: list[tuple[str, Any]] | None = None) -> None:
        """Adds what the code and classes of these modules reach, and the objects that they hold; or what `held` is now
        of those that they held before: a replay is given the same again.
        """
        modules = list(modules)
        if held is None:
            for path, module in modules:
                for name, value in vars(module).items():
                    if type(value) not in _NOT_LOOKED_INTO and name not in _KEPT_BY_TORCH:
                        self._hold(value, f"{path}.{name}" if path else name, _IN_MODULE)
        else:
            self.held = held
        for name, value in self.held:
            self._visit(value, name, _IN_MODULE, inside=False)
        for cls in dict.fromkeys(type(module) for _, module in modules):
            if _is_skipped(cls):
                continue
            for name, value in _of_class(cls):
                self._visit(value, f"{cls.__name__}.{name}", _IN_MODULE, inside=False)
            forward = getattr(cls, "forward", None)
            if isinstance(forward, types.FunctionType) and not _is_skipped(forward):
                self._visit(forward, "", 1, inside=False)

    def changed_since(self, before: Reach) -> Iterator[tuple[str, str]]:
        """Names of what `before` found, and what has happened to it since."""
        yield from _changed(self.tensors, self.versions, before.tensors, before.versions)
        yield from _other_values(self.values, before.values)
        yield from _other_values(self.counts, before.counts)

    def grown_since(self, before: Reach) -> Iterator[tuple[str, str]]:
        """Names of tensors in objects, and what has happened to them since."""
        yield from ((name, "was added") for name in self.state if name not in before.state)
        yield from _changed(self.state, self.versions, before.state, before.versions)

    def _hold(self, value: Any, name: str, depth: int) -> None:
        """Notes the objects in what a module holds: not the containers, which are put back as a whole."""
        kind = type(value)
        if kind in CONTAINERS or kind is tuple:
            if len(value) <= ITEMS and depth <= _DEPTH:
                for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                    if type(item) not in _NOT_LOOKED_INTO:
                        self._hold(item, f"{name}[{key!r}]", depth + 1)
        elif not isinstance(value, (Tensor, nn.Module, *_COMPARED)):
            self.held.append((name, value))

    def _visit(self, value: Any, name: str, depth: int, *, inside: bool | None) -> None:
        """`inside`: within an object; None: an argument, whose own tensors are kept elsewhere."""
        if isinstance(value, _COMPARED):
            if name and inside is not None:
                (self.counts if inside else self.values)[name] = value
            return
        if depth > _DEPTH or id(value) in self._seen:
            return
        if not isinstance(value, types.MethodType):
            self._seen.add(id(value))
        if isinstance(value, Tensor):
            if inside is not None:
                (self.state if inside else self.tensors)[name] = TensorWeakRef(value)
                self.versions[name] = version(value)
        elif isinstance(value, nn.Module):
            self.roots.append(value)
        elif isinstance(value, _NO_GENERATORS):
            self._visit_contents(value, name, depth + 1, inside=inside)
        elif (source := source_of(value, name)) is not None:
            self.sources.append(source)
        elif hasattr(type(value), "__next__") and not isinstance(value, io.IOBase):
            if not inside:
                self.iterators.append(name)
        else:
            self._visit_contents(value, name, depth + 1, inside=inside)

    def _visit_contents(self, value: Any, name: str, depth: int, *, inside: bool | None) -> None:
        if name and inside is not None:
            into = self.counts if inside else self.values
            if isinstance(value, types.FunctionType):
                into[name] = value.__code__
            elif isinstance(value, (list, set, deque)):
                into[f"the length of {name}"] = len(value)
        for part, item, within in _contents(value):
            path = f"{name}{part}" if name else part.lstrip(".")
            within = inside if within is None else within
            if type(item) not in _EXACTLY_PLAIN:
                self._visit(item, path, depth, inside=within)
            elif path and within is not None:
                (self.counts if within else self.values)[path] = item


def _changed(
    now: dict[str, TensorWeakRef], counts: dict[str, int], before: dict[str, TensorWeakRef], old: dict[str, int]
) -> Iterator[tuple[str, str]]:
    for name, reference in before.items():
        tensor = reference()
        if name not in now or tensor is None or now[name]() is not tensor:
            yield name, "was replaced"
        elif counts[name] != old[name]:
            yield name, "was changed in place"


def _other_values(now: dict[str, Any], before: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in before.items():
        new = now.get(name, _NOTHING)
        if new is not value and not _equal(new, value):
            yield name, "was replaced" if new is _NOTHING else f"was changed from {_shown(value)} to {_shown(new)}"
    for name in now:
        if name.endswith("]") and name not in before:
            yield name, "was added"


def _shown(value: Any) -> str:
    return value.co_name if isinstance(value, types.CodeType) else repr(value)


def _contents(value: Any) -> Iterator[tuple[str, Any, bool | None]]:
    """What is in `value`: its name there, itself, and whether that is within an object (None: as `value` is)."""
    if isinstance(value, functools.partial):
        yield "", value.func, False
        yield from ((f".args[{number}]", item, False) for number, item in enumerate(value.args))
        yield from ((f".{key}", item, False) for key, item in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield "", value.__func__, False
        yield ".self", value.__self__, None
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        if len(value) <= ITEMS:
            yield from ((f"[{number}]", item, None) for number, item in enumerate(value))
    elif isinstance(value, dict):
        if len(value) <= ITEMS:
            yield from ((f"[{key!r}]", item, None) for key, item in value.items())
    elif not isinstance(value, types.ModuleType) and not _is_skipped(type(value)):
        yield from ((f".{key}", item, True) for key, item in _of_object(value))


def _of_object(value: Any) -> list[tuple[str, Any]]:
    """Its attributes, by dictionary, slot or class."""
    found = dict(_of_class(type(value)))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ()) if not _is_skipped(cls) else ()
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(getattr(value, "__dict__", {}))
    return list(found.items())[:ITEMS]


def _of_class(cls: type) -> Iterator[tuple[str, Any]]:
    """What a class holds itself, or inherits from others that are looked into, that is neither method nor property."""
    for base in reversed(cls.__mro__):
        if not _is_skipped(base):
            for name, value in list(vars(base).items()):
                if type(value) in _HELD_BY_CLASSES and not name.startswith("__"):
                    yield name, value


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any, bool | None]]:
    if _is_skipped(fn):
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield f".{name}", value, False
        yield from _named_in(value, name, fn.__code__)
    for number, value in enumerate(fn.__defaults__ or ()):
        yield f".default {number}", value, False
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield f".{name}", value, False
    for name in globals_of(fn.__code__):
        value = fn.__globals__.get(name)
        if value is not None and not isinstance(value, types.ModuleType):
            yield f".{name}", value, False
        yield from _named_in(value, name, fn.__code__)


def _named_in(holder: Any, name: str, code: types.CodeType) -> Iterator[tuple[str, Any, bool | None]]:
    """What the code may read of a Python module or class that it names."""
    if isinstance(holder, types.ModuleType) and holder.__name__.split(".")[0] not in _SKIPPED:
        held = vars(holder)
    elif isinstance(holder, type) and not _is_skipped(holder):
        held = dict(_of_class(holder))
    else:
        return
    for inner in attributes_of(code):
        if inner in held and not isinstance(held[inner], types.ModuleType):
            yield f".{name}.{inner}", held[inner], False


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _is_skipped(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return not isinstance(module, str) or _is_of_skipped(module)


@functools.lru_cache(maxsize=4096)
def _is_of_skipped(module: str) -> bool:
    return module.split(".")[0] in _SKIPPED
