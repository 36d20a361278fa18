"""Who throws away the weights that an attention makes for them? Read from the caller's source.

nn.MultiheadAttention makes weights unless told not to, and `y, _ = self.attention(x, x, x)` is how most code calls it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from torch import nn

_NEED_WEIGHTS = 4  # the position of need_weights among forward's arguments


def discards_weights(caller: nn.Module, child: str) -> bool:
    """Whether the code of `caller` calls `self.<child>` for weights that it then ignores, at every call that it has."""
    uses = [use for code in methods_of(type(caller)) for use in _uses(code, child)]
    return bool(uses) and all(uses)


@functools.cache
def methods_of(cls: type[nn.Module]) -> tuple[ast.FunctionDef, ...]:
    """The methods of `cls` and of its bases below nn.Module whose source is there, an overriding one only."""
    methods: dict[str, ast.FunctionDef] = {}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # made at run time, or in a prompt
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                methods.setdefault(node.name, node)
    return tuple(methods.values())


def _uses(code: ast.FunctionDef, child: str) -> list[bool]:
    """For each call of `self.<child>` that makes weights, and is not just passed on: whether `code` ignores them."""
    parents = {below: node for node in ast.walk(code) for below in ast.iter_child_nodes(node)}
    read = {node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    uses = []
    for node in ast.walk(code):
        if not isinstance(node, ast.Call) or not _is_child(node.func, child):
            continue
        asked = node.args[_NEED_WEIGHTS] if len(node.args) > _NEED_WEIGHTS else None
        asked = next((word.value for word in node.keywords if word.arg == "need_weights"), asked)
        if asked is None or (isinstance(asked, ast.Constant) and asked.value):
            uses.append(_is_ignored(parents.get(node), read))
        elif not isinstance(asked, ast.Constant):
            uses.append(False)
    return uses


def _is_child(function: ast.expr, child: str) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == child
        and isinstance(function.value, ast.Name)
        and function.value.id == "self"
    )


def _is_ignored(parent: ast.AST | None, read: set[str]) -> bool:
    """Whether the second of the two results goes nowhere in `parent`, the node around the call."""
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.slice, ast.Constant) and parent.slice.value == 0
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Tuple):
        targets = parent.targets[0].elts
        return len(targets) == 2 and isinstance(targets[1], ast.Name) and targets[1].id not in read
    return False
