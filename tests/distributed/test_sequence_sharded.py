"""MLPs with replicated DTensor weights, no plan, on shards of the tokens."""

from __future__ import annotations

import pytest
from convert_cases import assert_same
from test_tensor_parallel import MLPS, Outcome, X, make, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from fused_remat import convert


def sequence_sharded(kind: str, x_is_dtensor: bool) -> tuple[Outcome, int]:
    """Of an MLP with replicated DTensor weights on a DTensor of token shards."""
    mesh = init_device_mesh("cpu", (2,))
    mlp = make(kind).mlp
    convert(mlp)
    distribute_module(mlp, mesh)
    if x_is_dtensor:
        return step(mlp, mesh, "DTensor")
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        mlp(X)
    return None


@pytest.mark.parametrize("kind", MLPS)
def test_sequence_sharded_input_and_replicated_weights(ranks, kind):
    expected = step(make(kind).mlp)
    for ours in ranks(sequence_sharded, kind, True):
        assert_same(ours.values, expected.values, 1e-5)
        assert set(ours.placements.values()) == {"P(sum)"} and ours.fused == 1
        assert ours.collectives == {}


def test_replicated_weights_and_a_plain_input_fail_as_in_stock_code(ranks):
    ranks(sequence_sharded, "sequential", False)
    ranks(sequence_sharded, "MLP", False)
