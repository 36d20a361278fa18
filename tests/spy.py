"""An implementer that passes calls on to the C++ one and remembers their arguments; samples of ops for opcheck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fused_remat.ops import LEVEL3_BACKENDS

Calls = list[tuple[str, tuple]]  # op, arguments


def registered() -> set[str]:
    """Every op of the library that makes tensors, whoever implements it; not those that tell a plan or a route."""
    prefix = "fused_remat::"
    names = {name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}
    return {name for name in names if not name.endswith("_spy") and _makes_tensors(name)}


def _makes_tensors(name: str) -> bool:
    returns = getattr(torch.ops.fused_remat, name).default._schema.returns
    return not returns or any("Tensor" in str(result.type) for result in returns)


def snapshot(arguments):
    """The same arguments in memory of their own, requiring no gradients: values, strides and offsets are kept."""

    def copy(value):
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage().clone()
        return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())

    return tree_map(copy, arguments)


def registered_for(backend: str) -> set[str]:
    """Those ops, without level 3 of other backends."""
    others = tuple(f"_{other}" for other in LEVEL3_BACKENDS if other != backend)
    return {name for name in registered() if not name.endswith(others)}


@contextmanager
def spying(after: dict[str, Callable[[tuple], None]] | None = None) -> Iterator[Calls]:
    """Backend "spy" exists at levels 2 and 3; its calls are listed, named as those of any backend, in order.

    `after` names what is done with the arguments once the op of that name has run: to spoil them, for instance.
    """
    calls: Calls = []
    library = torch.library.Library("fused_remat", "FRAGMENT")
    for name in (name.removesuffix("_cpp") for name in registered() if name.endswith("_cpp")):
        implementer = getattr(torch.ops.fused_remat, f"{name}_cpp").default
        schema = str(implementer._schema).removeprefix("fused_remat::").replace(f"{name}_cpp", f"{name}_spy", 1)
        library.define(schema)

        def pass_on(*arguments, name=name, implementer=implementer):
            calls.append((name, snapshot(arguments)))
            result = implementer(*arguments)
            (after or {}).get(name, lambda arguments: None)(arguments)
            return result

        library.impl(f"{name}_spy", pass_on, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


class _Watch(TorchDispatchMode):
    """Remembers the calls of the library's ops that reach the dispatcher from outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused_remat":
            self.calls.append((func._schema.name.removeprefix("fused_remat::"), snapshot(args)))
        return func(*args, **(kwargs or {}))


@contextmanager
def watching() -> Iterator[Calls]:
    """Calls of level 2 ops that reach the dispatcher, in order."""
    with _Watch() as watch:
        yield watch.calls


def run(name: str, arguments: tuple, backend: str):
    """That op of level 2 with these arguments, but on another backend than the "cpp" that they name."""
    return getattr(torch.ops.fused_remat, name).default(*_with_backend(snapshot(arguments), backend))


def samples(call: Callable[[], Tensor], backend: str) -> Calls:
    """Arguments of every op of levels 2 and 3 that `call()` and its backward run, for that backend.

    `call` runs `fused_remat` with its backend left open.
    """
    with watching() as calls:
        outputs = call()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    with spying() as level3:
        for name, arguments in calls:
            run(name, arguments, "spy")
    level2 = [(name, _with_backend(arguments, backend)) for name, arguments in calls]
    return level2 + [(f"{name}_{backend}", arguments) for name, arguments in level3]


def heads_seen(step: Callable[[], None]) -> tuple[list[tuple], list[tuple]]:
    """q, k and v as attention is given them, head group by head group, in the forward and in the backward of `step`.

    `step` runs one `multi_head_attention` on "cpp" and its backward, which is run again with other threads.
    """
    seen, before = {"attention_fwd": [], "attention_bwd": []}, torch.get_num_threads()
    with watching() as level2:
        step()
    try:
        with spying() as calls:
            for threads, (name, arguments) in zip((1, 3), level2, strict=True):
                torch.set_num_threads(threads)
                run(name, arguments, "spy")
    finally:
        torch.set_num_threads(before)
    for name, arguments in calls:
        seen.get(name, []).append(arguments[:3])
    return seen["attention_fwd"], seen["attention_bwd"]


def _with_backend(arguments: tuple, backend: str) -> tuple:
    return tuple(backend if isinstance(argument, str) and argument == "cpp" else argument for argument in arguments)
