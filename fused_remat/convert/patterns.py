"""Which layers are MLPs: one table of patterns, each of which says where the parts might be.

A pattern only proposes layouts, from the kinds and shapes of children; `behaviour.why_not_mlp` accepts or refuses
each by what the layer's code computes. So a new pattern is a function from a layer to layouts, or one `_fixed` row
when the names say it all, and a wrong proposal costs nothing but a millisecond.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fused_remat.activations import ACTIVATIONS
from fused_remat.convert.behaviour import activation_name, looks_like_activation, looks_like_glu
from fused_remat.convert.fused import HALVES, INTERLEAVED, Layout, Path, find
from fused_remat.plain import class_name


@dataclass(frozen=True)
class Proposal:
    """The layouts to try, in this order."""

    layouts: tuple[Layout, ...] = ()
    near_miss: str | None = None  # why none of them will fit, if the pattern can tell
    certain: bool = True  # the layer looks like an MLP: worth a line in the report if none fits


Pattern = Callable[[nn.Module], Proposal | None]  # None: does not look like this pattern at all


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is transformers' Conv1D: a linear that stores its weight as [in, out]."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def attribute(layer: nn.Module, path: Path) -> Any:
    """What `layer` holds at `path`, a module or any attribute; None if there is nothing."""
    return getattr(find(layer, path[:-1]), path[-1], None)


def _fixed(layout: Layout) -> Pattern:
    """Layers whose parts have these names, below a method that other code calls."""

    def propose(layer: nn.Module) -> Proposal | None:
        named = [*layout.linears, layout.dropout, *layout.after, *layout.through, layout.norm]
        if not hasattr(layer, layout.method) or any(find(layer, path) is None for path in named):
            return None
        act = attribute(layer, layout.act)
        name = None if act is None else activation_name(act)
        if name is None:
            return Proposal(near_miss=_unknown(act))
        return Proposal((replace(layout, activation=name),))

    return propose


def _sequential(layer: nn.Module) -> Proposal | None:
    """nn.Sequential with Linear, activation, Linear in a row, dropouts or identities between them, anything around.

    The activation may be a GLU, which makes gate and up of what the first linear computes.
    """
    if type(layer).forward is not nn.Sequential.forward:
        return None
    names = list(layer._modules)
    linears = [i for i, child in enumerate(layer._modules.values()) if is_linear_like(child)]
    near_miss = None
    for start, stop in itertools.pairwise(linears):
        up, between, down = names[start], names[start + 1 : stop], names[stop]
        kinds = _sort({name: layer._modules[name] for name in between})
        if not kinds["act"] and not kinds["glu"] and not kinds["identity"]:
            continue
        near_miss = _why_not_between(layer, kinds)
        roles = [role for role in _roles(layer, (up,), down) if bool(role.packed) == bool(kinds["glu"])]
        if near_miss is None and not roles:
            near_miss = _describe_shapes(layer, [up, down])
        if near_miss is None:
            around = {"before": _paths(names[:start]), "after": _paths(names[stop + 1 :])}
            inner = [parts for parts in _between(layer, kinds) if not parts.after]
            return Proposal(tuple(_join(role, replace(parts, **around)) for parts in inner for role in roles))
    return None if near_miss is None else Proposal(near_miss=near_miss)


def _by_children(layer: nn.Module) -> Proposal | None:
    """Two linears (three: gated), at most one activation, dropouts and identities as direct children, by any name.

    Two linears may be gated too: the first then holds gate and up.
    """
    linears = [name for name, child in layer._modules.items() if is_linear_like(child)]
    if len(linears) not in (2, 3) or type(layer).forward in (nn.Sequential.forward, nn.Module.forward):
        return None
    kinds = _sort({name: child for name, child in layer._modules.items() if name not in linears})
    looks = bool(kinds["act"] or kinds["glu"])
    owned = [*layer._parameters, *layer._buffers]
    misfit = f"it owns {', '.join(owned)}, which no fused MLP has" if owned else _why_not_between(layer, kinds)
    roles = [
        role
        for down in reversed(linears)
        for ups in itertools.permutations([name for name in linears if name != down])
        for role in _roles(layer, ups, down)
    ]
    shapes = None if any(_roles(layer, linears[:-1], linears[-1])) else _describe_shapes(layer, linears)
    if misfit is not None and any(features(layer._modules[name]) is None for name in linears):
        return None  # a block: its attention and MLP have linears inside, as adapters have
    if misfit is not None or not roles:
        return Proposal(near_miss=misfit or shapes) if looks else None
    layouts = tuple(_join(role, parts) for parts in _between(layer, kinds) for role in roles)
    return Proposal(layouts, near_miss=shapes, certain=looks)


def _roles(layer: nn.Module, ups: Sequence[str], down: str) -> Iterator[Layout]:
    """Layouts with no more than linears: the last is `down`, and `ups` is up, gate and up, or one that holds both."""
    if _shapes_fit(layer, ups, down):
        yield Layout((ups[-1],), (down,), gate=(ups[0],) if len(ups) == 2 else ())
    if len(ups) == 1 and _shapes_fit(layer, ups, down, halved=True):
        yield from (Layout((ups[0],), (down,), gate=(ups[0],), packed=packed) for packed in (*HALVES, *INTERLEAVED))


def _join(role: Layout, parts: Layout) -> Layout:
    return replace(parts, up=role.up, gate=role.gate, down=role.down, packed=role.packed)


def _sort(children: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Names by the kind of part that each child could be."""
    kinds: dict[str, list[str]] = {"act": [], "glu": [], "dropout": [], "identity": [], "other": []}
    for name, child in children.items():
        if type(child) is nn.Dropout:
            kinds["dropout"].append(name)
        elif type(child) is nn.Identity:
            kinds["identity"].append(name)
        elif child is not None:
            looks = "act" if looks_like_activation(child) else "glu" if looks_like_glu(child) else "other"
            kinds[looks].append(name)
    return kinds


