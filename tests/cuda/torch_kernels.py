"""Stand-ins on the CPU for the attention operators of torch that only a GPU runs: what they compute, in plain torch.

Each checks what the real one asks of its arguments, and answers in the real one's layouts and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
KINDS = {
    "Tensor": Tensor, "SymInt": int, "int": int, "float": float, "bool": bool,
    "Optional[Tensor]": (Tensor, type(None)), "Optional[SymInt]": (int, type(None)),
    "Optional[int]": (int, type(None)), "Optional[float]": (float, type(None)),
}  # fmt: skip


class Call(dict):
    """The arguments of a call by name; `op` is the operator, `results` what it answered."""

    def __init__(self, op: torch._ops.OpOverload, arguments: dict[str, Any]):
        super().__init__(arguments)
        self.op, self.name = op, op._schema.name.removeprefix("aten::")
        self.results: tuple = ()


def _bound(op: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Call:
    """By name, each of the type that the schema says: a boxed call is checked by nobody else."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    for argument in op._schema.arguments:
        value = given.setdefault(argument.name, argument.default_value)
        kind = str(argument.real_type)
        undefined = kind == "Tensor" and value is None  # an undefined tensor
        assert undefined or isinstance(value, KINDS[kind]), (argument.name, kind, value)
        assert kind == "bool" or not isinstance(value, bool), (argument.name, value)
    return Call(op, given)


def _check_heads(*operands: Tensor, dtypes: tuple[torch.dtype, ...], multiple: int) -> None:
    for t in operands:
        assert t.dim() == 4 and t.dtype == operands[0].dtype in dtypes
        assert t.stride(3) == 1 and t.shape[3] % multiple == 0
        assert t.data_ptr() % 16 == 0
        assert all(t.stride(d) * t.element_size() % 16 == 0 for d in range(3) if t.shape[d] > 1)


