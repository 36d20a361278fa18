"""`convert` and `revert`: let the MLPs of an existing model drop their activations, without changing the model.

How it works, in reading order: `select` picks modules, `patterns` proposes where the parts of an MLP might be,
`behaviour` proves a proposal by running the layer's code on a tiny copy, `rebind` gives the layer a subclass of its
own class, and `fused` is what that subclass runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from fused_remat.convert.examine import examine, why_already
from fused_remat.convert.fused import Fused, Layout
from fused_remat.convert.rebind import bind, describe, unbind
from fused_remat.convert.report import Entry, Report
from fused_remat.convert.select import Selector, select
from fused_remat.settings import Keep, check_keep

__all__ = ["Entry", "Report", "convert", "revert"]


def convert(
    model: nn.Module,
    *,
    keep: Keep | None = None,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    dry_run: bool = False,
    strict: bool = False,
) -> Report:
    """Make the MLPs of `model` keep only their inputs for backward, in place; everything else stays as it was.

    A layer is converted if its own code, run on a tiny copy, computes what `fused_remat.mlp` computes and every part
    is plain (no adapter, hook, parametrisation, quantised or sharded weight). It keeps its name, parameters,
    `state_dict`, hooks, flags and attributes; only its class becomes a subclass of the one it had. Whenever a part
    stops being plain later, the layer runs its own code again. `fused_remat.revert(model)` undoes it all.

    Args:
        model: any module; modules reachable by several paths are converted once and stay shared.
        keep: what backward does not have to rebuild, for every layer: None or () nothing, a tuple of "up" and "gate"
            (a plain MLP has no "gate"), or a float in [0, 1], the fraction of hidden features whose are kept.
        include: which modules to look at; None for all. A module path as in `named_modules` (with everything below
            it), a glob pattern for one (`*` also matches dots), a module class, a function of (path, module), or a
            list of these.
        exclude: which modules not to look at; as `include`, and it wins over it.
        dry_run: only report what would happen.
        strict: raise, before anything is changed, if something that looks like an MLP cannot be converted. Layers
            that are fused already do not count.

    Returns:
        A report with `converted` and `skipped` entries; it prints as a table, and `report.revert()` undoes this call.
        Converting again changes nothing: layers that are fused already are among the skipped.

    Raises:
        TypeError: `model` is not a module; `keep`, `include` or `exclude` of another kind than above.
        ValueError: `keep` out of range or with an unknown name; a name in `include` or `exclude` that matches nothing;
            with `strict`, the layers that cannot be converted and why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    keep = check_keep(() if keep is None else keep, gated=True)
    report = Report(dry_run=dry_run)
    found: list[tuple[nn.Module, Fused]] = []
    refused: list[Entry] = []
    known: set[Layout] = set()
    for name, layer in select(model, include, exclude):
        already = why_already(layer)
        verdict = examine(layer, keep, known) if already is None else already
        entry = Entry(name, type(layer).__name__)
        if isinstance(verdict, Fused):
            found.append((layer, verdict))
            report.converted.append(replace(entry, became=describe(verdict)))
        elif verdict is not None:
            report.skipped.append(replace(entry, reason=verdict))
            refused += [report.skipped[-1]] if already is None else []
    if strict and refused:
        lines = "".join(f"\n  {entry.name or '(the model)'} ({entry.class_name}): {entry.reason}" for entry in refused)
        raise ValueError(f"strict=True, and these layers cannot be converted (nothing was changed):{lines}")
    if not dry_run:
        for layer, fused in found:
            bind(layer, fused)
        report.layers = [layer for layer, _ in found]
    return report


def revert(model: nn.Module) -> list[str]:
    """Give every converted layer of `model` its original class back; returns the names of these layers.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    return [name for name, layer in model.named_modules() if unbind(layer)]
