"""MLPs written in a block's forward: fused without touching that code, by promises.

`self.down(self.dropout(self.act(self.up(x))))` is nobody's method there, only three calls between attention, norms and
sums. So while the block runs, its converted `up` returns a promise: a tensor of the right shape and dtype without
values, which remembers x. The activation and dropout, handed a promise, return a promise; `down`, handed one that went
through an activation, makes the one fused call. Whatever else is done to a promise (another function, a method, an
index, a hook) makes its values first, by the code of the real modules, and goes on with plain tensors. So nothing has
to be known about the block: a promise reaches `down` only if just this happened.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from fused_remat import functional, last_calls
from fused_remat.convert.fused import Layout, find
from fused_remat.convert.keep import of_workspace
from fused_remat.convert.norms import source_of
from fused_remat.convert.rebind import fused_class, records_of
from fused_remat.plain import is_plain_input, why_not_plain_linear, why_watched, why_weights_unfit
from fused_remat.settings import Keep


class _Running(threading.local):
    """The call of a block that this thread is in."""

    call: _Call | None = None


_running = _Running()


@dataclass(frozen=True)
class InlineMLP:
    """A block whose forward calls the parts of an MLP: while it runs, they may pass promises on."""

    layout: Layout  # up, down and, where it is a module, act are children
    keep: Keep
    in_place: bool  # whether the activation module overwrites what it is given
    settings: tuple[tuple[str, Any], ...]  # (attribute, value) that the activation module reads
    workspace: int | None = None  # bytes; None: whatever is in force when it is called
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "mlp"
    takes_norm: ClassVar[bool] = True

    def describe(self) -> str:
        return f"mlp, {self.layout.activation}, keep={self.keep}{of_workspace(self.workspace)}, written in its block"

    def parts(self, layer: nn.Module) -> Iterator[tuple[nn.Module, Part]]:
        """The children of `layer` to bind besides `layer` itself, with their records."""
        yield find(layer, self.layout.up), Part("up")
        yield find(layer, self.layout.down), Part("down")
        act = find(layer, self.layout.act)
        if act is not None and act is not layer:
            yield act, Part("act", self.layout.activation, self.in_place, self.settings)

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # promises are no tensors that a compiler could trace
            return stock()
        outer, call = _running.call, self._open(layer)
        _running.call = call
        try:
            result = stock()
        finally:
            _running.call = outer
        if call is None:
            last_calls.note_own(layer, "its linears are no plain ones of one dtype any more, or are watched")
        elif not call.kept:
            last_calls.note_own(layer, "its code did more between its linears than an activation and dropout")
        return result

    def _open(self, layer: nn.Module) -> _Call | None:
        """This call of `layer`, if its linears may pass promises on; else None."""
        up, down = find(layer, self.layout.up), find(layer, self.layout.down)
        if not torch.is_grad_enabled() or torch.jit.is_tracing() or _in_functorch() or why_watched() is not None:
            return None
        if _why_not_fused_linear(up) or _why_not_fused_linear(down) or why_weights_unfit(up.weight, down.weight):
            return None
        return _Call(layer, up, down, self)


@dataclass(eq=False)
class _Call:
    """One run of a block."""

    block: nn.Module
    up: nn.Module
    down: nn.Module
    record: InlineMLP
    kept: bool = False  # whether `down` made a fused call


@dataclass(frozen=True)
class Part:
    """A child of such a block; outside of it, and for anything but a promise, it runs its own code."""

    role: str  # "up", "act" or "down"
    activation: str = ""
    in_place: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    method: ClassVar[str] = "forward"
    kind: ClassVar[str] = "part"
    takes_norm: ClassVar[bool] = False

    def describe(self) -> str:
        return ""  # the block says it

    def run(self, layer: nn.Module, stock: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else _running.call
        if call is None or len(args) + len(kwargs) != 1:
            return stock()
        (x,) = args or kwargs.values()
        if self.role == "up":
            return _promise(call, x, stock) if layer is call.up and _may_wait(x, call) else stock()
        if not isinstance(x, Promise):
            return stock()
        if self.role == "act":
            known = all(getattr(layer, name, None) == value for name, value in self.settings)
            return x.after(self.activation, layer.forward, self.in_place) if known else stock()
        return x.kept_by(call) if layer is call.down and x.is_kept_by(call) else stock()


def _in_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _why_not_fused_linear(linear: nn.Module | None) -> str | None:
    """Why `linear` is no nn.Linear that conversion bound and nobody touched since."""
    if linear is None or not isinstance(records_of(linear).get("forward"), Part):
        return "is not converted"
    if linear._compiled_call_impl is not None:
        return "is compiled"
    reason = why_not_plain_linear(linear, fused_class(nn.Linear, ("forward",)))
    if reason is not None:
        return reason
    # Parameters only: what FSDP1 or functional_call put in their place may be gone when a promise is kept.
    if not all(tensor is None or type(tensor) is nn.Parameter for tensor in (linear.weight, linear.bias)):
        return "has weights that are no parameters"
    return None


def _autocast(device: str) -> tuple[bool, torch.dtype | None]:
    """Whether autocast is on for `device`, and its dtype then."""
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return enabled, torch.get_autocast_dtype(device) if enabled else None


def _top_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks on saved tensors that are in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _dtype(x: Tensor) -> torch.dtype:
    """Of what a linear makes of `x`."""
    enabled, dtype = _autocast(x.device.type)
    return dtype if enabled and x.dtype != torch.float64 else x.dtype


def _may_wait(x: Any, call: _Call) -> bool:
    """Whether `call.up` may promise what it makes of `x`."""
    weight = call.up.weight
    if not (torch.is_grad_enabled() and isinstance(x, Tensor) and is_plain_input(x)) or x.is_inference():
        return False
    if x.dim() < 2 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        return False
    if x.dtype != weight.dtype and not _autocast(x.device.type)[0]:
        return False
    return any(tensor.requires_grad for tensor in (x, weight, call.down.weight))


@dataclass
class _Recipe:
    """How the values of a promise are made, once, if somebody asks for them."""

    call: _Call
    x: Tensor  # [..., D]
    up: Callable[[], Tensor]  # the own code of the linear, on x
    steps: list[Callable[[Tensor], Tensor]] = field(default_factory=list)  # applied to it, in this order
    activation: str = ""
    dropout_p: float = 0.0
    values: Tensor | None = None
    kept: bool = False  # by `down`, in a fused call

    def __post_init__(self) -> None:
        self.read = self._state()
        self.autocast = _autocast(self.x.device.type)
        self.hooks = _top_hooks()

    def _state(self) -> list[Any]:
        """What must stay as it is until the promise is kept."""
        tensors = (self.x, self.call.up.weight, self.call.up.bias)
        return [None if tensor is None else (id(tensor), tensor._version) for tensor in tensors]

    @property
    def inputs(self) -> list[Tensor]:
        """What the values are differentiable in."""
        tensors = (self.x, self.call.up.weight, self.call.up.bias)
        return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]

    def check(self) -> None:
        if self._state() != self.read:
            raise RuntimeError(
                "the input or a weight of a converted linear changed before its result was used: the block "
                "writes in place between the linears of its MLP; leave it out with convert(..., exclude=...)"
            )

    def make(self) -> Tensor:
        """The values [..., F], with the graph that the code of the block would have made."""
        if self.values is not None:
            return self.values
        self.check()
        if self.kept and self.dropout_p:
            raise RuntimeError(
                "the hidden features of a converted MLP were used again after its last linear, which dropped some "
                "inside the fused call; leave the block out with convert(..., exclude=...), or set its dropout to 0"
            )
        with torch.inference_mode(False), torch.enable_grad(), self._settings():
            values = self.up()
            for step in self.steps:
                values = step(values)
        self.values = values
        return values

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """Autocast and the hooks on saved tensors as they were where the promise was made: a checkpoint that began
        since would not see these steps again."""
        device = self.x.device.type
        with contextlib.ExitStack() as stack:
            if self.autocast != _autocast(device):
                enabled, dtype = self.autocast
                stack.enter_context(torch.autocast(device, dtype, enabled))
            if self.hooks != _top_hooks():
                pack, unpack = self.hooks or (_itself, _itself)
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            yield


class Promise(Tensor):
    """[..., F] values that nobody has asked for yet; see the head of this file."""

    recipe: _Recipe

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if len(args) == 1 and isinstance(args[0], Promise) and args[0].recipe.values is None:
            kept = _activated(args[0], func, kwargs) if func in _ACTIVATIONS else _dropped(args[0], func, kwargs)
            if kept is not None:
                return kept
        elif func is torch.dropout and isinstance(args[0], Promise) and len(args) == 3 and not kwargs:
            return F.dropout(args[0], args[1], args[2])
        return func(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Code that asks for no `__torch_function__`: its gradients go through the node of `_Promised`."""
        with torch.overrides.enable_reentrant_dispatch():
            args, kwargs = _made(args), _made(kwargs or {})
        return func(*args, **kwargs)

    def after(self, activation: str, act: Callable[[Tensor], Tensor], in_place: bool) -> Tensor:
        """What `act`, which computes `activation`, makes of this: a promise, if it is the first."""
        recipe = self.recipe
        if recipe.values is not None or recipe.activation or recipe.dropout_p:
            return act(recipe.make())
        if in_place:
            recipe.activation = activation
            recipe.steps.append(act)
            return self
        return _new(_Recipe(recipe.call, recipe.x, recipe.up, [*recipe.steps, act], activation))

    def is_kept_by(self, call: _Call) -> bool:
        """Whether the last linear of `call` can make the fused call instead of reading values."""
        recipe = self.recipe
        if recipe.values is not None or not recipe.activation or recipe.call is not call:
            return False
        return torch.is_grad_enabled() and recipe.autocast == _autocast(recipe.x.device.type)

    def kept_by(self, call: _Call) -> Tensor:
        """The result [..., D] of the whole MLP."""
        recipe, (x, norm) = self.recipe, source_of(self.recipe.x) or (self.recipe.x, None)
        recipe.check()
        recipe.kept = call.kept = True
        last_calls.note_fused(call.block, x)
        return functional.mlp(
            x, call.up.weight, call.down.weight, call.up.bias, call.down.bias, norm=norm,
            activation=recipe.activation, dropout_p=recipe.dropout_p, keep=call.record.keep,
            workspace=call.record.workspace,
        )  # fmt: skip


