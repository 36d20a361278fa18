"""Seeds stay on the device: no op reads a number back, so that CUDA graphs and fake tensors can run a step."""

from __future__ import annotations

import pytest
import torch
from pair_cases import MODELS, every_model, fused_parts, needs_extension, step, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal")


class _Watch(TorchDispatchMode):
    """Counts ops that need a number of the device on the host; remembers the seeds of our forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.read_back: list[str] = []
        self.seeds: list[torch.Tensor] = []
        self.backward_seeds: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in READS:
            self.read_back.append(name)
        if name.startswith("fused_remat::"):
            at = [argument.name for argument in func._schema.arguments].index("seed")
            (self.backward_seeds if name.endswith("_bwd") else self.seeds).append(args[at])
        return func(*args, **(kwargs or {}))


@needs_extension
@every_model
def test_seeds_are_device_tensors_and_nothing_is_read_back(name):
    ours, stock = MODELS[name].pair(dropout=0.4)
    x = tokens().requires_grad_()
    with _Watch() as by_stock:
        stock(x).sum().backward()
    with _Watch() as watch:
        ours(x).sum().backward()
    assert watch.read_back == by_stock.read_back  # the masks of transformers read
    assert watch.read_back == [] or name == "Llama"
    assert len(watch.seeds) == len(watch.backward_seeds) == sum(fused_parts(ours).values())
    drawn = [seed for seed in watch.seeds if seed.numel()]
    assert all(seed.dtype == torch.int64 and seed.device == x.device and seed.numel() == 1 for seed in drawn)
    assert len(drawn) == len(watch.seeds) or name == "Llama"  # whose MLPs have no dropout
    assert len({seed.item() for seed in drawn}) == len(drawn), "every call draws its own"
    assert [s.item() for s in reversed(watch.backward_seeds) if s.numel()] == [s.item() for s in drawn]


# Elsewhere torch ends the process at a fake CUDA tensor.
needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")


@needs_extension
@every_model
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda_build)])
def test_a_step_runs_on_fake_tensors(name, device):
    """A fake tensor has no numbers to read: what needs one raises."""
    ours, _ = MODELS[name].pair(dropout=0.4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in ours.modules():
            for key, p in module._parameters.items():
                module._parameters[key] = None if p is None else nn.Parameter(torch.empty_like(p, device=device))
            for key, b in module._buffers.items():
                module._buffers[key] = None if b is None else torch.empty_like(b, device=device)
        x = torch.empty_like(tokens(), device=device).requires_grad_()
        y = ours(x)
        assert y.shape == x.shape and y.device.type == device and y.requires_grad
        if device == "cuda" and not torch.cuda.is_available():
            return  # autograd asks the driver for the device
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert all(p.grad.shape == p.shape for key, p in ours.named_parameters() if "embed" not in key)


@every_model
def test_the_generator_moves_in_forward_alone(name):
    """Backward and numbers drawn in between change nothing; the same seed gives the same step."""
    ours, _ = MODELS[name].pair(dropout=0.4)
    x = tokens().requires_grad_()
    torch.manual_seed(5)
    y = ours(x)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    first = step(ours, x)
    torch.manual_seed(5)
    leaf = x.detach().clone().requires_grad_()
    ours.zero_grad()
    y = ours(leaf)
    torch.rand(7)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(leaf.grad, first["dx0"]) and torch.equal(y, first["output"])
    assert all(torch.equal(p.grad, first[f"d{key}"]) for key, p in ours.named_parameters() if p.grad is not None)
