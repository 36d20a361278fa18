"""Formulas of autograd that go another way on fake tensors than on real ones, and what the real way takes.

On subclasses of tensors torch writes nothing in place, and asks no values. Where that is one operator, `IN_PLACE` names
it; where it is the whole evaluation of a node, `DETOURS` has its bytes: a new one is a row there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# Of gradients that meet, and of selections. They write into their first argument where nobody else holds it.
IN_PLACE = {_aten.add.Tensor, _aten.scatter.src, _aten.scatter_add.default}
# The same in formulas of these nodes alone.
IN_PLACE_INSIDE = {
    "IndexSelectBackward0": _aten.index_add.default,
    "IndexBackward0": _aten.index_put.default,
    "TakeBackward0": _aten.put.default,
    "TraceBackward0": _aten.index_fill.int_Tensor,
    "MaximumBackward0": _aten.masked_fill.Scalar,
    "MinimumBackward0": _aten.masked_fill.Scalar,
}
ADD_ANEW = {"VarMeanBackward0", "StdMeanBackward0"}  # two parts of one gradient


@dataclass
class Results:
    """Of the operators of one evaluation: how many there were, elements of the smallest, and of the last, which is the
    gradient, elements and bytes of each."""

    count: int = 0
    least: int = 0
    numel: int = 0
    element_size: int = 0

    @property
    def nbytes(self) -> int:
        """Of the gradient."""
        return self.numel * self.element_size

    def add(self, out: Any) -> None:
        """Counts those of one operator."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count += 1
                self.least = min(self.least or leaf.numel(), leaf.numel())
                self.numel, self.element_size = leaf.numel(), leaf.element_size()


@dataclass(frozen=True)
class Detour:
    """`taken`: bytes beside the gradient. `unless`: when torch goes the long way for real as well, which takes more; ""
    for never."""

    taken: Callable[[Results], int]
    unless: str = ""


def _prod(r: Results) -> int:
    """Where elements are 0, the number of zeros in int64, and the quotient."""
    return 8 * r.least + r.numel + max(8 * r.numel - r.nbytes, r.nbytes)


def _cross_entropy_of_bits(r: Results) -> int:
    """Where positive classes have weights, the target times those, and the sigmoid."""
    return 2 * r.nbytes if r.count > 4 else 0


_ZEROS = "{} of elements with zeros among them"
# By name of the node.
DETOURS = {
    "ProdBackward0": Detour(lambda r: r.nbytes, _ZEROS.format("prod")),
    "ProdBackward1": Detour(_prod, _ZEROS.format("prod")),
    # Gradient times result, where elements are 0, and sums from the end, in three steps.
    "CumprodBackward0": Detour(lambda r: 3 * r.nbytes + r.numel, _ZEROS.format("cumprod")),
    # Where the one result is, and to count that, the same in int64.
    **dict.fromkeys(
        ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"), Detour(lambda r: 9 * r.numel)
    ),
    "BinaryCrossEntropyWithLogitsBackward0": Detour(_cross_entropy_of_bits),
}


@dataclass
class Evaluation:
    """Of one such node. `blocks`: those that its operators made, as somebody else keeps them."""

    node: tuple[int, str]
    first: int
    phase: str
    module: str
    blocks: list[Any] = field(default_factory=list)
    results: Results = field(default_factory=Results)

    def taken(self) -> int:
        """Bytes that the real one takes beside its gradient."""
        return DETOURS[self.node[1]].taken(self.results)
