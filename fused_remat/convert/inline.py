"""Where a block's forward calls the linears of an MLP one by one: read from its source.

This decides what a conversion binds and reports; what runs fused is decided at every call, by `promises`.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator

from torch import nn

from fused_remat.convert.behaviour import activation_name
from fused_remat.convert.callers import methods_of
from fused_remat.convert.fused import Layout
from fused_remat.convert.promises import FUNCTIONS
from fused_remat.convert.rebind import original_class

_DROPOUTS = ("F.dropout", "nn.functional.dropout", "torch.nn.functional.dropout", "torch.dropout")


def inline_layout(layer: nn.Module) -> Layout | None:
    """The parts of the MLP that the forward of `layer` runs between other steps, if its source tells; else None."""
    linears = [name for name, child in layer._modules.items() if isinstance(child, nn.Linear)]
    acts = dict(_activations(layer))
    code = next((c for c in methods_of(original_class(layer)) if c.name == "forward"), None) if acts else None
    if code is None:
        return None
    for up, down in itertools.pairwise(linears):
        first, second = layer._modules[up], layer._modules[down]
        if (first.in_features, first.out_features) != (second.out_features, second.in_features):
            continue
        for act, activation in acts.items():
            if _Flow(layer, up, act, down).reaches(code.body):
                return Layout((up,), (down,), activation=activation, act=(act,))
    return None


def _activations(layer: nn.Module) -> Iterator[tuple[str, str]]:
    """Children and function attributes that are activations, with what they compute."""
    functions = {name: value for name, value in vars(layer).items() if any(value is known for known in FUNCTIONS)}
    for name, act in (*layer._modules.items(), *functions.items()):
        if act is not None and not isinstance(act, (nn.Identity, nn.Dropout)):
            activation = activation_name(act)
            if activation is not None:
                yield name, activation


class _Flow:
    """Follows one value through straight code: from `self.<up>` over `self.<act>` and dropouts to `self.<down>`."""

    def __init__(self, layer: nn.Module, up: str, act: str, down: str) -> None:
        dropouts = (
            f"self.{name}" for name, part in layer._modules.items() if isinstance(part, (nn.Dropout, nn.Identity))
        )
        self.dropouts = {*_DROPOUTS, *dropouts}
        self.up, self.act, self.down = f"self.{up}", f"self.{act}", f"self.{down}"
        self.variables: dict[str, str] = {}  # what a name holds: "up" or "hidden"

    def reaches(self, statements: Iterable[ast.stmt]) -> bool:
        """Whether the value gets to `self.<down>` in these statements, one after the other."""
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                continue
            blocks = [value for _, value in ast.iter_fields(statement) if _is_block(value)]
            if any(self.reaches(block) for block in blocks):
                return True
            if blocks:
                continue
            if any(self._stage(node) == "done" for node in _expressions(statement)):
                return True
            stage = self._stage(statement.value) if isinstance(statement, ast.Assign) else ""
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.variables[node.id] = stage
        return False

    def _stage(self, node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return self.variables.get(node.id, "")
        if not isinstance(node, ast.Call) or not node.args:
            return ""
        function = ast.unparse(node.func)
        if function == self.up:
            return "up"
        before = self._stage(node.args[0])
        if function in self.dropouts:
            return before
        return {(self.act, "up"): "hidden", (self.down, "hidden"): "done"}.get((function, before), "")


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What `node` evaluates at once: nothing inside a lambda, which runs somewhere else."""
    yield node
    for below in ast.iter_child_nodes(node):
        if not isinstance(below, ast.Lambda):
            yield from _expressions(below)
