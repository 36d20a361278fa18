"""Counting FLOP, detecting anomalies, deterministic algorithms, inference mode."""

from __future__ import annotations

import copy

import pytest
import torch
from pair_cases import MODELS, assert_same, every_model, fused_parts, needs_extension, step, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def _flops(model: torch.nn.Module, x: torch.Tensor, *, backward: bool) -> tuple[int, dict]:
    # The stock attention that is counted is the one made of products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        y = model(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops(), counter.get_flop_counts()


@every_model
def test_forward_flops_are_stocks_in_every_mode(name):
    ours, stock = MODELS[name].pair()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            got, by_module = _flops(ours, tokens(), backward=False)
            want, _ = _flops(stock, tokens(), backward=False)
        assert got == want > 0
        for path in filter(None, MODELS[name].blocks):
            assert sum(by_module[f"{type(ours).__name__}.{path}"].values()) > 0


@needs_extension
@every_model
def test_a_step_counts_what_is_redone(name):
    """More than stock's three times forward, by less than one more forward."""
    ours, stock = MODELS[name].pair()
    got, by_module = _flops(ours, tokens().requires_grad_(), backward=True)
    want, _ = _flops(stock, tokens().requires_grad_(), backward=True)
    assert want < got < want * 4 / 3
    counted = {str(op) for op in by_module["Global"]}
    expected = {"mlp": "fused_remat.mlp_bwd", "attention": "fused_remat.multi_head_attention_bwd"}
    assert {expected[kind] for kind in fused_parts(ours)} <= counted


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@every_model
def test_anomaly_detection(name):
    ours, _ = MODELS[name].pair(dropout=0.3)
    torch.manual_seed(1)
    truth = step(ours, tokens())
    with torch.autograd.detect_anomaly(check_nan=True):
        torch.manual_seed(1)
        assert_same(step(ours, tokens()), truth, 0.0)


@needs_extension
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("name", ["MLP", "GatedMLP", "MultiheadAttention"])
def test_anomaly_detection_names_our_node(name):
    ours, _ = MODELS[name].pair()
    x = tokens().requires_grad_()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match=r"'(Mlp|MultiHeadAttention)Backward'"):
        (ours(x) * float("inf")).sum().backward()


@every_model
def test_deterministic_algorithms(name):
    """Nothing refuses, and uninitialised memory, which this mode fills with NaN, is never read."""
    ours, stock = MODELS[name].pair()
    expected = step(stock, tokens())
    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(ours, tokens()), step(ours, tokens())
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(first, expected, 1e-5)
    assert all(torch.equal(value, second[key]) for key, value in first.items())


@every_model
def test_inference_mode(name):
    ours, stock = MODELS[name].pair()
    for training in (True, False):
        with torch.inference_mode():
            y, want = ours.train(training)(tokens()), stock.train(training)(tokens())
        assert y.is_inference() and not y.requires_grad
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)


@needs_extension
@pytest.mark.parametrize("name", ["MLP", "GatedMLP", "MultiheadAttention"])
def test_tensors_of_inference_mode(name):
    """They cannot be saved for backward: our ops say so as torch's do, and a clone trains."""
    ours, stock = MODELS[name].pair()
    with torch.inference_mode():
        x = tokens() * 1
        ours(x)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ours(x)
    assert_same(step(ours, x.clone()), step(stock, x.clone()), 1e-5)


@every_model
def test_weights_changed_between_forward_and_backward_are_noticed(name):
    ours, _ = MODELS[name].pair()
    for key, p in ours.named_parameters():
        if p.dim() < 2 or "embed" in key:
            continue
        model = copy.deepcopy(ours)
        y = model(tokens().requires_grad_()).sum()
        with torch.no_grad():
            model.get_parameter(key).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