def _why_not_between(layer: nn.Module, kinds: dict[str, list[str]]) -> str | None:
    """Why these cannot be the parts of an MLP besides its linears; None if they can."""
    if kinds["other"]:
        parts = [f"{name} ({_describe(layer._modules[name])})" for name in kinds["other"]]
        return f"it has {', '.join(parts)}, which is no part of a fused MLP"
    acts = [*kinds["act"], *kinds["glu"]]
    if len(acts) > 1:
        return f"it has {len(acts)} activations: {', '.join(acts)}"
    for path in _activation(layer, kinds):
        if activation_name(find(layer, path)) is None:
            return _unknown(find(layer, path))
    return None


def _activation(layer: nn.Module, kinds: dict[str, list[str]]) -> list[Path]:
    """The activation among these children, which may be the child of a GLU."""
    return [*_paths(kinds["act"]), *((glu, name) for glu in kinds["glu"] for name in layer._modules[glu]._modules)]


def _between(layer: nn.Module, kinds: dict[str, list[str]]) -> Iterator[Layout]:
    """Layouts without linears, for every role of these children; without an activation child, one per activation."""
    acts = [(path, activation_name(find(layer, path))) for path in _activation(layer, kinds)]
    if not acts:
        acts = [((), name) for name in ACTIVATIONS if name != "identity" or kinds["glu"]]
        acts += [((name,), "identity") for name in kinds["identity"]]
    for act, activation in acts:
        through = tuple((name,) for name in (*kinds["identity"], *kinds["glu"]) if (name,) != act)
        for hidden in ("", *kinds["dropout"]):
            others = _paths(name for name in kinds["dropout"] if name != hidden)
            parts = Layout((), (), activation=activation, act=act, dropout=_path(hidden), through=through)
            yield replace(parts, after=others)
            if hidden:  # one dropout module may serve in both places
                yield replace(parts, after=(*others, (hidden,)))


