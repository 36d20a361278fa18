"""Models with regions and segments: what stays in place, copies, and pickles that another process loads."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from convert_cases import assert_same
from policy_cases import (
    Looped,
    MLPBlock,
    arranged,
    mlp_chain,
    paths,
    rows,
    state_of,
    stepped,
)
from torch import nn

import fused_remat


def test_names_classes_state_copies_and_pickles(tmp_path):
    model, stock = Looped(*mlp_chain()), Looped(*mlp_chain())
    before, state = state_of(model), stock.state_dict()
    arrangement = arranged(model, paths("layers.", 0, 1), ("layers.2",), **{"layers.3.mlp": ()})
    assert all(isinstance(layer, MLPBlock) for layer in model.layers) and type(model.layers[0]).__name__ == "MLPBlock"
    assert list(model.state_dict()) == list(state)
    expected = stepped(stock, rows())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    for copied in copies:
        assert copied.layers[0]._fused_remat["forward"].segment.members[1] is copied.layers[1]
        assert_same(stepped(copied, rows()), expected, 2e-5)
        assert fused_remat.revert(copied)
        assert_same(stepped(copied, rows()), expected, 0.0)
    assert model.train().layers[0].training and not model.eval().layers[0].training
    model.train()
    assert "region of 2 blocks" in repr(model)
    assert arrangement.revert() and state_of(model) == before


@pytest.mark.slow
def test_regions_load_in_another_process(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    arranged(model, ("0", "1"), ("2",))
    x = torch.randn(4, 8)
    torch.save({"model": model, "x": x, "y": model(x)}, tmp_path / "model.pt")
    code = f"""
import torch
saved = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert "recomputed region of 2 blocks" in repr(saved["model"])
y = saved["model"](saved["x"])
assert torch.equal(y, saved["y"])
y.sum().backward()
print("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "loaded", done.stderr
