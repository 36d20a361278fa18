"""What users do to parts: hooks, parametrisations, quantisation, tying, swapping; before and after conversion.

The answer is always that of stock code treated the same way.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from convert_cases import LowRank, randomize
from pair_cases import (
    MODELS,
    Model,
    assert_same,
    every_converted,
    every_model,
    step,
    tokens,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fused_remat

WHEN = pytest.mark.parametrize("when", ["before", "after"])


def _changed(model: Model, when: str, change) -> tuple[nn.Module, nn.Module]:
    """(ours, stock), both changed: ours before or after it became ours."""
    ours, stock = model.pair()
    if when == "before":
        change(stock)
        return model.fuse(stock), stock
    change(ours)
    change(stock)
    return ours, stock


def _needs_conversion(name: str, when: str) -> None:
    if when == "before" and MODELS[name].blocks == ("",):
        pytest.skip("a layer of ours is built, not converted")


# Hooks ---------------------------------------------------------------------------------------------------------------


def _hooks(module: nn.Module, path: str, seen: list, scale: float) -> None:
    """One hook of every kind: each takes note, and multiplies what passes by `scale`."""

    def scaled(value):
        if isinstance(value, tuple):
            return tuple(scaled(part) for part in value)
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value * scale if floating else value

    def note_only(m, args, kwargs):
        seen.append((path, "pre kwargs"))

    def note(kind: str, value):
        seen.append((path, kind))
        return None if scale == 1.0 else scaled(value)

    module.register_forward_pre_hook(lambda m, args: note("pre", args))
    module.register_forward_pre_hook(note_only, with_kwargs=True)
    module.register_forward_hook(lambda m, args, y: note("forward", y))
    module.register_forward_hook(lambda m, args, kwargs, y: note("forward kwargs", y), with_kwargs=True)
    module.register_full_backward_pre_hook(lambda m, dy: note("backward pre", dy))
    module.register_full_backward_hook(lambda m, dx, dy: note("backward", dx))


def _hookable(name: str, model: nn.Module) -> list[str]:
    """Module paths that stock code calls. It never calls the `out_proj` of an attention; ours does, once hooked."""
    returns_no_tensor = ("model",) if name == "Llama" else ()
    paths = (path for path, _ in model.named_modules())
    return [path for path in paths if path not in returns_no_tensor and not path.endswith("out_proj")]


# Transformers passes some inputs by name, where torch's backward hooks do not look for gradients.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with respect to module")
@pytest.mark.slow
@WHEN
@pytest.mark.parametrize("scale", [1.0, 1.25], ids=["watching", "changing"])
@every_model
def test_hooks_of_every_kind(name, when, scale):
    _needs_conversion(name, when)
    paths = _hookable(name, MODELS[name].pair()[1])
    for path in paths:
        seen: list = []

        def change(model, path=path, seen=seen):
            if path in dict(model.named_modules()):
                _hooks(model.get_submodule(path), path, seen, scale)

        ours, stock = _changed(MODELS[name], when, change)
        if path not in dict(ours.named_modules()):
            continue  # stock's dropout and activation are no children of ours
        actual, by_ours = step(ours, tokens()), list(seen)
        seen.clear()
        expected, by_stock = step(stock, tokens()), list(seen)
        assert by_ours == by_stock, path
        assert_same(actual, expected, 1e-5)


@every_model
def test_hooks_on_parameters_fire_once(name):
    ours, stock = MODELS[name].pair()
    fired = {}
    for which, model in (("ours", ours), ("stock", stock)):
        events = fired.setdefault(which, [])
        for key, p in model.named_parameters():
            p.register_hook(lambda g, key=key, events=events: events.append((key, "grad")) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, key=key, events=events: events.append((key, "accumulated")))
    assert_same(step(ours, tokens()), step(stock, tokens()), 1e-5)
    assert sorted(fired["ours"]) == sorted(fired["stock"]) and len(set(fired["ours"])) == len(fired["ours"])


# Children that are not plain -----------------------------------------------------------------------------------------


class _Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def _old_weight_norm(linear: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
        return nn.utils.weight_norm(linear)


CHANGES = {
    "parametrize": lambda linear: parametrize.register_parametrization(linear, "weight", _Doubled()),
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": _old_weight_norm,
    "orthogonal": lambda linear: parametrizations.orthogonal(linear) if linear.weight.shape[0] < 40 else linear,
    "adapter": lambda linear: randomize(LowRank(linear), seed=5),
    "frozen": lambda linear: linear.requires_grad_(False),
}


def _linears(model: nn.Module) -> list[str]:
    """Every linear of its own; the `out_proj` of an attention is not called by stock code, which reads its weight."""
    return [path for path, module in model.named_modules() if type(module) is nn.Linear]


@WHEN
@pytest.mark.parametrize("how", CHANGES)
@every_model
def test_linears_that_are_not_plain(name, how, when):
    _needs_conversion(name, when)
    if how == "weight norm by a hook" and when == "before":
        pytest.skip("modules with this hook cannot be copied, and ours begin as a copy of stock")
    for path in _linears(MODELS[name].pair()[1]):

        def change(model, path=path):
            torch.manual_seed(0)
            parent, _, child = path.rpartition(".")
            linear = model.get_submodule(path)
            model.get_submodule(parent)._modules[child] = CHANGES[how](linear)

        ours, stock = _changed(MODELS[name], when, change)
        assert_same(step(ours, tokens()), step(stock, tokens()), 1e-5)


@WHEN
@every_model
def test_dynamic_quantisation_of_linears(name, when):
    _needs_conversion(name, when)
    if torch.backends.quantized.engine == "none":
        pytest.skip("this torch has no engine for quantised linears")

    def quantised(model):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=UserWarning)
            return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)

    ours, stock = MODELS[name].pair()
    stock = quantised(stock)
    if when == "before":
        ours = copy.deepcopy(stock)
        fused_remat.convert(ours)  # what is left: attentions whose linears were not quantised
    else:
        ours = quantised(ours)
    with torch.no_grad():
        want = stock(tokens())
        torch.testing.assert_close(ours(tokens()), want, rtol=1e-4, atol=1e-4)
    assert name == "MultiheadAttention" or any("quantized" in type(m).__module__ for m in ours.modules())


# Tying and swapping --------------------------------------------------------------------------------------------------


def _tie(model: nn.Module, first: str, second: str) -> None:
    for path, module in model.get_submodule(first).named_modules():
        twin = model.get_submodule(f"{second}.{path}" if path else second)
        for key, p in module._parameters.items():
            if key != "bias":
                twin._parameters[key] = p


@WHEN
@every_converted
def test_two_layers_that_share_their_weights(name, when):
    first, second = MODELS[name].blocks
    ours, stock = _changed(MODELS[name], when, lambda model: _tie(model, first, second))
    if when == "before":
        assert len(list(ours.parameters())) == len(list(stock.parameters()))
    names = [key for key, _ in ours.named_parameters()]
    assert names == [key for key, _ in stock.named_parameters()]
    assert not any(key.startswith(second) and key.endswith("weight") for key in names)
    assert_same(step(ours, tokens()), step(stock, tokens()), 1e-5)


@every_converted
def test_one_layer_at_two_places(name):
    first, second = MODELS[name].blocks

    def share(model):
        parent, _, child = second.rpartition(".")
        model.get_submodule(parent)._modules[child] = model.get_submodule(first)

    for when in ("before", "after"):
        ours, stock = _changed(MODELS[name], when, share)
        assert ours.get_submodule(first) is ours.get_submodule(second)
        assert_same(step(ours, tokens()), step(stock, tokens()), 1e-5)


@every_model
def test_swapped_parameters_and_an_optimizer_made_before(name):
    """`torch.utils.swap_tensors` keeps the objects and exchanges what they are; so does `to` in its new way."""
    ours, stock = MODELS[name].pair()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in (ours, stock)]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for model, optimizer in zip((ours, stock), optimizers, strict=True):
            identities = [id(p) for p in model.parameters()]
            model.double()
            assert [id(p) for p in model.parameters()] == identities
            for p in model.parameters():
                torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5, requires_grad=p.requires_grad))
            step(model, tokens(dtype=torch.float64))
            optimizer.step()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same(step(ours, tokens(dtype=torch.float64)), step(stock, tokens(dtype=torch.float64)), 1e-6)


@every_model
def test_load_state_dict_by_assignment(name):
    ours, stock = MODELS[name].pair()
    other = {key: (value * 0.7).clone() for key, value in stock.state_dict().items()}
    for model in (ours, stock):
        model.load_state_dict(copy.deepcopy(other), assign=True)
    assert_same(step(ours, tokens()), step(stock, tokens()), 1e-5)


@every_model
def test_a_part_of_the_model_in_another_dtype_fails_or_works_as_stock_does(name):
    """bf16 parts inside a float32 model work under autocast, with a float32 result as accurate as stock's."""
    ours, stock = MODELS[name].pair()
    for model in (ours, stock):
        for path in _linears(model)[:1]:
            model.get_submodule(path).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = ours(tokens()), stock(tokens())
    assert actual.dtype == expected.dtype
    assert (actual - expected).float().norm() <= 3e-2 * expected.float().norm()
