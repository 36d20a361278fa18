"""Offsets beyond 2^31 elements, for every tensor of every op in CUDA C++: in memory that is never touched in between.

The calls are those that the public functions make; one tensor of one call at a time is spread out along one of its
dims, and the results must be the bits of the call on dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import mha_cases
import mlp_cases
import mlp_small_calls
import pytest
import spy
import torch
from torch import Tensor

from fused_remat import Norm

pytestmark = [
    pytest.mark.usefixtures("one_thread", "own_attention"),
    pytest.mark.skipif(mlp_cases.needs_extension is not None, reason=str(mlp_cases.needs_extension)),
]
BEYOND = 2**31


def far(t: Tensor, dim: int) -> Tensor:
    """The same values; the last along `dim` lies 2^31 elements behind the first."""
    stride = -(-BEYOND // (t.shape[dim] - 1) // 64) * 64
    others = torch.empty_like(t.select(dim, 0))
    strides = list(others.stride())
    strides.insert(dim, stride)
    span = 1 + sum((size - 1) * step for size, step in zip(t.shape, strides, strict=True) if size > 1)
    return torch.empty(span, dtype=t.dtype).as_strided(t.shape, strides).copy_(t)


def spreadable(t: Tensor) -> list[int]:
    """Dims along which level 2 may pass any stride: neither dense nor broadcast."""
    return [dim for dim in range(t.dim()) if t.shape[dim] > 1 and t.stride(dim) > 1]


def _mlp(dtype: torch.dtype, norm: str, **settings) -> Tensor:
    given = mlp_cases.operands(10, 24, 40, gated=settings.pop("gated", False), dtype=dtype)
    weight, bias = (torch.randn(24).to(dtype).requires_grad_() for _ in range(2))
    return mlp_cases.run(given, norm=Norm(norm, weight, bias if norm == "layer_norm" else None), **settings)


def _block(dtype: torch.dtype, settings: dict | None = None, **changes) -> Tensor | tuple[Tensor, ...]:
    block = mha_cases.Block(batch=2, length=5, heads=2, width=8, model=24, **changes)
    return block.call(block.operands(dtype), **settings or {})


CALLS: dict[str, Callable[[], Tensor | tuple[Tensor, ...]]] = {
    "gated mlp, dropout": lambda: _mlp(torch.float16, "layer_norm", activation="silu", gated=True, dropout_p=0.2),
    "mlp, fp32": lambda: _mlp(torch.float32, "rms_norm", activation="gelu"),
    "block, rotary, norms": lambda: _block(torch.float16, norm="layer_norm", qk_norm=True, rotary=4),
    "block, fp32, float mask, dropout": lambda: _block(
        torch.float32, {"dropout_p": 0.2}, mask="float", rotary=8, interleaved=True
    ),
    "block, weights": lambda: _block(torch.bfloat16, {"need_weights": True}, mask="bool", qk_norm=True),
}


def level3(name: str) -> list[tuple[str, tuple]]:
    """Calls of ops in CUDA C++ by the public call of that name, no two of which differ in values alone."""

    def form(argument):
        return (argument.shape, argument.stride(), argument.dtype) if isinstance(argument, Tensor) else type(argument)

    made = [(op, given) for op, given in spy.samples(CALLS[name], "cuda") if op.endswith("_cuda")]
    unlike = {(op, tuple(form(argument) for argument in given)): (op, given) for op, given in made}
    return [call for call in unlike.values() if has_kernel(call[0])]


def has_kernel(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fused_remat::{op}", "CPU")


def tensors_after(op: str, given: tuple) -> list[Tensor]:
    """What the op leaves in its tensors: results and operands."""
    getattr(torch.ops.fused_remat, op)(*given)
    return [argument for argument in given if isinstance(argument, Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_offsets_beyond_32_bits(name):
    spread_out = set()
    calls = level3(name)
    for op, given in calls:
        near = tensors_after(op, spy.snapshot(given))
        for place, argument in enumerate(given):
            for dim in spreadable(argument) if isinstance(argument, Tensor) else ():
                spread = list(spy.snapshot(given))
                spread[place] = far(argument, dim)
                for ours, right in zip(tensors_after(op, tuple(spread)), near, strict=True):
                    torch.testing.assert_close(ours, right, rtol=0, atol=0, equal_nan=True, msg=f"{op} {place} {dim}")
                spread_out.add(op)
    assert spread_out == {op for op, _ in calls} != set()


def test_offsets_of_narrow_mlps_beyond_32_bits():
    """Of what both kernels read: level 2 makes their results dense."""
    case = mlp_small_calls.Narrow(gated=True, dropout_p=0.2)
    given = mlp_small_calls.operands(case)
    near = mlp_small_calls.run(case, given)
    for name, t in given.items():
        for dim in spreadable(t):
            mlp_small_calls.assert_same(mlp_small_calls.run(case, given | {name: far(t, dim)}), near)


def test_a_spread_tensor_reaches_beyond():
    t = torch.randn(3, 4, 5).transpose(0, 1)
    for dim in spreadable(t):
        spread = far(t, dim)
        assert spread.stride(dim) * (t.shape[dim] - 1) >= BEYOND and torch.equal(spread, t)
    assert spreadable(t) == [0, 1]
    assert spreadable(t[:1].expand(4, 3, 5)) == [1]
