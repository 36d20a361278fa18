"""Layers whose linears a plan of torch.distributed.tensor.parallel has sharded: one fused call per rank.

`ColwiseParallel` on the linears that read a layer's input and `RowwiseParallel` on the one that makes its output give
each rank some hidden features, or heads, from end to end; hooks on the linears move the input in and the partial sums
out (Shoeybi et al., "Megatron-LM", 2019). A fused layer does not call its linears. It does here what their hooks do,
once around the fused call, where each rank runs on its own shards. Only the hooks of these two styles are understood,
as torch makes them; with anything else on a linear the layer runs its own code, for which `why_not_split` has the
reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.plain import held, is_dtensor, is_plain_input

_LINEAR_FORWARD = nn.Linear.forward


@dataclass(frozen=True)
class Split:
    """The linears of a layer as this rank holds them, and the way in and out of a call on them."""

    weights: tuple[Tensor, ...]  # of the linears in the order given, that of the output last
    biases: tuple[Tensor | None, ...]
    ranks: int  # that share the hidden features or heads
    enter: Callable[[Tensor], Tensor]  # the layer's input -> what the fused call takes
    leave: Callable[[Tensor], Tensor]  # the result of the fused call -> the layer's output


def is_split(linears: Sequence[nn.Module]) -> bool:
    """Whether some of `linears` hold DTensors."""
    return any(is_dtensor(held(linear, "weight")) for linear in linears)


def why_not_split(ins: Sequence[nn.Module], out: nn.Module) -> str | None:
    """Why a layer that reads its input by `ins` and makes its output by `out` cannot run fused on shards of them.

    None if it can: they are sharded by columns and rows as the styles do, or are DTensors without any hook.
    """
    plan = _plan(ins, out)
    return plan if isinstance(plan, str) else None


def why_not_heads(ins: Sequence[nn.Module], out: nn.Module, num_heads: int, num_kv_heads: int) -> str | None:
    """As `why_not_split` for the linears of q, k and v, whose shards have to be whole heads."""
    plan = _plan(ins, out)
    if isinstance(plan, str):
        return plan
    if plan is None:
        return "its weights are DTensors without a plan for heads"
    ranks = plan[0].mesh.size()
    if num_heads % ranks or num_kv_heads % ranks:
        return f"{num_heads} heads on {num_kv_heads} key-value heads are no multiple of {ranks} ranks"
    return None


def why_not_entered(linears: Sequence[nn.Module], x: Tensor) -> str | None:
    """Why `x` cannot enter a layer with these linears, which are sharded; None if it can."""
    if is_dtensor(x):
        meshes = [linear.weight.device_mesh for linear in linears]
        return None if all(x.device_mesh == mesh for mesh in meshes) else "the input is a DTensor on another mesh"
    if not linears[0]._forward_pre_hooks:
        return "its weights are DTensors and its input is not"
    return None if is_plain_input(x) or _is_arriving(x) else f"the input is a {type(x).__name__}"


def split(ins: Sequence[nn.Linear], out: nn.Linear) -> Split:
    """This rank's part of a layer for which `why_not_split`, or `why_not_heads`, has nothing to say."""
    plan = _plan(ins, out)
    linears = [*ins, out]
    if plan is None:
        weights, biases = (tuple(getattr(linear, name) for linear in linears) for name in ("weight", "bias"))
        return Split(weights, biases, 1, _unchanged, _unchanged)
    before, after = plan
    biases = [None if linear.bias is None else linear.bias.to_local() for linear in linears]
    if biases[-1] is not None:
        biases[-1] = _FirstRankOnly.apply(biases[-1], after.mesh.get_local_rank() == 0)
    return Split(
        weights=tuple(linear.weight.to_local() for linear in linears),
        biases=tuple(biases),
        ranks=after.mesh.size(),
        enter=functools.partial(_enter, before),
        leave=functools.partial(_leave, after),
    )


@dataclass(frozen=True)
class _Style:
    """What the hooks on a linear do."""

    mesh: Any
    input_layouts: tuple[Any, ...]
    output_layouts: tuple[Any, ...]
    use_local_output: bool


