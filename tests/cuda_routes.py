"""The ways that calls go on the backend "cuda": calls that take each, and which were taken. With and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlp_cases as cases
import mlp_chunks as chunks
import torch
from mlp_chunks import Chunk, Named
from torch.autograd.profiler import profile

from fused_remat.check.cases import ALIGNED, CASES, Case, Sizes, Tensors

LIBRARY, CUTLASS, ELEMENTWISE = "library epilogues", "cutlass", "elementwise"
BF16, FP16 = torch.bfloat16, torch.float16

# One tile of an MLP's backward ----------------------------------------------------------------------------------------

_FITS_ALL = Chunk(
    rows=ALIGNED.tokens, width=ALIGNED.width, features=ALIGNED.hidden, out=ALIGNED.width, dtype=BF16, activation="silu"
)
# By what is special about them: the tile, and its way where CUTLASS was compiled.
TILES = {
    "gelu_tanh": (_FITS_ALL.but(activation="gelu_tanh"), LIBRARY),
    "gelu_tanh, no bias": (_FITS_ALL.but(activation="gelu_tanh", bias=False), LIBRARY),
    "gelu_tanh, float16": (_FITS_ALL.but(activation="gelu_tanh", dtype=FP16), LIBRARY),
    "gelu_tanh, float32": (_FITS_ALL.but(activation="gelu_tanh", dtype=torch.float32), LIBRARY),
    "plain": (_FITS_ALL, CUTLASS),
    "float16": (_FITS_ALL.but(dtype=FP16), CUTLASS),
    "gated": (_FITS_ALL.but(gated=True), CUTLASS),
    "gated, float16": (_FITS_ALL.but(gated=True, dtype=FP16), CUTLASS),
    "dropout": (_FITS_ALL.but(dropout_p=0.25), CUTLASS),
    "gated, dropout": (_FITS_ALL.but(gated=True, dropout_p=0.25, activation="gelu"), CUTLASS),
    "kept": (_FITS_ALL.but(kept=(ALIGNED.hidden, 0), activation="relu2"), CUTLASS),
    "gated, one kept, some of the other": (_FITS_ALL.but(gated=True, kept=(ALIGNED.hidden, 40)), CUTLASS),
    "float32": (_FITS_ALL.but(dtype=torch.float32), ELEMENTWISE),
    "odd features": (_FITS_ALL.but(features=ALIGNED.hidden - 1), ELEMENTWISE),
}


def tile_ops() -> chunks.Ops:
    return torch.ops.fused_remat.mlp_fwd_chunk_cuda, torch.ops.fused_remat.mlp_bwd_chunk_cuda


def route(chunk: Chunk, given: Named | None = None, *, scratch: int | None = None) -> list[str]:
    """The way of a tile's backward, then why it goes none of those before."""
    given = chunks.operands(chunk) if given is None else given
    rows, features, how = chunk.rows, chunk.features, {"dtype": chunk.dtype, "device": given["x"].device}
    up, gate, hidden, dup, dgate = (
        torch.empty(rows, n, **how) for n in (*chunk.kept, features, features, features * chunk.gated)
    )
    weights = [given.get(name) for name in ("w_up", "w_down", "b_up", "w_gate", "b_gate")]
    seed = torch.zeros(int(chunk.dropout_p > 0), dtype=torch.int64, device=how["device"])
    return torch.ops.fused_remat.mlp_route_cuda(
        given["x"], given["dy"], *weights, up, gate, seed, chunk.activation, chunk.dropout_p, hidden, dup, dgate,
        torch.empty(rows * features if scratch is None else scratch, **how),
    )  # fmt: skip


def rebuilt(chunk: Chunk) -> int:
    """Pre-activations that the tile's backward makes again, each by one product of ATen's unless by cuBLASLt."""
    kept = chunk.kept if chunk.gated else chunk.kept[:1]
    return sum(columns < chunk.features for columns in kept)


# A whole MLP ----------------------------------------------------------------------------------------------------------

# Names of cases -> the way of each tile of their backward in sizes that fit all, and what is rebuilt there.
LAYERS = {
    "gelu": (CUTLASS, 1),
    "relu2, no bias, kept": (CUTLASS, 0),
    "gelu_tanh, LayerNorm": (LIBRARY, 1),
    "gated silu": (CUTLASS, 2),
    "dropout": (CUTLASS, 1),
    "gated, dropout, a quarter kept": (CUTLASS, 2),
}


def layer(name: str) -> Case:
    return next(case for case in CASES if (case.op, case.name) == ("mlp", name))


