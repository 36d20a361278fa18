"""A step whose memory is told, for the tests of `find_batch_size`."""

from __future__ import annotations

import torch
from torch import nn

MIB = 2**20


class Holds(nn.Module):
    """A step that holds `bytes_of(rows)` bytes at its peak, besides next to nothing; or raises what it is told to."""

    def __init__(self, bytes_of=lambda rows: 0, raises=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.bytes_of, self.raises = bytes_of, raises
        self.rows_seen = []

    def forward(self, x):
        self.rows_seen = [*self.rows_seen, len(x)]
        if self.raises is not None:
            self.raises(len(x))
        scratch = torch.empty(self.bytes_of(len(x)), dtype=torch.uint8)
        y = (x * self.scale).sum()
        del scratch
        return y


def rows(size):
    return torch.ones(size, 1)