def _plan(ins: Sequence[nn.Module], out: nn.Module) -> tuple[_Style, _Style] | str | None:
    """The styles of the linears at either end, None where no linear has a hook, or why this is neither."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    linears = [*ins, out]
    for linear in linears:
        reason = _why_not_dtensors(linear)
        if reason is not None:
            return reason
    if not any(linear._forward_pre_hooks or linear._forward_hooks for linear in linears):
        return None
    styles = [_style_of(linear, ColwiseParallel, Replicate(), Shard(0), Shard(0)) for linear in ins]
    styles.append(_style_of(out, RowwiseParallel, Shard(-1), Shard(1), Replicate()))
    for style in styles:
        if isinstance(style, str):
            return style
    first, last = styles[0], styles[-1]
    if any(style.mesh != last.mesh for style in styles):
        return "its linears are sharded over different meshes"
    if any(style.input_layouts != first.input_layouts for style in styles[:-1]):
        return "its linears expect different layouts of their input"
    if any(style.output_layouts != (Shard(-1),) for style in styles[:-1]) or last.input_layouts != (Shard(-1),):
        return "its linears hand on something else than shards of the last dim"
    return first, last


def _why_not_dtensors(linear: nn.Module) -> str | None:
    if type(linear) is not nn.Linear or type(linear).forward is not _LINEAR_FORWARD or "forward" in vars(linear):
        return "a linear is no plain nn.Linear"
    if linear._backward_hooks or linear._backward_pre_hooks:
        return "a linear has backward hooks"
    for tensor in (linear.weight, linear.bias):
        if tensor is not None and not is_dtensor(tensor):
            return "a linear has a DTensor beside a plain one"
    return None


def _style_of(linear: nn.Linear, style: type, desired: Any, weight: Any, bias: Any) -> _Style | str:
    """What the hooks on `linear` do, if they are those of `style` and it is placed as `style` places it."""
    pre_hooks, hooks = linear._forward_pre_hooks, linear._forward_hooks
    if (
        len(pre_hooks) != 1
        or len(hooks) != 1
        or linear._forward_pre_hooks_with_kwargs
        or linear._forward_hooks_with_kwargs
    ):
        return "a linear has forward hooks"
    (pre_hook,), (hook,) = pre_hooks.values(), hooks.values()
    before = _closed_over(pre_hook, "input_fn", style._prepare_input_fn)
    after = _closed_over(hook, "output_fn", style._prepare_output_fn)
    if before is None or after is None:
        return f"a linear has forward hooks that are not those of {style.__name__}"
    (mesh, (input_layouts, desired_layouts)), (out_mesh, (output_layouts, local)) = before, after
    placements = [(linear.weight, weight), *([] if linear.bias is None else [(linear.bias, bias)])]
    if desired_layouts != (desired,) or any(t.placements != (placement,) for t, placement in placements):
        return f"a linear is not placed as {style.__name__} places it"
    if mesh.ndim != 1 or any(other != mesh for other in (out_mesh, *(t.device_mesh for t, _ in placements))):
        return "a linear is not on one mesh of one dim"
    return _Style(mesh, input_layouts, output_layouts, local)


def _closed_over(hook: Callable, name: str, function: Callable) -> tuple[Any, tuple[Any, Any]] | None:
    """Mesh and arguments of a hook that `distribute_module` made to call `function`; None for any other hook."""
    code = getattr(hook, "__code__", None)
    if code is None or code.co_name != "<lambda>" or hook.__module__ != "torch.distributed.tensor._api":
        return None
    cells = dict(zip(code.co_freevars, [cell.cell_contents for cell in hook.__closure__ or ()], strict=True))
    call = cells.get(name)
    if len(cells) != 2 or "device_mesh" not in cells:
        return None
    if not isinstance(call, functools.partial) or call.func is not function or call.keywords or len(call.args) != 2:
        return None
    return cells["device_mesh"], call.args


def _unchanged(x: Tensor) -> Tensor:
    return x


def _enter(style: _Style, x: Tensor) -> Tensor:
    """All of x on every rank; of its gradient every rank makes a part, and torch adds the parts once."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not is_dtensor(x):
        x = DTensor.from_local(x, style.mesh, style.input_layouts, run_check=False)
    if x.placements != (Replicate(),):
        x = x.redistribute(placements=[Replicate()])
    local = x.to_local(grad_placements=[Partial()])
    return _Arrived.apply(local) if _is_arriving(local) else local


def _leave(style: _Style, y: Tensor) -> Tensor:
    """The sum of every rank's y, where and as what the style's hook would leave it."""
    from torch.distributed.tensor import DTensor, Partial

    y = DTensor.from_local(y, style.mesh, [Partial()], run_check=False)
    if y.placements != style.output_layouts:
        y = y.redistribute(placements=style.output_layouts, async_op=True)
    return y.to_local() if style.use_local_output else y


def _is_arriving(x: Tensor) -> bool:
    """Whether a collective may still be filling x, which any operation on it waits for."""
    return type(x).__name__ == "AsyncCollectiveTensor" and hasattr(x, "wait")


class _Arrived(torch.autograd.Function):
    """The plain tensor behind one that a collective fills."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        arrived = x.wait()
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


class _FirstRankOnly(torch.autograd.Function):
    """The bias on one rank and zeros on the others, as the ranks' outputs are added; each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, first: bool) -> Tensor:
        return bias.view_as(bias) if first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, dbias: Tensor) -> tuple[Tensor, None]:
        return dbias, None