class _Promised(torch.autograd.Function):
    """The node behind a promise, for code that takes it as any tensor (another autograd.Function, C++)."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, *inputs: Tensor) -> Promise:
        ctx.recipe = recipe
        x = recipe.x
        shape = (*x.shape[:-1], recipe.call.up.weight.shape[0])
        return Tensor._make_wrapper_subclass(Promise, shape, dtype=_dtype(x), device=x.device)

    @staticmethod
    def backward(ctx: Any, dvalues: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.recipe.inputs
        gradients = torch.autograd.grad(
            ctx.recipe.make(), inputs, dvalues, retain_graph=True, create_graph=torch.is_grad_enabled()
        )
        return None, *gradients


def _promise(call: _Call, x: Tensor, up: Callable[[], Tensor]) -> Promise:
    return _new(_Recipe(call, x, up))


def _new(recipe: _Recipe) -> Promise:
    promise = _Promised.apply(recipe, *recipe.inputs)
    promise.recipe = recipe
    return promise


def _made(arguments: Any) -> Any:
    """`arguments`, nested as they are, with values in the place of promises."""
    return _pytree.tree_map(lambda leaf: leaf.recipe.make() if isinstance(leaf, Promise) else leaf, arguments)


def _activated(promise: Promise, func: Callable[..., Any], kwargs: dict[str, Any]) -> Tensor | None:
    """What the function `func` makes of `promise`; None if it is no activation by these arguments."""
    name = _ACTIVATIONS[func](**kwargs)
    if name is None:
        return None
    return promise.after(name, lambda values: func(values, **kwargs), bool(kwargs.get("inplace")))


def _dropped(promise: Promise, func: Callable[..., Any], kwargs: dict[str, Any]) -> Tensor | None:
    """What dropout makes of `promise`; None if only its values will do."""
    recipe = promise.recipe
    if func is not F.dropout or not {"p", "training"} <= kwargs.keys():
        return None
    p = kwargs["p"]
    if not 0.0 <= p < 1.0:
        return None
    if p == 0.0 or not kwargs["training"]:
        return promise
    if not recipe.activation or recipe.dropout_p or kwargs.get("inplace"):
        return None
    steps = [*recipe.steps, lambda values: F.dropout(values, p)]
    return _new(_Recipe(recipe.call, recipe.x, recipe.up, steps, recipe.activation, p))


# Which activation a function is, by its keyword arguments.
_ACTIVATIONS: dict[Callable[..., Any], Callable[..., str | None]] = {
    F.gelu: lambda approximate="none": {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate),
    F.relu: lambda inplace=False: "relu",
    F.silu: lambda inplace=False: "silu",
    torch.relu: lambda: "relu",
}
FUNCTIONS = tuple(_ACTIVATIONS)

# What a promise can tell without values.
_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cpu", "is_cuda", "is_meta",
               "is_nested", "is_sparse", "is_quantized", "itemsize")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "element_size",
            "get_device", "__len__")  # fmt: skip
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
