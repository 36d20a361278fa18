"""`convert` and `revert`: let the layers of an existing model drop their activations, without changing the model.

How it works, in reading order: `select` picks modules; for MLPs, `patterns` proposes where the parts might be,
`behaviour` proves a proposal by running the layer's code on a tiny copy (`small_copy`), `inline` finds MLPs written in
a block's forward, which `promises` runs, `near_misses` says why not where no layer or method is the MLP; `attention`
recognises nn.MultiheadAttention, `attention_examine` the attentions of other libraries (`attention_layout` proposes,
`attention_probe` and `attention_judge` prove, `attention_call` reads their arguments); `norm_examine` the norms in
front of these layers; `adapters` says what a linear contributes; `gather` puts the verdicts together; `rebind` gives a
layer a subclass of its own class, which runs the records that `fused`, `promises`, `attention`, `attention_layer` and
`norms` define; those of `own` are for modules of `fused_remat.nn`, which policies and plans alone change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fused_remat._folding import MODEL
from fused_remat._profiled import HINT, was_profiled
from fused_remat.convert.examine import why_already
from fused_remat.convert.gather import Found, note_on, uncovered, verdicts, with_norms
from fused_remat.convert.keep import check_keeps
from fused_remat.convert.promises import InlineMLP
from fused_remat.convert.rebind import bind, unbind
from fused_remat.convert.report import Entry, Report
from fused_remat.convert.select import Selector, select
from fused_remat.settings import Keep

if TYPE_CHECKING:
    from fused_remat.policy import Assignment

__all__ = ["Entry", "Report", "convert", "revert"]


def convert(
    model: nn.Module,
    *,
    keep: Keep | Mapping[str, Keep] | None = None,
    policy: str | Mapping[str, Any] | Assignment | Any = None,
    every: int = 1,
    verify: str | None = None,
    need_weights: bool = True,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    dry_run: bool = False,
    strict: bool = False,
) -> Report:
    """Make the MLPs and attentions of `model` keep less for backward, in place; everything else stays as it was.

    An MLP or attention is converted if its own code, run on a small copy with random weights, computes what
    `fused_remat.mlp` or `fused_remat.multi_head_attention` computes; nn.MultiheadAttention then follows the rules of
    `fused_remat.MultiheadAttention`. LayerNorms and RMSNorms in front of these layers are applied by the fused calls
    that read their results, so that the residual stream alone is kept. Every part has to be plain, or PEFT's LoRA
    around a plain linear (no other adapter, hook, parametrisation or quantised weight); tensor-parallel plans of
    torch.distributed stay fused. docs/models.md has the rules.

    A converted layer keeps its name, parameters, `state_dict`, hooks, flags and attributes; only its class becomes a
    subclass of the one it had (and an attention gets a forward pre-hook that does nothing: without one,
    nn.TransformerEncoderLayer passes it by in evaluation). Whenever a part stops being plain later, the layer runs its
    own code again. `fused_remat.revert(model)` undoes it all.

    Args:
        model: any module; modules reachable by several paths are converted once and stay shared.
        keep: what backward does not have to rebuild. None: nothing in an MLP, "out" in an attention. A tuple: exactly
            these residuals, wherever a layer has them: "up" and "gate" of an MLP (a plain one has no "gate"), "q",
            "k", "v" and "out" of an attention; () is nothing at all. A float in [0, 1]: the fraction of hidden features
            of an MLP whose up and gate are kept, and "out". A mapping chooses for each kind: {"mlp": a tuple or float,
            "attention": a tuple}.
        policy: in the place of `keep`, who keeps what by name: "everything", "selective", "full" or "sqrt", rules by
            module name, or a plan; `fused_remat.policies` says what they are. It decides for all layers, those that
            are converted already included, and may recompute blocks as regions.
        every: with a policy by name or rules: it holds for every n-th block of a chain of equal blocks, from the first
            on; the layers of the others run their own code.
        verify: with a policy: whether the regions that it makes compare what they rebuilt with what forward made:
            "off", "once" (the first time) or "always"; `fused_remat.RematError` names the first tensor that differs.
            None: as a plan's own `Assignment` says, else "off". Fused layers are no regions: what they rebuild is
            not compared.
        need_weights: False: attentions return None instead of weights, even where a call asks for them, as
            nn.MultiheadAttention's default does. The report names the attentions whose caller throws them away.
        include: which modules to look at; None for all. A module path as in `named_modules` (with everything below
            it), a glob pattern for one (`*` also matches dots), a module class, a function of (path, module), or a
            list of these.
        exclude: which modules not to look at; as `include`, and it wins over it.
        dry_run: only report what would happen.
        strict: raise, before anything is changed, if something that looks like an MLP or attention cannot be
            converted. Layers that are fused already do not count.

    Returns:
        A report with `converted` and `skipped` entries; it prints as a table, and `report.revert()` undoes this call.
        Converting again changes nothing: layers that are fused already are among the skipped.

    Raises:
        TypeError: `model` is not a module; `keep`, `policy`, `every`, `need_weights`, `include` or `exclude` of another
            kind than above.
        ValueError: `keep` or `every` out of range, `keep`, `policy` or `verify` with an unknown name, `policy` beside
            `keep`, `verify` without a `policy`; a name in `include` or `exclude` that matches nothing; with `strict`,
            the layers that cannot be converted and why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(need_weights, bool):
        raise TypeError(f"need_weights must be a bool, got {need_weights!r}")
    if policy is not None:
        if keep is not None:
            raise ValueError(f"keep and policy exclude each other, got keep={keep!r} and policy={policy!r}; drop one")
        from fused_remat.policy.apply import apply_policy  # that builds on this package

        return apply_policy(
            model, policy, every, verify, include=include, exclude=exclude, need_weights=need_weights, dry_run=dry_run,
            strict=strict,
        )  # fmt: skip
    if every != 1:
        raise ValueError(f"every={every!r} goes with a policy; give policy=, or leave every out")
    if verify is not None:
        raise ValueError(
            f"verify={verify!r} compares what regions rebuild, and without a policy there are none; give policy=, or "
            "leave verify out"
        )
    keeps = check_keeps(keep)
    chosen = select(model, include, exclude)
    found: list[Found] = []
    report, refused = Report(dry_run=dry_run), []
    for name, layer, verdict in verdicts(chosen, keeps, need_weights):
        entry = Entry(name, type(layer).__name__)
        if isinstance(verdict, str):
            report.skipped.append(replace(entry, reason=verdict))
            refused += [report.skipped[-1]] if why_already(layer) is None else []
        else:
            entry = replace(entry, kind=verdict.kind, became=verdict.describe(), note=note_on(model, name, verdict))
            found.append((entry, layer, verdict))
    found = with_norms(model, chosen, found)
    report.skipped, refused = uncovered(report.skipped, found), uncovered(refused, found)
    if strict and refused:
        raise not_strictly(refused)
    report.converted = [entry for entry, _, _ in found]
    report.notes = [HINT] if found and not was_profiled(model) else []
    if not dry_run:
        for _, layer, record in found:
            bind(layer, record)
        report.bound = [(entry.name, layer, record.method) for entry, layer, record in found]
        for entry, layer, record in found:
            for part, its_record in record.parts(layer) if isinstance(record, InlineMLP) else ():
                bind(part, its_record)
                report.bound.append((entry.name, part, its_record.method))
    return report


def not_strictly(refused: Iterable[Entry]) -> ValueError:
    """The error of `strict`, for the layers that cannot be converted."""
    lines = "".join(f"\n  {entry.name or MODEL} ({entry.class_name}): {entry.reason}" for entry in refused)
    return ValueError(f"strict=True, and these layers cannot be converted (nothing was changed):{lines}")


def revert(model: nn.Module) -> list[str]:
    """Give every converted layer of `model` its original class back; returns the names of these layers.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    return [name for name, layer in model.named_modules() if unbind(layer)]