def products_of(way: str, rebuilds: int) -> int:
    """Products of ATen's in a tile's backward that goes that way: the others are cuBLASLt's and CUTLASS's."""
    return {LIBRARY: 0, CUTLASS: rebuilds, ELEMENTWISE: rebuilds + 1}[way]


def tile_products(call: Callable[[], object]) -> list[int]:
    """Products of ATen's inside each tile's backward that `call()` ran."""
    with profile() as trace:
        call()
    return [
        sum(child.name in ("aten::mm", "aten::addmm") for child in event.cpu_children)
        for event in trace.function_events
        if event.name == "fused_remat::mlp_bwd_chunk_cuda"
    ]


# Sums over tiles ------------------------------------------------------------------------------------------------------

# Many tokens are cut, for few the features are.
SUMMED = {"features": ALIGNED.tokens, "tokens": 5 * ALIGNED.tokens}
CUT = (replace(ALIGNED, workspace=2**19), replace(ALIGNED, tokens=SUMMED["tokens"], workspace=2**21))


def summed(axis: str) -> tuple[Case, Sizes]:
    """An MLP without biases, so that all of ATen's that multiplies and adds are sums over tiles."""

    def shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
        return {"x": (s.tokens, s.width), "w_up": (s.hidden, s.width), "w_down": (s.width, s.hidden)}

    def arguments(tensors: Tensors, s: Sizes) -> dict[str, object]:
        return {**tensors, "activation": "silu", "workspace": s.workspace}

    return Case("mlp", f"summed over {axis}", shapes, arguments), replace(ALIGNED, tokens=SUMMED[axis], workspace=2**19)


def tiles_of(case: Case, sizes: Sizes, dtype: torch.dtype, backend: str) -> tuple[str, int]:
    """The axis that its backward cuts, and into how many."""
    given = {name: t.to(dtype) for name, t in case.tensors(sizes).items()}
    axis, rows, features, _ = cases.plan(given, sizes.workspace, backend, activation="silu")
    return axis, -(-sizes.tokens // rows) * -(-sizes.hidden // features)


def additions(call: Callable[[], object]) -> int:
    """Products that ATen added to something in `call()`."""
    with profile() as trace:
        call()
    return sum(event.name == "aten::addmm" for event in trace.function_events)


# Attention ------------------------------------------------------------------------------------------------------------

# The operators of torch that the ways go by, forward and backward; None: by our own kernels.
OPERATORS = {
    "cudnn": ("_scaled_dot_product_cudnn_attention", None),
    "flash": ("_flash_attention_forward", "_flash_attention_backward"),
    "efficient": ("_efficient_attention_forward", "_efficient_attention_backward"),
    "own": (None, None),
}


def attention(name: str, *, batch: int = 32, kv_heads: int = 4, **settings: object) -> Case:
    """Eight heads, grouped by two. `batch` times `kv_heads` blocks are enough for the efficient kernels' backward."""

    def shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
        keys = (batch, kv_heads, s.tokens, s.head)
        return {"q": (batch, 8, s.tokens, s.head), "k": keys, "v": keys}

    def arguments(tensors: Tensors, s: Sizes) -> dict[str, object]:
        return {**tensors, "workspace": s.workspace, **settings}

    return Case("attention", name, shapes, arguments)


ATTENTION = (attention("full"), attention("causal", is_causal=True), attention("single heads", batch=16, kv_heads=8))


def attention_operators(call: Callable[[], object]) -> set[str]:
    """Names of torch's operators of `OPERATORS` that `call()` ran."""
    with profile() as trace:
        call()
    known = {name for pair in OPERATORS.values() for name in pair if name}
    return known & {event.name.removeprefix("aten::") for event in trace.function_events}


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def without(*names: str) -> Iterator[None]:
    """torch's switches of these kernels are off."""
    switches = torch.backends.cuda
    set_by = {"cudnn": switches.enable_cudnn_sdp, "flash": switches.enable_flash_sdp,
              "efficient": switches.enable_mem_efficient_sdp}  # fmt: skip
    for name in names:
        set_by[name](False)
    try:
        yield
    finally:
        for name in names:
            set_by[name](True)


@contextmanager
def only(way: str) -> Iterator[None]:
    """Attention goes that way, if nothing else is against it."""
    others = [name for name in OPERATORS if name not in (way, "own")]
    if way == "cudnn":  # which torch counts among what is not deterministic
        with without(*others):
            yield
    else:
        with without(*others), deterministic():
            yield