def is_linear_like(child: nn.Module | None) -> bool:
    """A linear, or what may stand in for one: a subclass, a quantised linear, an adapter around a linear."""
    if child is None or isinstance(child, nn.Sequential):
        return False
    return (
        isinstance(child, nn.Linear)
        or is_conv1d(child)
        or (hasattr(child, "in_features") and hasattr(child, "out_features"))
        or any(isinstance(inner, nn.Linear) or is_conv1d(inner) for inner in child._modules.values() if inner)
    )


def features(linear: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear; None for an adapter that does not tell."""
    if is_conv1d(linear):
        return linear.nx, linear.nf
    sizes = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _shapes_fit(layer: nn.Module, ups: Sequence[str], down: str, halved: bool = False) -> bool:
    """Whether all `ups` have the same sizes and lead to `down`, or with `halved` half of their features do."""
    known = [size for size in (features(layer._modules[name]) for name in ups) if size is not None]
    sizes = features(layer._modules[down])
    return len(set(known)) <= 1 and (sizes is None or all(size[1] == (2 if halved else 1) * sizes[0] for size in known))


def _describe_shapes(layer: nn.Module, linears: list[str]) -> str:
    sizes = ", ".join(f"{name} {' -> '.join(map(str, features(layer._modules[name]) or '?'))}" for name in linears)
    return f"its linears do not chain ({sizes})"


def _describe(part: Any) -> str:
    if isinstance(part, nn.Module):
        return class_name(type(part))
    return getattr(part, "__qualname__", repr(part)) if isinstance(part, types.FunctionType) else repr(part)


def _unknown(act: Any) -> str:
    return f"its activation {_describe(act)} is not one of {', '.join(ACTIVATIONS)}"


def _path(name: str) -> Path:
    return (name,) if name else ()


def _paths(names: Iterable[str]) -> tuple[Path, ...]:
    return tuple((name,) for name in names)


_BERT = Layout(
    up=("intermediate", "dense"),
    act=("intermediate", "intermediate_act_fn"),
    down=("output", "dense"),
    after=(("output", "dropout"),),
    norm=("output", "LayerNorm"),
    through=(("intermediate",), ("output",)),
    method="feed_forward_chunk",
)

PATTERNS: dict[str, Pattern] = {
    # Linear, activation (or GLU), Linear in a row; torchvision's MLPBlock is one of these.
    "Sequential": _sequential,
    # transformers' encoder layers: BERT, RoBERTa, ELECTRA, ... The residual and the norm stay outside the op.
    "BERT layer": _fixed(_BERT),
    "Longformer layer": _fixed(replace(_BERT, method="ff_chunk")),
    "Q-Former layer": _fixed(
        Layout(
            up=("intermediate_query", "dense"),
            act=("intermediate_query", "intermediate_act_fn"),
            down=("output_query", "dense"),
            after=(("output_query", "dropout"),),
            norm=("output_query", "LayerNorm"),
            through=(("intermediate_query",), ("output_query",)),
            method="feed_forward_chunk_query",
        )
    ),
    "ALBERT layer": _fixed(Layout(up=("ffn",), act=("activation",), down=("ffn_output",), method="ff_chunk")),
    "nn.TransformerEncoderLayer": _fixed(
        Layout(
            up=("linear1",),
            act=("activation",),
            dropout=("dropout",),
            down=("linear2",),
            after=(("dropout2",),),
            method="_ff_block",
        )
    ),
    "nn.TransformerDecoderLayer": _fixed(
        Layout(
            up=("linear1",),
            act=("activation",),
            dropout=("dropout",),
            down=("linear2",),
            after=(("dropout3",),),
            method="_ff_block",
        )
    ),
    # timm's Mlp, SwiGLU and GluMlp, transformers' Llama- and Phi-3-style gated MLPs, GPT-2, CLIP, T5, ..., and
    # hand-written ones.
    "MLP": _by_children,
}
