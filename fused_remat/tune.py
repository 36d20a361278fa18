"""`tune`: find the fastest Triton tiles for a call on this machine, once and for all later processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_remat import dispatch


def tune(
    call: Callable[..., Any],
    *args: Any,
    seconds: Callable[[Callable[[], Any]], float] | None = None,
    **kwargs: Any,
) -> Path:
    """Time other tiles for the Triton kernels of `call(*args, **kwargs)` and of its backward, and keep the fastest.

    Nothing is tuned unless this is called; without it the tables of `fused_remat/triton` hold. The choice is written to
    a JSON file beside the first-use builds (`FUSED_REMAT_CACHE`), named after the GPU and the Triton version, and read
    by every later process there; results change by rounding only. Takes minutes: every candidate is compiled.

    Args:
        call: anything that runs `fused_remat` ops, such as `fused_remat.attention` or a module.
        seconds: takes a function without arguments and returns the seconds of one run; by default Triton's benchmark.

    Returns:
        The file.

    Raises:
        RuntimeError: the Triton backend cannot run the call; the message has its reasons.
        ValueError: the call starts no Triton kernel, or the file holds something else.
    """
    with dispatch.backend("triton"):
        call(*args, **kwargs)  # refuses what cannot run, before anything is imported or timed
    from fused_remat.triton import configs, tuning

    rows = tuning.search(lambda: _forward_and_backward(call, args, kwargs), seconds=seconds or _benchmark)
    if not rows:
        name = getattr(call, "__name__", type(call).__name__)
        raise ValueError(f"call must run Triton kernels, {name} started none; pass a fused_remat call or module")
    file = tuning.save(rows)
    configs.reload()
    return file


def _forward_and_backward(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with dispatch.backend("triton"):
        outputs = call(*args, **kwargs)
    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(out, Tensor)]
    outputs = [out for out in outputs if out.requires_grad]
    if outputs:
        # Not `backward`, which would add to the gradients that the caller's leaves hold.
        torch.autograd.grad(outputs, _leaves(outputs), [torch.ones_like(out) for out in outputs], allow_unused=True)


def _leaves(outputs: list[Tensor]) -> list[Tensor]:
    """Whatever the outputs' graph would give gradients to."""
    waiting, seen, leaves = [out.grad_fn for out in outputs], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _benchmark(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return do_bench(run, return_mode="median") / 1e3
