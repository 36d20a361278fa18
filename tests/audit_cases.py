"""What the tests of `audit` share."""

from __future__ import annotations

import torch
from torch import nn

import fused_remat

B, L, D, F, H = 2, 8, 32, 64, 4
STREAM = B * L * D * 4  # bytes


def encoder(layers=2, dropout=0.0, norm_first=True, **convert):
    layer = nn.TransformerEncoderLayer(D, H, F, dropout, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    fused_remat.convert(model, **convert)
    return model


def x(rows=B, width=D, **kwargs):
    return torch.randn(rows, L, width, **kwargs)


def step(model, given=None, **kwargs):
    given = x() if given is None else given
    output = model(given, **kwargs)
    (output[0] if isinstance(output, tuple) else output).square().mean().backward()


def verdicts(found):
    return {row.layer: row.verdict for row in found.rows}
