"""Drawn configurations of nn.MultiheadAttention, and what the stock module or a written-out one answers to them."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import fused_remat
from fused_remat import ops

# Backends that run the module here; each is named in the tests, and a named backend runs or refuses.
BACKENDS = ("reference",) if ops.ready() else ("cpp", "aten", "reference")

Answer = dict[str, Tensor]


@dataclass
class Case:
    """One configuration: constructor settings, forward arguments, and the mode it runs in."""

    settings: dict
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict  # the other arguments of forward
    training: bool
    grad: bool
    rule: str = ""  # which documented rule decides, "" where stock does
    masks: list[str] = field(default_factory=list)  # names of masks that want a gradient


def draw(index: int) -> Case:
    """The configuration of this index: a function of it alone."""
    dice = random.Random(index)
    generator = torch.Generator().manual_seed(index)
    dtype = dice.choice([torch.float64, torch.float32])
    heads, batch = dice.choice([1, 2, 2, 3, 4]), dice.choice([1, 2, 2, 3, 3, 0] if dice.random() < 0.3 else [1, 2, 3])
    width = heads * dice.choice([1, 2, 3, 4])
    training = dice.random() < 0.6
    settings = {
        "embed_dim": width, "num_heads": heads, "dropout": 0.0 if training else dice.choice([0.0, 0.4, 1.0]),
        "bias": dice.random() < 0.7, "add_bias_kv": dice.random() < 0.25, "add_zero_attn": dice.random() < 0.25,
        "batch_first": dice.random() < 0.6, "dtype": dtype,
    }  # fmt: skip
    kind = dice.choice(["self", "self", "memory", "separate"])
    if kind == "separate":
        settings |= {"kdim": dice.choice([None, 3, 5, width]), "vdim": dice.choice([None, 2, 5, width])}
    length = dice.choice([1, 2, 3, 5, 6])
    keys = length if kind == "self" else dice.choice([0, 1, 2, 4, 7] if dice.random() < 0.3 else [1, 2, 4, 7])
    batched = batch == 0 or dice.random() < 0.8
    batch = batch if batched else 1

    def tensor(count: int, features: int | None) -> Tensor:
        x = torch.randn(batch, count, features or width, generator=generator, dtype=torch.float64).to(dtype)
        return x.squeeze(0) if not batched else x if settings["batch_first"] else x.transpose(0, 1).contiguous()

    query = tensor(length, None)
    key = query if kind == "self" else tensor(keys, settings.get("kdim"))
    value = tensor(keys, settings.get("vdim")) if kind == "separate" else key
    case = Case(settings, query, key, value, {}, training, dice.random() < 0.75)
    case.options["need_weights"] = dice.random() < 0.5
    case.options["average_attn_weights"] = dice.random() < 0.6
    _draw_masks(case, dice, generator, (batch, heads, length, keys), batched)
    return case


def _draw_masks(case: Case, dice: random.Random, generator: torch.Generator, sizes: tuple[int, ...], batched: bool):
    batch, heads, length, keys = sizes
    dtype = case.settings["dtype"]

    def mask(shape: tuple[int, ...], kind: str) -> Tensor:
        hidden = torch.rand(shape, generator=generator) < 0.3
        if kind == "bool":
            return hidden
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return values.masked_fill(hidden, float("-inf")) if dice.random() < 0.5 else values

    padding, shape = dice.choice([None, None, "bool", "float"]), (batch, keys) if batched else (keys,)
    if padding:
        case.options["key_padding_mask"] = mask(shape, padding)
    kind = dice.choice([None, None, "bool", "float", "bool per head", "float per head", "causal", "flag", "flag"])
    if kind == "flag":
        case.options["is_causal"] = True
        case.rule = "is_causal without a mask is the top left triangle"
        return _mark_empty_rows(case, heads)
    if kind == "causal":
        triangle = torch.ones(length, keys, dtype=torch.bool).triu(1)
        floating = torch.zeros(length, keys, dtype=dtype).masked_fill(triangle, float("-inf"))
        case.options["attn_mask"] = triangle if dice.random() < 0.5 else floating
        case.options["is_causal"] = dice.random() < 0.5
        if case.options["is_causal"] and (case.settings["add_bias_kv"] or case.settings["add_zero_attn"]):
            case.rule = "appended keys are visible"
    elif kind:
        per_head = (batch * heads if batched else heads,) if kind.endswith("per head") else ()
        case.options["attn_mask"] = mask((*per_head, length, keys), kind.split()[0])
    return _mark_empty_rows(case, heads)


def _mark_empty_rows(case: Case, heads: int) -> None:
    """Notes what stock answers with NaN, or in other dtypes, and which float masks get a gradient."""
    appended = case.settings["add_bias_kv"] or case.settings["add_zero_attn"]
    scores = _bias(case, heads)
    if not appended and scores.shape[-1] and (scores == float("-inf")).all(-1).any():
        case.rule = case.rule or "a row with nothing to attend to"
    nothing = not scores.shape[0] or not (scores.shape[-1] or appended)
    if nothing and len(case.options) > 2 and not case.options["need_weights"]:  # where stock fails in a reshape
        case.rule = case.rule or "no batch or no keys, but masks"
    for name in ("attn_mask", "key_padding_mask"):
        given = case.options.get(name)
        dropped = name == "attn_mask" and case.options.get("is_causal")  # stock may use the flag in the mask's place
        if given is not None and given.is_floating_point() and not dropped:
            case.masks.append(name)


def _bias(case: Case, heads: int) -> Tensor:
    """All masks as one tensor that is added to the scores [B, H, L, S]: every rule of the docs, written out."""
    query, key = (x if x.dim() == 3 else x.unsqueeze(0) for x in (case.query, case.key))
    first = case.settings["batch_first"] or case.query.dim() == 2
    (batch, length), keys = query.shape[:2] if first else query.shape[1::-1], key.shape[1 if first else 0]
    bias = torch.zeros(batch, heads, length, keys, dtype=query.dtype)

    def added(mask: Tensor) -> Tensor:
        return mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(mask, float("-inf"))

    attn_mask, padding = case.options.get("attn_mask"), case.options.get("key_padding_mask")
    if attn_mask is not None:
        bias = bias + added(attn_mask if attn_mask.dim() == 2 else attn_mask.view(batch, heads, length, keys))
    elif case.options.get("is_causal"):
        bias = bias + added(torch.ones(length, keys, dtype=torch.bool).triu(1))
    return bias if padding is None else bias + added(padding.view(batch, 1, 1, keys))


def written_out(module: nn.MultiheadAttention, case: Case) -> tuple[Tensor, Tensor | None]:
    """The module's forward in plain matrix products, by the documented rules and without a look at stock's code."""
    first = module.batch_first or case.query.dim() == 2
    heads = module.num_heads
    inputs = [x if x.dim() == 3 else x.unsqueeze(0) for x in (case.query, case.key, case.value)]
    inputs = [x if first else x.transpose(0, 1) for x in inputs]
    weights = module.in_proj_weight
    weights = (
        (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if weights is None else weights.chunk(3)
    )
    biases = (0.0, 0.0, 0.0) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip(inputs, weights, biases, strict=True))
    bias = _bias(case, heads)
    if module.bias_k is not None:
        k, v = (torch.cat([x, b.expand(len(x), 1, -1)], 1) for x, b in ((k, module.bias_k), (v, module.bias_v)))
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(len(x), 1, x.shape[-1])], 1) for x in (k, v))
    bias = torch.cat([bias, bias.new_zeros(*bias.shape[:-1], k.shape[1] - bias.shape[-1])], -1)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / module.head_dim**0.5 + bias
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    p = torch.where(empty, 0.0, scores.masked_fill(empty, 0.0).softmax(-1))
    y = module.out_proj((p @ v).transpose(1, 2).flatten(2))
    p = p.mean(1) if case.options.get("average_attn_weights", True) else p
    y = y.squeeze(0) if case.query.dim() == 2 else y if first else y.transpose(0, 1)
    return y, (p.squeeze(0) if case.query.dim() == 2 else p) if case.options.get("need_weights", True) else None


def build(cls: type[nn.MultiheadAttention], case: Case, seed: int, **more: object) -> nn.MultiheadAttention:
    """A module with random values in every parameter, biases too, at which scores and outputs are of order 1."""
    module = cls(**case.settings, **more).train(case.training)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.6
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
    return module


def answer(module: nn.MultiheadAttention, case: Case, seed: int, call=None) -> Answer:
    """Output, weights and every gradient (of inputs, parameters and float masks) for random incoming ones.

    `call(module, case)` in the place of the module's forward, if given.
    """
    leaves = {id(x): x.detach().clone().requires_grad_(case.grad) for x in (case.query, case.key, case.value)}
    options = {
        name: x.detach().clone().requires_grad_(case.grad) if name in case.masks else x
        for name, x in case.options.items()
    }
    own = Case(case.settings, *(leaves[id(x)] for x in (case.query, case.key, case.value)), options, True, True)
    with torch.set_grad_enabled(case.grad), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        y, weights = call(module, own) if call else module(own.query, own.key, own.value, **own.options)
    results = {"output": y} if weights is None else {"output": y, "weights": weights}
    if case.grad:
        generator = torch.Generator().manual_seed(seed)
        incoming = [
            torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results.values()
        ]
        wanted = {"dquery": own.query, "dkey": own.key, "dvalue": own.value}
        wanted |= {f"d{name}": options[name] for name in case.masks}
        wanted |= {f"d{name}": parameter for name, parameter in module.named_parameters()}
        gradients = torch.autograd.grad(list(results.values()), list(wanted.values()), incoming, allow_unused=True)
        results |= {name: g for name, g in zip(wanted, gradients, strict=True) if g is not None}
    return {name: x.detach() for name, x in results.items()}


def expected(case: Case, seed: int) -> Answer:
    """What the documents promise: stock's answer, or where a rule of ours decides, that of the written-out module."""
    stock = build(nn.MultiheadAttention, case, seed)
    return answer(stock, case, seed, written_out if case.rule else None)


def assert_equal_answers(actual: Answer, wanted: Answer, tolerance: float, about: str) -> None:
    """Same tensors, each within `tolerance` (relative to the larger of 1 and the largest wanted element)."""
    # A tensor that nothing depends on (a mask without keys) has no gradient or a zero one.
    for name, want in wanted.items():
        got = actual.get(name, torch.zeros_like(want) if name.startswith("d") else None)
        assert got is not None and got.shape == want.shape and got.dtype == want.dtype, f"{about}: {name}"
        if want.numel():
            error, scale = (got - want).abs().max().item(), max(1.0, want.abs().max().item())
            assert error <= tolerance * scale, f"{about}: {name} is off by {error:.2e} of {scale:.2e}"
    unexpected = [name for name in actual.keys() - wanted.keys() if actual[name].abs().sum() > 0]
    assert not unexpected, f"{about}: {unexpected}"


def run(backend: str, module: nn.MultiheadAttention, case: Case, seed: int) -> Answer:
    """`answer` with every fused call on that backend, which runs or refuses."""
    with fused_remat.backend(backend):
        return answer(module, case, seed)
