"""What a sweep changes: a size of the inputs, and how inputs of another size are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Dims = int | tuple[int, ...]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_LEAST_SIZES = 3
_NAMED: dict[str, Dims] = {"batch": 0, "sequence": 1, "resolution": (2, 3)}
_FORMS = (
    'a name ("batch", "sequence", "resolution"), a list of names, or a mapping from a name of your choice to None, a '
    "dimension, a tuple of dimensions, a mapping {input: dimensions}, a list of sizes, or a fused_remat.profile.Axis"
)


@dataclass(frozen=True)
class Axis:
    """A size of the inputs to sweep over.

    Attributes:
        dims: where tensors have that size: a dimension, a tuple of dimensions that grow together (the two sides of an
            image), or a mapping from inputs (position, or name of an argument of the model) to these. An int or tuple
            holds for every tensor among the inputs that has the size of the first one there. None: what the names
            "batch" (0), "sequence" (1) and "resolution" ((2, 3)) stand for.
        sizes: at least 3 sizes; by default half, one, one and a half and two times the inputs' own (one to four times,
            where that is odd).
        inputs: a function of the size that returns the model's inputs, a tensor, a tuple of arguments, a dict of named
            arguments or both as (tuple, dict); `sizes` must be given with it. Without it, the model's own inputs are
            repeated or cut.
    """

    dims: Dims | Mapping[int | str, Dims] | None = None
    sizes: tuple[int, ...] | None = None
    inputs: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Sweep:
    """An axis with everything decided: `base` is the size of the model's own inputs (None where a function makes them);
    `power` is the number of dimensions that grow together."""

    name: str
    sizes: tuple[int, ...]
    base: int | None
    power: int
    make: Callable[[int], Inputs]


def resolve_sweeps(sweep: Any, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Sweep]:
    """The sweeps that the argument `sweep` of `profile` asks for. Nothing is run.

    Raises:
        TypeError: `sweep` has none of the forms.
        ValueError: a name, dimension or size that does not fit these inputs.
    """
    if sweep is None:
        return []
    if isinstance(sweep, str):
        sweep = {sweep: None}
    elif isinstance(sweep, (list, tuple)) and all(isinstance(name, str) for name in sweep):
        sweep = dict.fromkeys(sweep)
    if not isinstance(sweep, Mapping) or not all(isinstance(name, str) for name in sweep):
        raise TypeError(f"sweep must be {_FORMS}; got {sweep!r}")
    return [_resolve(name, _axis(name, form), model, args, dict(kwargs)) for name, form in sweep.items()]


def _axis(name: str, form: Any) -> Axis:
    if isinstance(form, Axis):
        axis = form
    elif form is None or _is_dims(form) or isinstance(form, Mapping):
        axis = Axis(dims=form)
    elif isinstance(form, (list, range)):
        axis = Axis(sizes=tuple(form))
    elif callable(form):
        raise TypeError(f"sweep[{name!r}] is a function and needs sizes: Axis(inputs=function, sizes=(128, 256, 384))")
    else:
        raise TypeError(f"sweep must be {_FORMS}; got {form!r} for {name!r}")
    if axis.sizes is not None:
        _check_sizes(name, axis.sizes)
    return axis


def _check_sizes(name: str, sizes: Iterable[Any]) -> None:
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"the sizes of sweep[{name!r}] must be ints, got {sizes!r}")
    if min(sizes, default=1) < 1 or len(set(sizes)) < _LEAST_SIZES:
        raise ValueError(
            f"sweep[{name!r}] must have at least {_LEAST_SIZES} different sizes, all of at least 1, got {sizes!r}"
        )


def _resolve(name: str, axis: Axis, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sweep:
    if axis.inputs is not None:
        if axis.sizes is None:
            raise ValueError(f"sweep[{name!r}] makes its inputs by a function, so its sizes must be given: sizes=(...)")
        make = axis.inputs
        return Sweep(name, tuple(sorted(set(axis.sizes))), None, 1, lambda size: _as_inputs(name, make(size)))
    dims = axis.dims if axis.dims is not None else _NAMED.get(name)
    if dims is None:
        raise ValueError(
            f"sweep[{name!r}] does not say which dimension of the inputs it is; only {', '.join(map(repr, _NAMED))} "
            f"are known by name. Write sweep={{{name!r}: 1}}, for example"
        )
    places = _places(name, dims, model, args, kwargs)
    base = _base(name, places)
    sizes = axis.sizes or _default_sizes(base)

    def make_resized(size: int) -> Inputs:
        new = {path: _resized(name, tensor, where, base, size) for path, tensor, where in places}
        return _replaced(args, new, ()), _replaced(kwargs, new, ())

    power = min(len(where) for _, _, where in places)
    return Sweep(name, tuple(sorted(set(sizes))), base, power, make_resized)


def _default_sizes(base: int) -> tuple[int, ...]:
    return (base // 2, base, base // 2 * 3, base * 2) if base % 2 == 0 else tuple(base * k for k in (1, 2, 3, 4))


Place = tuple[
    tuple[Any, ...], Tensor, tuple[int, ...]
]  # where a tensor is among the inputs, the tensor, its dimensions


def _places(name: str, dims: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Place]:
    """The tensors that grow."""
    tensors = [*_tensors(args, ()), *_tensors(kwargs, ())]
    if isinstance(dims, Mapping):
        return [place for key, where in dims.items() for place in _named_places(name, key, where, model, args, kwargs)]
    if not _is_dims(dims):
        raise TypeError(f"sweep[{name!r}]: dimensions must be an int or a tuple of ints, got {dims!r}")
    wanted = (dims,) if isinstance(dims, int) else dims
    having = [(path, t) for path, t in tensors if all(-t.ndim <= d < t.ndim for d in wanted)]
    if not having:
        shapes = [list(t.shape) for _, t in tensors]
        raise ValueError(
            f"sweep[{name!r}] is dimension {dims} of the inputs, and none has it: their shapes are {shapes}"
        )
    first = [having[0][1].shape[d] for d in wanted]
    return [(path, t, wanted) for path, t in having if [t.shape[d] for d in wanted] == first]


def _named_places(
    name: str, key: Any, where: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Place]:
    """The place of the input `key`, a position or the name of an argument."""
    if not _is_dims(where):
        raise TypeError(f"sweep[{name!r}][{key!r}] must be a dimension or a tuple of dimensions, got {where!r}")
    wanted = (where,) if isinstance(where, int) else where
    names = list(inspect.signature(model.forward).parameters)
    position = names.index(key) if key in names and key not in kwargs else key
    if position in range(len(args)):
        path, value = (position,), args[position]
    elif key in kwargs:
        path, value = (key,), kwargs[key]
    else:
        given = [*range(len(args)), *kwargs]
        raise ValueError(f"sweep[{name!r}] names the input {key!r}, and the inputs given are {given}")
    if not isinstance(value, Tensor) or not all(-value.ndim <= d < value.ndim for d in wanted):
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"sweep[{name!r}] takes dimension {where} of the input {key!r}, which is {got}")
    return [(path, value, wanted)]


def _base(name: str, places: list[Place]) -> int:
    if not places:
        raise ValueError(f"sweep[{name!r}] names no input")
    sizes = {tensor.shape[where[0]] for _, tensor, where in places}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(f"sweep[{name!r}]: the inputs must have one size there, above 0; they have {sorted(sizes)}")
    return sizes.pop()


def _resized(name: str, tensor: Tensor, dims: tuple[int, ...], base: int, size: int) -> Tensor:
    """`tensor` with its size in `dims` scaled by `size / base`: its own values, repeated and cut."""
    resized = tensor.detach()
    for dim in dims:
        wanted, rest = divmod(tensor.shape[dim] * size, base)
        if rest:
            raise ValueError(
                f"sweep[{name!r}] at {size}: dimension {dim} of an input {list(tensor.shape)} would not be whole"
            )
        copies = -(-wanted // tensor.shape[dim])
        times = [1] * tensor.ndim
        times[dim] = copies
        resized = resized.repeat(times).narrow(dim, 0, wanted)
    # A copy: what was cut would otherwise keep the memory of the whole.
    return resized.clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor in nested tuples, lists and dicts, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for index, member in enumerate(value):
            yield from _tensors(member, (*path, index))
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _tensors(member, (*path, key))


def _replaced(value: Any, new: Mapping[tuple[Any, ...], Tensor], path: tuple[Any, ...]) -> Any:
    """`value` with the tensors at these paths exchanged; containers on the way are copied."""
    if path in new:
        return new[path]
    if isinstance(value, (tuple, list)):
        members = [_replaced(member, new, (*path, index)) for index, member in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if isinstance(value, dict):
        return {key: _replaced(member, new, (*path, key)) for key, member in value.items()}
    return value


def _as_inputs(name: str, made: Any) -> Inputs:
    if isinstance(made, Tensor):
        return (made,), {}
    if isinstance(made, Mapping):
        return (), dict(made)
    if isinstance(made, tuple):
        if len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], Mapping):
            return made[0], dict(made[1])
        return made, {}
    raise TypeError(
        f"the function of sweep[{name!r}] must return a tensor, a tuple of arguments, a dict of named arguments or "
        f"(tuple, dict), got {type(made).__name__}"
    )


def _is_dims(value: Any) -> bool:
    members = value if isinstance(value, tuple) else (value,)
    return bool(members) and all(isinstance(d, int) and not isinstance(d, bool) for d in members)
