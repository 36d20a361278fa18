"""How the operators run on DTensors: a rule per op, registered with torch when DTensors first reach a call.

A rule lists, for one dim of a device mesh, which placements of the inputs give which placements of the results, so
that every rank runs the op on its own shards; DTensor picks the cheapest and moves what does not fit. Sharded may be
token rows (weights replicated, their gradients partial sums), samples of a batch, hidden features of an MLP, and heads
of the attention core.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fused_remat import ops
from fused_remat.ops import multi_head_attention
from fused_remat.plain import is_dtensor

Layout = dict[str, Any]  # a placement by the name of an argument or result; replicated where there is none

_OF_HIDDEN = {"w_up": 0, "b_up": 0, "w_gate": 0, "b_gate": 0, "w_down": 1}  # the dim of hidden features
_OF_ALL = ("b_down", "norm_weight", "norm_bias")
_NO_PARAMETERS = ("x", "dy", "y", "up", "gate", "seed")  # of the MLP operators' tensors
_CORE = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")


def why_not_sharded(
    operands: Iterable[Tensor | None], *, dropout_p: float = 0.0, keeps_features: bool = False
) -> str | None:
    """Why the compiled op cannot run these operands, some of them DTensors; None once it can: its rule is registered.

    `keeps_features`: hidden features are kept by their number, which says nothing about a shard of them.
    """
    given = [operand for operand in operands if operand is not None]
    if not all(map(is_dtensor, given)):
        return "some of its tensors are DTensors and some are not"
    if any(operand.device_mesh != given[0].device_mesh for operand in given):
        return "its tensors are DTensors on different meshes"
    if dropout_p > 0.0:
        return "its tensors are DTensors, and a dropout mask numbers rows as this rank has them"
    if keeps_features and any(p.is_shard() for operand in given[1:] for p in operand.placements):
        return "its weights are sharded, and the residuals to keep are counted in all hidden features"
    if ops.ready() is None:
        register()
    return None


@functools.cache
def register() -> None:
    """Tell DTensor the rules; once is enough. Needs the compiled operators (`ops.ready()`)."""
    from torch.distributed.tensor.experimental import register_sharding

    for name, layouts in (
        ("mlp", _mlp_layouts),
        ("attention", _attention_layouts),
        ("multi_head_attention", _multi_head_attention_layouts),
    ):
        for suffix in ("", "_fwd", "_bwd"):
            op = getattr(torch.ops.fused_remat, name + suffix).default
            register_sharding(op)(functools.partial(_acceptable, op._schema, layouts))


def _acceptable(
    schema: torch.FunctionSchema, layouts: Callable[[dict[str, Any]], list[Layout]], *args: Any
) -> list[tuple[list, list]]:
    """What `register_sharding` asks for: per layout, the placements of the results and of the arguments."""
    from torch.distributed.tensor import Replicate

    names = [argument.name for argument in schema.arguments]
    call = dict(zip(names, args, strict=False))  # trailing defaults may be missing
    return [
        (
            [layout.get(result.name or "y", Replicate()) for result in schema.returns],
            [layout.get(name, Replicate()) if _is_tensor(value) else None for name, value in call.items()],
        )
        for layout in [{}, *layouts(call)]
    ]


def _is_tensor(argument: Any) -> bool:
    """Whether a rule's argument stands for a tensor: DTensor passes its description, and all else as it is."""
    return hasattr(argument, "tensor_meta")


def _mlp_layouts(call: dict[str, Any]) -> list[Layout]:
    from torch.distributed.tensor import Partial, Shard

    given = [name for name, value in call.items() if _is_tensor(value) and name not in _NO_PARAMETERS]
    sums = {f"d{name}": Partial() for name in given}
    # Residuals are [rows, features], a layout that only the op itself reads: its rows are this rank's.
    found = [
        {"up": Shard(0), "gate": Shard(0)} | {name: Shard(dim) for name in ("x", "y", "dy", "dx")} | sums
        for dim in range(call["x"].ndim - 1)
    ]
    if not call["keep_up"] and not call["keep_gate"] and {*given} <= {*_OF_HIDDEN, *_OF_ALL}:
        features = {name: Shard(dim) for name, dim in _OF_HIDDEN.items()}
        features |= {f"d{name}": placement for name, placement in features.items()}
        # b_down enters once as one of the partial sums of y; backward needs all of dy, and so has all of db_down.
        b_down = {} if "dy" in call else {"b_down": Partial()}
        found.append(features | b_down | {name: Partial() for name in ("y", "dx", "dnorm_weight", "dnorm_bias")})
    return found


def _mask_layouts(call: dict[str, Any], dim: int) -> Layout:
    """Of `attn_mask`, which broadcasts to [B, H, Lq, Lk], where `dim` of the scores is sharded."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    mask = call["attn_mask"]
    shared = mask is None or mask.shape[dim] == 1
    return {
        "attn_mask": Replicate() if shared else Shard(dim),
        "dattn_mask": Partial() if shared else Shard(dim),
    }


def _attention_layouts(call: dict[str, Any]) -> list[Layout]:
    from torch.distributed.tensor import Partial, Shard

    q, k = call["q"], call["k"]
    masks = {"key_mask": Shard(0), "dkey_mask": Shard(0)} | _mask_layouts(call, 0)
    found = [{name: Shard(0) for name in _CORE} | masks]
    # A rank must have the key-value heads of its query heads.
    if q.shape[1] == k.shape[1] or k.shape[1] % q.mesh.size() == 0:
        masks = {"dkey_mask": Partial()} | _mask_layouts(call, 1)
        found.append({name: Shard(1) for name in _CORE} | masks)
    return found


def _multi_head_attention_layouts(call: dict[str, Any]) -> list[Layout]:
    from torch.distributed.tensor import Partial, Shard

    per_sample = ["query", "key", "value", "key_mask", "y", "dy", "lse"]
    per_sample += ["weights", "dweights"] if call["need_weights"] else []
    per_sample += [name for name in ("q", "k", "v", "out") if call[f"keep_{name}"]]
    per_sample += [name for name in ("cos", "sin") if call[name] is not None and call[name].shape[0] > 1]
    samples = {name: Shard(0) for name in per_sample} | _mask_layouts(call, 0)
    schema = torch.ops.fused_remat.multi_head_attention.default._schema
    operands = [argument.name for argument in schema.arguments[: multi_head_attention.OPERANDS]]
    # The op numbers its gradients. Of what all samples share, each rank has a part of the gradient.
    sums = {f"d{i}": samples.get(name, Partial()) for i, name in enumerate(operands)}
    if call["attn_mask"] is not None:
        sums[f"d{operands.index('attn_mask')}"] = samples["dattn_mask"]
    return [samples | sums]
