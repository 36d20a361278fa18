"""Hidden dropout of the MLP op: one mask everywhere, replayed in backward, off in evaluation."""

from __future__ import annotations

import mlp_cases as cases
import pytest
import torch

import fused_remat
from fused_remat import reference

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory", "one_thread"),
    pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension)),
]


def _mask(backend: str, seed: int, p: float, rows: int, hidden: int, workspace: int) -> torch.Tensor:
    """The mask as a forward applied it: hidden is all ones and w_down the identity."""
    given = {"x": torch.ones(rows, 1, dtype=torch.float64), "w_up": torch.ones(hidden, 1, dtype=torch.float64)}
    y, _, _ = torch.ops.fused_remat.mlp_fwd(
        given["x"], *cases.op_layer(given | {"w_down": torch.eye(hidden, dtype=torch.float64)}),
        "identity", p, 0, 0, workspace, backend, torch.float64, torch.tensor([seed]),
    )  # fmt: skip
    return y != 0


@pytest.mark.parametrize(("rows", "hidden"), ((7, 5), (3, 64), (130, 257), (1, 1)))
def test_dropout_masks_are_bit_equal_everywhere(rows, hidden):
    for seed in (0, -1, 2**62 + 12345):
        truth = reference.dropout_mask(torch.tensor([seed]), 0.3, (rows, hidden))
        for backend in cases.BACKENDS:
            for workspace in (1, 5000, 2**20):
                if workspace == 1 and rows * hidden > 1000:
                    continue  # one element per tile: minutes
                assert torch.equal(_mask(backend, seed, 0.3, rows, hidden, workspace), truth)


@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_dropout_replays_in_backward_whatever_happens_between(gated):
    given = cases.operands(130, 9, 21, gated=gated)
    dy = torch.randn(130, 9, dtype=torch.float64)
    torch.manual_seed(11)
    y = fused_remat.mlp(**given, dropout_p=0.3, workspace=4000)
    after_forward = torch.get_rng_state()
    torch.randn(5)
    moved = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    ours = cases.gradients(y, given, dy)
    torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), moved), "backward must not draw"
    truth_y = cases.run_reference(given, seed=11, dropout_p=0.3)
    assert torch.equal(torch.get_rng_state(), after_forward), "the op draws as much as the reference: one seed"
    torch.testing.assert_close(y, truth_y, rtol=1e-12, atol=1e-12)
    for name, truth in cases.gradients(truth_y, given, dy).items():
        torch.testing.assert_close(ours[name], truth, rtol=1e-10, atol=1e-10)


def test_dropout_is_off_in_evaluation_and_averages_out_in_training():
    layer = fused_remat.MLP(8, 32, dropout=0.5)
    twin = fused_remat.MLP(8, 32)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(4, 8)
    layer.eval()
    assert torch.equal(layer(x), layer(x)) and torch.equal(layer(x), twin(x))
    with torch.no_grad():
        assert torch.equal(layer(x), twin(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    y = layer(x)
    layer.eval()  # must not reach the backward of a training forward
    torch.manual_seed(3)
    layer.train()
    expected = layer(x)
    torch.manual_seed(3)
    y = layer(x)
    layer.eval()
    (given,) = torch.autograd.grad(y.sum(), layer.fc1.weight)
    (truth,) = torch.autograd.grad(expected.sum(), layer.fc1.weight)
    assert torch.equal(given, truth)
    layer.train()
    with torch.no_grad():
        mean = torch.stack([layer(x) for _ in range(2000)]).mean(0)
    assert (mean - twin(x)).norm() <= 0.05 * twin(x).norm()
