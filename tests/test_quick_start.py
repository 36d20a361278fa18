"""The README's first program: a memory-hungry block, AdamW and a mean square error, trained stock and converted."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_remat

STEPS = 3
README = Path(__file__).parent.parent / "README.md"


def stock(dtype):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(dtype)
    inputs = torch.randn(8, 1024, dtype=dtype, requires_grad=True)
    return block, inputs, torch.zeros_like(inputs)


def train(block, inputs, targets, run=lambda block, inputs: block(inputs)):
    """Losses of three steps, then the weights and the gradient of the input of the last one."""
    optimizer, losses = torch.optim.AdamW(block.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        inputs.grad = None
        loss = nn.functional.mse_loss(run(block, inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in block.parameters()], inputs.grad


@pytest.mark.parametrize(("dtype", "rtol"), ((torch.float64, 1e-12), (torch.float32, 1e-5)), ids=str)
def test_three_steps_stock_checkpointed_and_converted_give_the_same(dtype, rtol):
    block, inputs, targets = stock(dtype)
    losses, weights, dx = train(copy.deepcopy(block), inputs, targets)
    assert losses[-1] < losses[0]

    replayed = train(copy.deepcopy(block), inputs, targets, lambda block, x: checkpoint(block, x, use_reentrant=False))
    assert torch.equal(replayed[0], losses)

    converted = copy.deepcopy(block)
    names, ids = list(converted.state_dict()), [id(p) for p in converted.parameters()]
    assert fused_remat.convert(converted).count("mlp") == 1
    ours = train(converted, inputs, targets)
    torch.testing.assert_close(ours[0], losses, rtol=rtol, atol=0)
    torch.testing.assert_close(ours[2], dx, rtol=rtol, atol=rtol * dx.abs().max().item())
    # AdamW divides by the gradient's size: where that is near rounding, weights differ by a part of the rate 1e-3.
    for own, other in zip(ours[1], weights, strict=True):
        assert (own - other).abs().max() <= (1e-9 if dtype == torch.float64 else 1e-4)
    assert list(converted.state_dict()) == names
    assert [id(p) for p in converted.parameters()] == ids


def test_only_the_inputs_are_kept():
    block, inputs, targets = stock(torch.float32)
    hidden = 8 * 4096 * 4

    def loss():
        return nn.functional.mse_loss(block(inputs), targets)

    before = fused_remat.measure(loss, repeats=0)
    fused_remat.convert(block)
    after = fused_remat.measure(loss, repeats=0)
    assert (
        before.kept_bytes - after.kept_bytes == hidden
    )  # nn.ReLU keeps its result, which is the second linear's input


def test_the_readme_shows_this_program():
    (program,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
        if "mse_loss" in block
    ]
    for line in ("nn.Linear(1024, 4096)", "nn.Linear(4096, 1024)", "torch.optim.AdamW", "fused_remat.convert(block)"):
        assert line in program
    exec(program, {})