def _scores(q: Tensor, k: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """Of [B, H, L, E] operands whose heads may be grouped, in float32."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q.float() @ k.float().mT * scale).masked_fill(~allowed, -math.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, allowed)
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (scores.softmax(-1) @ values).to(q.dtype), scores.logsumexp(-1)


def _differentiate(q, k, v, out, lse, dout, scale, allowed) -> tuple[Tensor, Tensor, Tensor]:
    """From the known lse, delta from `out`; dk and dv of every query head are rounded before they are added up."""
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    p = (_scores(q, k, scale, allowed) - lse[..., None]).exp()
    dout_, values = dout.float(), v.float().repeat_interleave(groups[1], 1)
    dscores = p * (dout_ @ values.mT - (dout_ * out.float()).sum(-1, keepdim=True)) * scale
    dq = dscores @ k.float().repeat_interleave(groups[1], 1)
    dk, dv = (
        made.to(q.dtype).unflatten(1, groups).float().sum(2).to(q.dtype)
        for made in (dscores.mT @ q.float(), p.mT @ dout_)
    )
    return dq.to(q.dtype), dk, dv


def _distance(length_q: int, length_k: int, corner: int) -> Tensor:
    return torch.arange(length_k) - torch.arange(length_q)[:, None] - corner


def _flash_allowed(a: Call) -> Tensor:
    length_q, length_k = a["query"].shape[1], a["key"].shape[1]
    assert (a["max_q"], a["max_k"], a["dropout_p"]) == (length_q, length_k, 0.0)
    assert a["cum_seq_q"] is None and a["cum_seq_k"] is None
    left, right = (-1 if a[name] is None else a[name] for name in ("window_size_left", "window_size_right"))
    assert left >= 0 or a["window_size_left"] is None, "a negative side has no limit"
    assert right >= 0 or a["window_size_right"] is None, "a negative side has no limit"
    # As flash_api.cpp reads them.
    left, right = (-1 if side >= length_k else side for side in (left, right))
    if a["is_causal"]:
        right = 0
    if left < 0 and right < 0:
        return torch.ones(length_q, length_k, dtype=torch.bool)
    left, right = (length_k if side < 0 else side for side in (left, right))
    distance = _distance(length_q, length_k, length_k - length_q)
    return (distance >= -left) & (distance <= right)


def _flash_attention_forward(a: Call) -> tuple:
    q, k, v = (a[name].transpose(1, 2) for name in ("query", "key", "value"))
    _check_heads(a["query"], a["key"], a["value"], dtypes=HALVES, multiple=8)
    assert q.shape[3] == v.shape[3] <= 256 and not a["return_debug_mask"]
    out, lse = _attend(q, k, v, a["scale"], _flash_allowed(a))
    empty = torch.empty_like(a["query"]).copy_(out.transpose(1, 2))
    state = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return empty, lse, *state, out.new_empty(0)


def _flash_attention_backward(a: Call) -> tuple:
    _check_heads(a["query"], a["key"], a["value"], dtypes=HALVES, multiple=8)
    # The kernels copy what is not, unaccounted for; they read lse as if it were.
    assert all(a[name].is_contiguous() for name in ("grad_out", "out", "logsumexp"))
    assert torch.are_deterministic_algorithms_enabled(), "dq would be added by atomics"
    names = ("query", "key", "value", "out", "grad_out")
    q, k, v, out, dout = (a[name].transpose(1, 2) for name in names)
    made = _differentiate(q, k, v, out, a["logsumexp"], dout, a["scale"], _flash_allowed(a))
    return tuple(t.transpose(1, 2) for t in made)


def _efficient_allowed(a: Call) -> Tensor:
    length_q, length_k = a["query"].shape[1], a["key"].shape[1]
    assert a["bias"] is None and a["cu_seqlens_q"] is None and a["cu_seqlens_k"] is None
    assert a["dropout_p"] == 0.0 and a["window_size"] is None
    assert a["query"].shape[2] == a["key"].shape[2] == a["value"].shape[2], "older versions have no grouped heads"
    corner = {0: None, 1: 0, 2: length_k - length_q}[a["custom_mask_type"]]
    return _distance(length_q, length_k, length_k if corner is None else corner) <= 0


def _efficient_attention_forward(a: Call) -> tuple:
    operands = [a[name] for name in ("query", "key", "value")]
    _check_heads(*operands, dtypes=(*HALVES, torch.float32), multiple=4 if operands[0].dtype == torch.float32 else 8)
    q, k, v = (t.transpose(1, 2) for t in operands)
    assert a["compute_log_sumexp"]
    out, lse = _attend(q, k, v, a["scale"], _efficient_allowed(a))
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.inf)
    padded[..., : lse.shape[2]] = lse
    state = torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)
    return out.transpose(1, 2).contiguous(), padded, *state, q.shape[2], k.shape[2]


def _efficient_attention_backward(a: Call) -> tuple:
    q, k, v, out, dout = (a[name].transpose(1, 2) for name in ("query", "key", "value", "out", "grad_out_"))
    multiple = 4 if q.dtype == torch.float32 else 8
    _check_heads(a["query"], a["key"], a["value"], dtypes=(*HALVES, torch.float32), multiple=multiple)
    assert all(a[name].is_contiguous() for name in ("grad_out_", "out", "logsumexp"))
    assert a["num_splits_key"] == 1, "dq would be added in no fixed order"
    assert (a["max_seqlen_q"], a["max_seqlen_k"], a["bias_requires_grad"]) == (q.shape[2], k.shape[2], False)
    lse = a["logsumexp"]
    assert lse.shape[2] % 32 == 0 and lse[..., q.shape[2] :].eq(math.inf).all()
    made = _differentiate(q, k, v, out, lse[..., : q.shape[2]], dout, a["scale"], _efficient_allowed(a))
    return *(t.transpose(1, 2).contiguous() for t in made), None


def _scaled_dot_product_cudnn_attention(a: Call) -> tuple:
    q, k, v = a["query"], a["key"], a["value"]
    _check_heads(q, k, v, dtypes=HALVES, multiple=8)
    assert a["attn_bias"] is None and a["compute_log_sumexp"] and a["dropout_p"] == 0.0 and not a["return_debug_mask"]
    assert k.shape[2] > 1 and max(q.shape[3], v.shape[3]) <= 128
    corner = 0 if a["is_causal"] else k.shape[2]
    out, lse = _attend(q, k, v, a["scale"], _distance(q.shape[2], k.shape[2], corner) <= 0)
    state = torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *state, None


STAND_INS: tuple[Callable[[Call], tuple], ...] = (
    _flash_attention_forward, _flash_attention_backward, _efficient_attention_forward, _efficient_attention_backward,
    _scaled_dot_product_cudnn_attention,
)  # fmt: skip


@contextmanager
def standing_in() -> Iterator[list[Call]]:
    """Inside the `with` block the operators take CPU tensors; the calls that they got, in order."""
    calls: list[Call] = []
    library = torch.library.Library("aten", "IMPL")

    def register(function: Callable[[Call], tuple]) -> None:
        op = getattr(torch.ops.aten, function.__name__).default

        def run(*args, **kwargs):
            call = _bound(op, args, kwargs)
            call.results = function(call)
            calls.append(call)
            return call.results

        library.impl(function.__name__, run, "CPU")

    for function in STAND_INS:
        register(function)
    try:
        yield calls
    finally:
        library._destroy()
