"""One call of attention at level 3: operands and masks by a few words, and the four ops on any backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_remat import ops

needs_extension = f"the compiled extension is not available: {ops.ready()}" if ops.ready() else None
Named = dict[str, Tensor]
UNLIMITED = 2**61  # Band::kUnlimited of csrc/attention.h
GRADIENTS = ("dq", "dk", "dv", "dattn_mask", "dkey_mask")
# What a few operations round, in units of the last place of a number of order 1.
FLOORS = {torch.float64: 1e-14, torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """A mask is its dtype and one letter for each dim, "1" where it is broadcast: "bool b1ij", "float 1h1j"."""

    batch: int = 2
    heads: int = 2
    kv_heads: int = 1
    length_q: int = 17
    length_k: int = 35  # with extra keys
    width: int = 16
    value_width: int = 16
    dtype: torch.dtype = torch.float32
    attn_mask: str = ""
    key_mask: str = ""
    low: int = -UNLIMITED
    high: int = UNLIMITED
    extra_keys: int = 0
    dropout_p: float = 0.0
    scale: float = 0.3
    softcap: float = 0.0
    head0: int = 0
    num_heads: int = 0  # of which these heads are a group; 0: all
    dweights: str = ""  # "b1ij" for averaged weights, "bhij"
    rebuild: bool = False
    seed: int = -5

    def but(self, **changes) -> Case:
        return replace(self, **changes)

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def shape(self, letters: str, keys: int) -> list[int]:
        sizes = {"b": self.batch, "h": self.heads, "i": self.length_q, "j": keys, "1": 1}
        return [sizes[letter] for letter in letters]


def random_mask(case: Case, words: str) -> Tensor | None:
    if not words:
        return None
    kind, letters = words.split()
    shape = case.shape(letters, case.length_k - case.extra_keys)
    return torch.rand(shape) < 0.7 if kind == "bool" else torch.randn(shape, dtype=torch.float64).to(case.dtype)


def masks_of_odd_strides() -> dict[str, Named]:
    """Masks that fit `Case()`, by how they lie in memory."""
    layouts = {
        "keys before queries": torch.randn(2, 2, 35, 17).transpose(2, 3),
        "part of a longer one": torch.randn(2, 2, 24, 44)[:, :, 3:-4, 2:-7],
        "every second key": torch.randn(2, 2, 17, 70)[..., ::2],
        "expanded": torch.randn(2, 1, 1, 35).expand(-1, 2, 17, -1),
    }
    keys = torch.ones(35, 2, dtype=torch.bool).t()[:, None, None]
    keys[1, ..., 30:] = False
    both = {"attn_mask": layouts["keys before queries"] > -0.5, "key_mask": keys}
    return {name: {"attn_mask": mask} for name, mask in layouts.items()} | {"bool, with a key mask": both}


def operands(case: Case) -> Named:
    """q, k, v, dout, and the masks and the gradient of the weights that the case has."""
    shapes = {
        "q": (case.batch, case.heads, case.length_q, case.width),
        "k": (case.batch, case.kv_heads, case.length_k, case.width),
        "v": (case.batch, case.kv_heads, case.length_k, case.value_width),
        "dout": (case.batch, case.heads, case.length_q, case.value_width),
    }
    made = {name: torch.randn(shape, dtype=torch.float64).to(case.dtype) for name, shape in shapes.items()}
    masks = {"attn_mask": random_mask(case, case.attn_mask), "key_mask": random_mask(case, case.key_mask)}
    if case.dweights:
        made["dweights"] = torch.randn(case.shape(case.dweights, case.length_k), dtype=case.wide)
    return made | {name: mask for name, mask in masks.items() if mask is not None}


def op(name: str, backend: str):
    if backend != "triton":
        return getattr(torch.ops.fused_remat, f"{name}_{backend}")
    from fused_remat.triton import attention

    return getattr(attention, name)


def attending(case: Case, given: Named) -> tuple:
    """The arguments of every op between the operands and the buffers."""
    seed = torch.tensor([case.seed] if case.dropout_p else [], dtype=torch.int64)
    return (
        given.get("attn_mask"), given.get("key_mask"), seed, case.low, case.high, case.extra_keys, case.dropout_p,
        case.scale, case.softcap, case.head0, case.num_heads or case.heads, 2**20,
    )  # fmt: skip


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def forward(backend: str, case: Case, given: Named) -> Named:
    rows = given["q"].shape[:3]
    made = {"out": unwritten(*rows, case.value_width, dtype=given["q"].dtype)}
    made["lse"] = unwritten(*rows, dtype=torch.promote_types(given["q"].dtype, torch.float32))
    op("attention_fwd", backend)(given["q"], given["k"], given["v"], *attending(case, given), *made.values())
    return made


def _factor(case: Case) -> float:
    return 1.0 / case.heads if "1" in case.dweights else 1.0


def delta(backend: str, case: Case, given: Named, saved: Named) -> Named:
    made = {name: unwritten(*saved["lse"].shape, dtype=saved["lse"].dtype) for name in ("delta", "correction")}
    out = saved["out"]
    made["rebuilt"] = unwritten(*out.shape, dtype=out.dtype) if case.rebuild else out
    op("attention_delta", backend)(
        given["q"], given["k"], given["v"], *attending(case, given), saved["lse"], given["dout"],
        given.get("dweights"), _factor(case), case.rebuild, made["rebuilt"], made["delta"], made["correction"],
    )  # fmt: skip
    return made


def wanted_of(given: Named) -> tuple[str, ...]:
    """Every gradient that these operands can have."""
    is_float = lambda name: name in given and given[name].is_floating_point()
    return tuple(name for name in GRADIENTS if is_float(name.removeprefix("d")))


def backward(
    backend: str, case: Case, given: Named, saved: Named, rows: Named, wanted: tuple[str, ...] | None = None
) -> Named:
    """The wanted gradients; those of masks are added to ones."""
    wanted = wanted_of(given) if wanted is None else wanted
    like = {name: given[name.removeprefix("d")] for name in wanted}
    made = {name: (torch.ones if "mask" in name else torch.zeros)(t.shape, dtype=saved["lse"].dtype)
            for name, t in like.items()}  # fmt: skip
    op("attention_bwd", backend)(
        given["q"], given["k"], given["v"], *attending(case, given), saved["lse"], rows["correction"], rows["delta"],
        given["dout"], None if "dweights" in given else rows["rebuilt"], given.get("dweights"), _factor(case),
        *(made.get(name) for name in GRADIENTS),
    )  # fmt: skip
    return made


def weights(backend: str, case: Case, given: Named, saved: Named, letters: str = "b1ij") -> Tensor:
    """Added to ones."""
    made = torch.ones(case.shape(letters, case.length_k), dtype=saved["lse"].dtype)
    factor = 1.0 / case.heads if "1" in letters else 1.0
    op("attention_weights", backend)(
        given["q"], given["k"], *attending(case, given), saved["lse"], factor, made
    )  # fmt: skip
    return made


def run(backend: str, case: Case, given: Named, *, forward_by: str | None = None, weights_of: str = "") -> Named:
    """Everything that forward and backward return."""
    saved = forward(forward_by or backend, case, given)
    rows = delta(backend, case, given, saved)
    made = saved | rows | backward(backend, case, given, saved, rows)
    del made["correction"]  # differs by what lse was rounded to
    if weights_of:
        made["weights"] = weights(backend, case, given, saved, weights_of)
    return made


def in_double(given: Named) -> Named:
    return {name: t.double() if t.is_floating_point() else t for name, t in given.items()}


def assert_as_exact_as_torch(actual: Named, stock: Named, truth: Named, label: object = "") -> None:
    """At most twice the error of the same dtype in torch, plus what a few operations round: a sum of terms of order 1
    that cancel is as exact as its terms, and the gradient of a mask sums all that the mask is broadcast over."""
    assert actual.keys() == truth.keys()
    for name, exact in truth.items():
        finite = exact.isfinite()
        assert torch.equal(actual[name].isfinite(), finite), (label, name)
        assert torch.equal(actual[name].isnan(), exact.isnan()), (label, name)
        exact = exact[finite].double()
        error, allowed = ((made[name][finite].double() - exact).norm().item() for made in (actual, stock))
        terms = truth["dq"].shape[:3].numel() * truth["dk"].shape[2] / exact.numel() if "mask" in name else 1
        floor = FLOORS[stock["out"].dtype] * max(exact.norm().item(), terms**0.5)
        assert error <= 2 * allowed + floor, (label, name, error, allowed)


def check(backend: str, case: Case, given: Named | None = None, label: object = "", **how) -> Named:
    """Forward and backward on that backend against ATen in the same dtype and in float64."""
    given = operands(case) if given is None else given
    ours = run(backend, case, given, **how)
    how.pop("forward_by", None)
    stock = run("aten", case, given, **how)
    truth = run("aten", case.but(dtype=torch.float64), in_double(given), **how)
    assert_as_exact_as_torch(ours, stock, truth, label or case)
    return ours
