"""The names that the code of a function reads."""

from __future__ import annotations

import dis
import functools
import types


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function's code, and the functions written inside it, read."""
    names = dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for inner in _inner(code):
        names.update(dict.fromkeys(globals_of(inner)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def attributes_of(code: types.CodeType) -> tuple[str, ...]:
    """The names in a function's code, and in the functions written inside it, that may be attributes."""
    names = dict.fromkeys(code.co_names)
    for inner in _inner(code):
        names.update(dict.fromkeys(attributes_of(inner)))
    return tuple(names)


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
