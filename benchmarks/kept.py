"""`python -m benchmarks.kept [--write]`: bytes that one block keeps for backward, before and after conversion.

Per family of models: a small random model, the inputs that its first block got in a forward, and two measurements of
that block alone. U is one residual stream, batch x length x width elements; the block's own input is not in the
numbers, as its caller holds it. --write puts the table into docs/models.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fused_remat
from benchmarks.docs import replace_section
from benchmarks.model_families import FAMILIES, Family, output_of
from fused_remat.measure import measure

DOCUMENT = Path(__file__).parents[1] / "docs" / "models.md"
SECTION = "kept bytes per block"


@dataclass(frozen=True)
class Row:
    """One family: bytes kept by a block, of the stock code and converted, and those of a residual stream."""

    family: str
    before: int
    after: int
    stream: int


def measure_family(name: str) -> Row:
    """Bytes of one block of family `name`. Raises ImportError where its library is not there."""
    family = FAMILIES[name]
    model = family.make().train()
    args, kwargs = _block_inputs(family, model)
    before = _kept(model.get_submodule(family.block), args, kwargs)
    fused_remat.convert(model)
    x = args[0] if args else next(iter(kwargs.values()))
    return Row(name, before, _kept(model.get_submodule(family.block), args, kwargs), x.numel() * x.element_size())


def _block_inputs(family: Family, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    block = model.get_submodule(family.block)
    handle = block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    family.run(model)
    handle.remove()
    args, kwargs = seen[0]
    return tuple(map(_leaf, args)), {name: _leaf(value) for name, value in kwargs.items()}


def _leaf(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_leaf, value))
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _kept(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return measure(lambda: output_of(block(*args, **kwargs)), repeats=0).kept_bytes


def table(rows: Sequence[Row]) -> str:
    """As markdown."""
    lines = ["| family | before, U | after, U |", "|---|---|---|"]
    lines += [f"| {row.family} | {row.before / row.stream:.2f} | {row.after / row.stream:.2f} |" for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"also replace the section of {DOCUMENT.name}")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    text = table([measure_family(name) for name in FAMILIES])
    print(text)
    if options.write:
        replace_section(DOCUMENT, SECTION, text)


if __name__ == "__main__":
    main()
