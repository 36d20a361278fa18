"""fused_remat.integrations.transformers: direct calls of what it registers, and registering."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from convert_cases import assert_same
from test_transformers_interface import TAKES_BIAS, registered  # noqa: F401  # a fixture
from torch import Tensor, nn

from fused_remat.integrations import transformers as integration

transformers = pytest.importorskip("transformers")
NAME = integration.DEFAULT_NAME


class Attention(nn.Module):
    """Stands for a model's attention layer in direct calls."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = heads(2, 4, 5, 8), heads(2, 2, 5, 8, seed=1), heads(2, 2, 5, 6, seed=2)


def stock(module: nn.Module, *args, **kwargs) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module.num_key_value_groups = Q.shape[1] // K.shape[1]
    return sdpa_attention_forward(module, *args, **kwargs)[0]


BOOL_MASK = torch.tril(torch.ones(5, 5, dtype=torch.bool), 1)[None, None].expand(2, 1, 5, 5)
CASES: dict[str, tuple[dict, bool | None]] = {
    "layer without is_causal": ({}, None),
    "causal layer": ({}, True),
    "bidirectional layer": ({}, False),
    "argument over layer": ({"is_causal": False}, True),
    "argument over bidirectional layer": ({"is_causal": True}, False),
    "scaling": ({"scaling": 0.7}, True),
    "bool mask": ({"attention_mask": BOOL_MASK}, True),
    "additive mask": ({"attention_mask": heads(2, 1, 5, 5, seed=3)}, True),
    "bias": ({"position_bias": heads(1, 4, 5, 5, seed=4)}, False),
    "causal bias": ({"position_bias": heads(1, 4, 5, 5, seed=4)}, True),
    "bias and bool mask": ({"position_bias": heads(1, 4, 5, 5, seed=4), "attention_mask": BOOL_MASK}, True),
    "bias and mask": (
        {"position_bias": heads(1, 4, 5, 5, seed=4), "attention_mask": heads(2, 1, 5, 5, seed=3)},
        True,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_call_means_what_sdpa_means(case):
    arguments, is_causal = CASES[case]
    if "position_bias" in arguments and not TAKES_BIAS:
        pytest.skip("sdpa of this transformers takes no position_bias")
    results = []
    for call in (lambda *a, **k: integration.attention_forward(*a, **k)[0], stock):
        leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
        given = {"attention_mask": None} | arguments
        if "position_bias" in given:
            given["position_bias"] = given["position_bias"].clone().requires_grad_()
            leaves.append(given["position_bias"])
        out = call(Attention(is_causal), *leaves[:3], **given)
        gradients = torch.autograd.grad(out, leaves, heads(*out.shape, seed=5))
        results.append({"out": out} | {str(i): gradient for i, gradient in enumerate(gradients)})
    assert results[0]["out"].shape == (2, 5, 4, 6) and results[0]["out"].is_contiguous()
    assert_same(*results, 1e-12)


def test_one_query_sees_every_key():
    out, weights = integration.attention_forward(Attention(True), Q[:, :, :1], K, V, None)
    assert weights is None
    assert_same({"out": out}, {"out": stock(Attention(True), Q[:, :, :1], K, V, None)}, 1e-12)


def test_learned_queries_are_shared_by_the_batch():
    out, _ = integration.attention_forward(Attention(False), Q[:1], K, V, None)
    twice, _ = integration.attention_forward(Attention(False), Q[:1].expand(2, -1, -1, -1), K, V, None)
    assert torch.equal(out, twice) and out.shape[0] == 2


def test_query_that_sees_no_key_gives_zeros():
    mask = BOOL_MASK.clone()
    mask[0, 0, 2] = False
    for bias in (None, heads(1, 4, 5, 5, seed=4)):
        out, _ = integration.attention_forward(Attention(True), Q, K, V, mask, position_bias=bias)
        assert (out[0, 2] == 0).all() and out[1, 2].abs().min() > 0


@pytest.mark.parametrize("keyword", ["s_aux", "sinks", "indices", "block_indices", "head_mask", "anything"])
def test_unknown_argument_is_refused_by_name(keyword):
    with pytest.raises(ValueError, match=rf"{keyword} is not an argument.*eager.*ignore=\('{keyword}',\)"):
        integration.attention_forward(Attention(), Q, K, V, None, **{keyword: torch.ones(4)})
    out, _ = integration.attention_forward(Attention(), Q, K, V, None, **{keyword: None})
    assert out.shape == (2, 5, 4, 6)


def test_softcap_bounds_the_scores():
    """As eager implementations write it: after the scale, before the mask."""
    scores = torch.tanh(Q @ K.repeat_interleave(2, dim=1).mT * 0.7 / 0.5) * 0.5
    weights = scores.masked_fill(~BOOL_MASK, float("-inf")).softmax(dim=-1)
    expected = (weights @ V.repeat_interleave(2, dim=1)).transpose(1, 2)
    out, _ = integration.attention_forward(Attention(), Q, K, V, BOOL_MASK, scaling=0.7, softcap=0.5)
    assert_same({"out": out}, {"out": expected}, 1e-12)


def test_output_attentions_warns_and_returns_none():
    with pytest.warns(UserWarning, match=r"output_attentions=True.*none are returned.*eager"):
        out, weights = integration.attention_forward(Attention(), Q, K, V, None, output_attentions=True)
    assert weights is None and torch.equal(out, integration.attention_forward(Attention(), Q, K, V, None)[0])


def test_packed_sequences_need_a_mask():
    ends = torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=r"cu_seq_lens_q packs 2 sequences.*position_ids"):
        integration.attention_forward(Attention(), Q, K, V, None, cu_seq_lens_q=ends)
    masked, _ = integration.attention_forward(Attention(), Q, K, V, BOOL_MASK, cu_seq_lens_q=ends)
    assert torch.equal(masked, integration.attention_forward(Attention(), Q, K, V, BOOL_MASK)[0])
    single, _ = integration.attention_forward(Attention(), Q, K, V, None, cu_seq_lens_k=ends[1:])
    assert torch.equal(single, integration.attention_forward(Attention(), Q, K, V, None)[0])


def test_causal_without_a_mask_needs_as_many_keys_as_queries():
    with pytest.raises(ValueError, match="2 queries and 5 keys came without a mask"):
        integration.attention_forward(Attention(True), Q[:, :, 3:], K, V, None)


@pytest.mark.parametrize(("queries", "may_skip"), [(5, True), (1, True), (3, False), (7, False)])
def test_mask_function_leaves_square_masks_out_only(queries, may_skip):
    seen = []

    def sdpa_mask(*, allow_is_causal_skip=True, **kwargs):
        seen.append(allow_is_causal_skip)

    sizes = ({"q_length": queries}, {"cache_position": torch.arange(queries)})  # the second until 5.0
    for size in sizes:
        integration.attention_mask(sdpa_mask, kv_length=5, **size)
        integration.attention_mask(sdpa_mask, kv_length=5, allow_is_causal_skip=False, **size)
    assert seen == [may_skip, False] * 2


def test_mask_of_a_half_filled_static_cache_is_made():
    """transformers leaves it out for sdpa, where "causal" would be read as this corner."""
    mask = integration._interfaces()[1][NAME]
    if "q_length" not in inspect.signature(mask.args[0]).parameters:
        pytest.skip("masks of this transformers take positions instead of lengths")
    shape = {"batch_size": 1, "q_offset": 0, "kv_offset": 0, "device": "cpu"}
    assert mask(q_length=5, kv_length=5, **shape) is None and mask(q_length=1, kv_length=5, **shape) is None
    padding = torch.tensor([[1, 1, 1, 0, 0]], dtype=torch.bool)
    assert mask.args[0](q_length=3, kv_length=5, attention_mask=padding, **shape) is None
    made = mask(q_length=3, kv_length=5, attention_mask=padding, **shape)
    assert torch.equal(made, torch.tril(torch.ones(3, 5, dtype=torch.bool))[None, None])


def test_register_again_changes_nothing():
    attentions, masks = integration._interfaces()
    names = list(attentions), list(masks)
    integration.register()
    assert (list(attentions), list(masks)) == names
    assert attentions[NAME].func is integration.attention_forward
    assert masks[NAME].args == (masks["sdpa"],)


@pytest.mark.parametrize("name", ["sdpa", "eager", "my_flash", "paged|mine", "kernels/mine", "flex_mine", "", None])
def test_register_refuses_names_of_others(name):
    before = [dict(registry) for registry in integration._interfaces()]
    with pytest.raises(ValueError, match=r"name must be an identifier.*leave it out for 'fused_remat'"):
        integration.register(name)
    assert [dict(registry) for registry in integration._interfaces()] == before


@pytest.mark.parametrize("which", [0, 1])
def test_register_refuses_a_name_in_use(which):
    integration._interfaces()[which].register("theirs", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=r"'theirs' is taken by another attention implementation.*choose another"):
        integration.register("theirs")


@pytest.mark.parametrize("ignore", ["keyword", (1,)])
def test_register_refuses_a_wrong_ignore(ignore):
    with pytest.raises(TypeError, match="ignore must be an iterable of keyword names"):
        integration.register(ignore=ignore)


def test_register_says_when_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers cannot be imported .*pip install 'transformers>=5.0'"):
        integration.register()


@pytest.mark.parametrize("missing", ["transformers.masking_utils", "sdpa"])
def test_register_says_when_transformers_is_too_old(missing, monkeypatch):
    original: Callable = importlib.import_module

    def imported(name: str):
        if name != missing:
            return original(name) if missing != "sdpa" or "masking" not in name else SimpleNamespace()
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(integration.importlib, "import_module", imported)
    with pytest.raises(ImportError, match=rf"transformers {transformers.__version__} has no attention and mask"):
        integration.register()
