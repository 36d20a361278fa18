"""The models that every tool is tried on: each as stock code and with our layers, and what their tests share.

A new kind of model is a new row of `MODELS`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from convert_cases import assert_same, randomize, step
from torch import Tensor, nn
from torch.autograd.profiler import profile

import fused_remat
from fused_remat import ops
from fused_remat.convert.rebind import records_of

# Widths of the residual stream and inside an MLP, number of heads. No length is one of these: a compiler takes dims of
# one size for one dim.
WIDTH, HIDDEN, HEADS = 24, 41, 3
COMPILED = ops.ready() is None  # without the extension the results stay, the savings do not
needs_extension = pytest.mark.skipif(not COMPILED, reason=f"the compiled extension is not available: {ops.ready()}")

OURS = (fused_remat.MLP, fused_remat.GatedMLP, fused_remat.MultiheadAttention)

# The kernel in which the forward of an op ends, as the profiler names it.
KERNELS = {"mlp_fwd_chunk_cpp": "mlp", "attention_fwd_cpp": "attention"}


class StockMLP(nn.Module):
    """What `fused_remat.MLP` does, written out; the same parameter names."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(F.gelu(self.fc1(x))))


class StockGatedMLP(nn.Module):
    """What `fused_remat.GatedMLP` does, written out; the same parameter names."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj, self.drop = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.drop(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class SelfAttention(nn.Module):
    """An attention module that is called the usual way, weights being of no use."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Hidden(nn.Module):
    """The last hidden state of a language model for embeddings instead of tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


def _same_weights(ours: nn.Module, stock: nn.Module) -> nn.Module:
    ours.load_state_dict(stock.state_dict())
    return ours.train(stock.training).to(next(stock.parameters()).dtype)


def _attention(dropout: float) -> nn.MultiheadAttention:
    return SelfAttention(nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True))


def _encoder(dropout: float) -> nn.Module:
    # GELU, whose slope does not jump: rounding of a value near zero must not decide about a gradient.
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _llama(dropout: float) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=1, head_dim=8, attention_dropout=dropout, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return Hidden(transformers.LlamaModel._from_config(config))


def _converted(stock: nn.Module) -> nn.Module:
    model = copy.deepcopy(stock)
    report = fused_remat.convert(model)
    assert report.converted
    return model


def _ours(cls: type[nn.Module], **settings: object) -> Callable[[nn.Module], nn.Module]:
    def build(stock: nn.Module) -> nn.Module:
        return _same_weights(cls(WIDTH, HIDDEN, dropout=stock.drop.p, **settings), stock)

    return build


def _our_attention(stock: nn.Module) -> nn.Module:
    dropout = stock.attention.dropout
    return _same_weights(SelfAttention(fused_remat.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)), stock)


@dataclass(frozen=True)
class Model:
    """One row: how to build it from a dropout probability, how ours comes from stock, which parts users wrap."""

    make: Callable[[float], nn.Module]
    fuse: Callable[[nn.Module], nn.Module]
    blocks: tuple[str, ...] = ("",)  # module paths; "" is the whole

    def pair(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
        """(ours, stock), equal in every parameter, in training mode."""
        stock = randomize(self.make(dropout)).to(dtype).train()
        return self.fuse(stock), stock


MODELS = {
    "MLP": Model(StockMLP, _ours(fused_remat.MLP)),
    "GatedMLP": Model(StockGatedMLP, _ours(fused_remat.GatedMLP)),
    "MultiheadAttention": Model(_attention, _our_attention),
    "encoder": Model(_encoder, _converted, ("layers.0", "layers.1")),
    "Llama": Model(_llama, _converted, ("model.layers.0", "model.layers.1")),
}
CONVERTED = [name for name, model in MODELS.items() if model.fuse is _converted]
every_model = pytest.mark.parametrize("name", MODELS)
every_converted = pytest.mark.parametrize("name", CONVERTED)


def tokens(length: int = 9, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length), dtype=torch.float64).to(
        dtype
    )


def forwards(call: Callable[[], object]) -> dict[str, int]:
    """How many fused forwards `call()` computed, by kind: kernels that ran, not ops that a cache may have answered."""
    with profile() as trace:
        call()
    names = (event.name.removeprefix("fused_remat::") for event in trace.function_events)
    return dict(Counter(KERNELS[name] for name in names if name in KERNELS))


def fused_parts(model: nn.Module) -> dict[str, int]:
    """How many fused forwards one call of `model` is made of, by kind."""
    kinds = [record.kind for module in model.modules() for record in records_of(module).values()]
    kinds += [type(module).__name__.lower() for module in model.modules() if type(module) in OURS]
    return dict(Counter(kind for name in kinds for kind in ("mlp", "attention") if kind in name))


def named(results: dict[str, Tensor], *wrappers: str) -> dict[str, Tensor]:
    """`step`'s results without what a wrapper added to the names of parameters."""
    for wrapper in wrappers or ("_orig_mod.",):
        results = {name.replace(wrapper, ""): value for name, value in results.items()}
    return results


def assert_equal_steps(ours: nn.Module, stock: nn.Module, x: Tensor, tolerance: float = 1e-5, *wrappers: str) -> None:
    """Output and all gradients of one step are those of stock code."""
    assert_same(named(step(ours, x), *wrappers), named(step(stock, x), *wrappers), tolerance)


@contextmanager
def saved(shapes_of: Callable[[Tensor], bool] = lambda t: True) -> Iterator[list[Tensor]]:
    """Collects the tensors that are saved for backward."""
    tensors: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if shapes_of(tensor):
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield tensors


class Replaced(nn.Module):
    """`model` whose forward is another function of the same parameters, for `step`."""

    def __init__(self, model: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def own(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """`step`'s results without the name under which `Replaced` holds the model."""
    return {name.replace("dmodel.", "d", 1): value for name, value in results.items()}
