"""Everything kept passes torch's saved_tensors_hooks: offloading, compressing and counting see it."""

from __future__ import annotations

import pytest
import torch
from pair_cases import HIDDEN, MODELS, Replaced, assert_same, every_model, needs_extension, own, saved, step, tokens
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@every_model
def test_save_on_cpu(name, dropout):
    ours, _ = MODELS[name].pair(dropout=dropout)

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu(pin_memory=False):
            return ours(x)

    torch.manual_seed(2)
    truth = step(ours, tokens())
    torch.manual_seed(2)
    assert_same(own(step(Replaced(ours, offloaded), tokens())), truth, 0.0)


@every_model
def test_hooks_that_store_bytes(name, tmp_path):
    """What was packed to a file and removed from memory is all that backward needs."""
    ours, _ = MODELS[name].pair(dropout=0.3)
    torch.manual_seed(2)
    truth = step(ours, tokens())
    parameters = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    packed, unpacked = [], []

    def pack(tensor: torch.Tensor):
        if tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        path = tmp_path / f"{len(packed)}.pt"
        packed.append(path)
        torch.save(tensor, path)
        return path

    def unpack(path):
        if isinstance(path, torch.Tensor):
            return path
        unpacked.append(path)
        return torch.load(path)

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        with saved_tensors_hooks(pack, unpack):
            return ours(x)

    torch.manual_seed(2)
    assert_same(own(step(Replaced(ours, offloaded), tokens())), truth, 0.0)
    assert packed and set(unpacked) <= set(packed)


@needs_extension
@every_model
def test_wrong_values_from_a_hook_reach_the_gradients(name):
    """Nothing is kept beside the hooks: what they return is what backward computes with."""
    ours, _ = MODELS[name].pair()
    owned = {p.untyped_storage().data_ptr() for p in ours.parameters()}

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        floating = tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in owned
        return torch.full_like(tensor, float("nan")) if floating else tensor

    x = tokens().requires_grad_()
    with saved_tensors_hooks(lambda tensor: tensor, spoil):
        ours(x).sum().backward()
    assert x.grad.isnan().all()


@every_model
def test_hooks_around_and_inside_checkpoints(name):
    ours, _ = MODELS[name].pair(dropout=0.3)
    torch.manual_seed(2)
    truth = step(ours, tokens())

    def around(x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return checkpoint(ours, x, use_reentrant=False)

    def inside(x: torch.Tensor) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                return ours(x)

        return checkpoint(region, x, use_reentrant=False)

    for function in (around, inside):
        torch.manual_seed(2)
        assert_same(own(step(Replaced(ours, function), tokens())), truth, 0.0)


@every_model
def test_disabled_hooks_allow_our_layers(name):
    ours, _ = MODELS[name].pair()
    with disable_saved_tensors_hooks("no hooks here"):
        ours(tokens()).sum().backward()


@every_model
def test_backward_twice_and_in_parts(name):
    """A retained graph gives the same bits again; gradients of parts of it add up; a freed one raises."""
    ours, _ = MODELS[name].pair(dropout=0.3)
    x = tokens().requires_grad_()
    y = ours(x)
    wanted = [x, *(p for p in ours.parameters() if p.requires_grad)]
    dy = torch.randn(y.shape)
    runs = [torch.autograd.grad(y, wanted, dy, retain_graph=True, allow_unused=True) for _ in range(2)]
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    for first, second in zip(*runs, strict=True):
        assert first is second is None or torch.equal(first, second)
    torch.testing.assert_close(dx, runs[0][0], rtol=1e-5, atol=1e-6)
    loss = y.square().mean()
    y.sum().backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@needs_extension
@pytest.mark.parametrize("training", [True, False])
@every_model
def test_reading_saved_tensors_in_a_debugger(name, training):
    """Walking the graph and unpacking what nodes show changes nothing, and names nothing twice."""
    ours, _ = MODELS[name].pair()
    truth = step(ours.train(training), tokens())

    def walked(x: torch.Tensor) -> torch.Tensor:
        y = ours(x)
        nodes, seen = [y.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            [getattr(node, attribute) for attribute in dir(node) if attribute.startswith("_saved_")]
            nodes += [following for following, _ in node.next_functions]
        assert len(seen) > 2
        return y

    assert_same(own(step(Replaced(ours, walked), tokens())), truth, 0.0)


@needs_extension
@pytest.mark.parametrize("training", [True, False])
@every_model
def test_evaluation_with_gradients_saves_as_training_does(name, training):
    ours, _ = MODELS[name].pair()
    with saved() as tensors:
        ours.train(training)(tokens().requires_grad_())
    weights = {tuple(p.shape) for p in ours.parameters()}
    shapes = [tuple(tensor.shape) for tensor in tensors if tuple(tensor.shape) not in weights]
    assert shapes and not any(HIDDEN in shape for shape in shapes)
    with saved() as tensors, torch.no_grad():
        assert not ours(tokens()).requires_grad
    assert tensors == []
