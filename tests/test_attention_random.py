"""The attention op on drawn shapes, strides, masks and settings, against the reference."""

from __future__ import annotations

import math

import attention_cases as cases
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]


@st.composite
def strided(draw, shape):
    """Random numbers of that shape, in a permuted, padded, skipping or expanded layout."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(1, 2)) for _ in shape]
    tails = [draw(st.integers(0, 2)) for _ in shape]
    expanded = [draw(st.booleans()) and draw(st.booleans()) for _ in shape]
    stored = [1 if e else n * g + t for n, g, t, e in zip(shape, gaps, tails, expanded, strict=True)]
    values = torch.randn([stored[dim] for dim in order], dtype=torch.float64)
    values = values.permute([order.index(dim) for dim in range(len(shape))])
    for dim, size in enumerate(shape):
        values = (
            values.narrow(dim, 0, 1).expand(*shape[: dim + 1], *values.shape[dim + 1 :])
            if expanded[dim]
            else (values[(slice(None),) * dim + (slice(0, size * gaps[dim], gaps[dim]),)])
        )
    assert values.shape == torch.Size(shape)
    return values


@st.composite
def attention_calls(draw):
    """Operands, masks and settings of one call."""
    heads, kv_heads = draw(st.sampled_from(((1, 1), (4, 4), (4, 2), (6, 1))))
    batch = draw(st.integers(1, 2))
    length_q, length_k = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    width, value_width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    operands = {
        "q": draw(strided((batch, heads, length_q, width))),
        "k": draw(strided((batch, kv_heads, length_k, width))),
        "v": draw(strided((batch, kv_heads, length_k, value_width))),
    }
    masks = {}
    full = (batch, heads, length_q, length_k)
    for name, shape in (("attn_mask", full), ("key_padding_mask", (batch, length_k))):
        kind = draw(st.sampled_from((None, "bool", "float")))
        if kind is not None:
            if name == "attn_mask":
                shape = [n if draw(st.booleans()) else 1 for n in shape][draw(st.integers(0, 2)) :]
            mask = draw(strided(tuple(shape)))
            masks[name] = mask > -1.0 if kind == "bool" else mask
    sides = st.one_of(st.none(), st.integers(0, 75))
    chosen = {
        "causal": draw(st.sampled_from((None, "top_left", "bottom_right"))),
        "window": draw(st.one_of(st.none(), st.tuples(sides, sides))),
        "dropout_p": draw(st.sampled_from((0.0, 0.0, 0.3))),
        "scale": draw(st.sampled_from((None, 0.5, -1.0, 0.0))),
    }
    return operands, masks, chosen, draw(st.sampled_from((1, 10_000, 2**20)))


def _call(sizes, chosen):
    return cases.operands(*sizes, requires_grad=False), {}, chosen, 1


@settings(deadline=None, max_examples=120)
@given(attention_calls())
@example(_call((1, 1, 65, 65, 1), {"window": (0, 0)}))
@example(_call((1, 1, 1, 70, 1), {"causal": "bottom_right", "window": (None, 3)}))
@example(_call((1, 1, 70, 1, 1), {"causal": "bottom_right", "dropout_p": 0.3}))
def test_any_call_agrees_with_the_reference(call):
    operands, masks, chosen, workspace = call
    given = {name: value.detach().requires_grad_() for name, value in operands.items()}
    everything = given | cases.learned(masks)
    truth, truth_lse = cases.run_reference(given, **masks, **chosen, return_lse=True)
    finite = truth_lse.detach() > -math.inf
    douts = torch.randn_like(truth), torch.randn_like(truth_lse)[finite]
    expected = cases.gradients((truth, truth_lse[finite]), everything, douts)
    for backend in cases.BACKENDS:
        out, lse = cases.run(given, backend=backend, workspace=workspace, **masks, **chosen, return_lse=True)
        found = cases.gradients((out, lse[finite]), everything, douts)
        cases.assert_same({"out": out, "lse": lse} | found, {"out": truth, "lse": truth_lse} | expected, 1e-8, backend)
