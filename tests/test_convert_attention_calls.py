"""How the arguments of an attention's forward are read: what is understood, and every reason why a call is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fused_remat.convert.attention_call import (
    ALONE,
    CAUSAL,
    NO_BIAS,
    OTHER_KEYS,
    Inputs,
    changed_defaults,
    features_of,
    inputs_of,
    parameter_names,
    read,
    required_names,
    visible_by,
    why_dtypes_differ,
)

X = torch.randn(2, 5, 8)
MASK, BOOL = torch.randn(2, 1, 5, 5), torch.rand(2, 1, 5, 5) > 0.5
NAMES = ("hidden_states", "attention_mask", "is_causal")


def test_arguments_are_read_by_position_and_by_name():
    assert read(NAMES, (), (X, MASK), {}) == {"x": X, "mask": MASK}
    assert read(NAMES, (), (X,), {"is_causal": False, "use_cache": True, "position_ids": X}) == {
        "x": X,
        "causal": False,
    }
    assert read(("anything",), (), (X,), {"past_key_values": 3}) == {"x": X, "cache": 3}


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((X, MASK, True, X), {}, "another number of arguments"),
        ((), {}, "another number of arguments"),
        ((X,), {"gate": X}, "the argument gate"),
        ((X,), {"attention_mask": MASK, "mask": MASK}, "two arguments that mean mask"),
    ],
)
def test_what_cannot_be_read(args, kwargs, reason):
    assert reason in read(NAMES, (), args, kwargs)


def test_none_and_false_mean_something_where_the_default_is_something_else():
    class Layer(nn.Module):
        def forward(self, x, attention_mask=None, gated=True, is_causal=True):
            return x

    assert parameter_names(Layer) == ("x", "attention_mask", "gated", "is_causal") and required_names(Layer) == ("x",)
    assert changed_defaults(Layer) == ("gated", "is_causal")
    names, meaningful = parameter_names(Layer), changed_defaults(Layer)
    assert "the argument gated" in read(names, meaningful, (X,), {"gated": False})
    assert "None for is_causal" in read(names, meaningful, (X,), {"is_causal": None})
    assert read(names, meaningful, (X,), {"attention_mask": None}) == {"x": X}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"x": X, "cache": object()}, "a cache of keys and values"),
        ({"x": X, "weights": True}, "asked for attention weights"),
        ({"mask": MASK}, "no input"),
        ({"x": X, "packed": X}, "packed sequences without a mask"),
        ({"x": X, "rope": X[0], "rotary": (X, X)}, "two kinds of position embeddings"),
        ({"x": X, "rotary": (X,)}, "no pair of cos and sin"),
        ({"x": X, "rope": X}, "no pair of cos and sin"),
        ({"x": [1.0]}, "no plain tensor"),
        ({"x": X, "mask": [True]}, "no plain tensor"),
        ({"x": X[0]}, "not [batch, length, features]"),
        ({"x": X, "keys": X[0]}, "not [batch, length, features]"),
        ({"x": X, "mask": MASK.long()}, "neither bool nor floating"),
        ({"x": X, "mask": MASK[0, 0, 0]}, "neither bool nor floating"),
        ({"x": X, "causal": 1}, "is_causal is no bool"),
    ],
)
def test_what_a_fused_call_does_not_take(values, reason):
    assert reason in inputs_of(values)


def test_the_mask_of_other_keys_is_theirs():
    inputs = inputs_of({"x": X, "keys": X, "mask": MASK, "keys_mask": BOOL})
    assert inputs.mask is BOOL and inputs_of({"x": X, "mask": MASK, "keys_mask": BOOL}).mask is MASK


def test_tokens_without_a_position_are_not_turned():
    rope = torch.randn(3, 8)
    cos, sin = inputs_of({"x": X, "rope": rope}, 2).rotary
    assert torch.equal(cos[:2], torch.ones(2, 4)) and torch.equal(sin[:2], torch.zeros(2, 4))
    assert torch.equal(sin[2:], rope[:, :4]) and torch.equal(cos[2:], rope[:, 4:])


@pytest.mark.parametrize(
    ("inputs", "implementation", "causal", "reason"),
    [
        (Inputs(X, mask=MASK[:, 0]), None, False, "3 dims"),
        (Inputs(X, mask=BOOL), "eager", False, "bool, which its eager attention adds"),
        (Inputs(X, mask=MASK, causal=True), None, False, "a mask and is_causal"),
        (Inputs(X, mask=MASK), None, True, "a mask and is_causal"),
        (Inputs(X, mask=MASK[0, 0]), "sdpa", False, "not [batch, heads, length, length]"),
    ],
)
def test_masks_that_no_fused_call_stands_for(inputs, implementation, causal, reason):
    assert reason in visible_by(inputs, implementation, causal)


def test_causality_is_that_of_the_implementation():
    alone, masked = Inputs(X), Inputs(X, mask=MASK)
    assert visible_by(alone, "sdpa", True) == (None, None, True)
    assert visible_by(masked, "sdpa", True) == (MASK, None, False)
    assert visible_by(alone, "eager", True) == (None, None, False)
    assert visible_by(Inputs(X, causal=False), "sdpa", True) == (None, None, False)
    assert visible_by(Inputs(X[:, :1], keys=X), "sdpa", True) == (None, None, False)


def test_a_bias_and_a_mask_become_one():
    bias = torch.randn(1, 2, 5, 5)
    assert torch.equal(visible_by(Inputs(X, mask=MASK, bias=bias), None, False)[0], MASK + bias)
    mask, keys, _ = visible_by(Inputs(X, mask=BOOL[:, :, :1], bias=bias), "sdpa", False)
    assert mask is bias and torch.equal(keys, BOOL[:, 0, 0])
    mask, keys, _ = visible_by(Inputs(X, mask=BOOL, bias=bias), "sdpa", False)
    assert keys is None and torch.equal(mask, torch.where(BOOL, bias, torch.finfo(bias.dtype).min))


def test_what_a_call_uses():
    names = ("x", "mask", "position_bias", "is_causal")
    assert features_of(Inputs(X, mask=MASK, bias=MASK), names, None) == {ALONE, "with a float mask of 4 dims"}
    used = features_of(Inputs(X, keys=X, mask=BOOL[0, 0], causal=True), names, None)
    assert used == {OTHER_KEYS, "with a bool mask of 2 dims", CAUSAL, NO_BIAS}
    assert features_of(Inputs(X, causal=True), ("x",), "sdpa") == {ALONE}
    assert features_of(Inputs(X, causal=True), ("x",), None) == {ALONE, CAUSAL}


def test_dtypes_have_to_agree_but_under_autocast():
    assert "different dtypes" in why_dtypes_differ(X, X.double()) and why_dtypes_differ(X, None, X) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert why_dtypes_differ(X, X.bfloat16()) is None
