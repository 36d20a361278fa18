"""Bytes of one layer and direction of an LSTM on the CPU, as oneDNN lays them out (GRUs, RNNs, projections and packed
sequences are composed of ordinary operators there).

T steps, B sequences, I features of the input, H of the state; four gates. Matrices stand in fp32 or half precision in
rows of whole cache lines, and parts begin at whole pages.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LINE, _PAGE = 64, 4096
_ALIASING = 256  # numbers: a row length divisible by it is made one cache line longer
_MOST_MERGED = 128  # sequences, from which on forward multiplies the input step by step
_ALIGNMENT = _PAGE + 568  # of the scratch memory, and its bookkeeping


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """What forward keeps for backward, where a graph is recorded: gates and states of all steps, and room for the
    gradients of the states."""
    gates, hidden, states, cells = _parts(args[0], _hidden(args))
    return sum(map(_pages, (gates, hidden, states, cells, states, states, cells)))


def forward(out: Any, x: Tensor, w_input: Tensor, w_state: Tensor, *rest: Any) -> int:  # x [T, B, I]
    """Sum of the biases, both weights transposed, and scratch."""
    hidden = w_state.shape[1]
    taken = w_input.shape[0] * x.element_size() + sum(
        _row_bytes(4 * hidden, w) * w.shape[1] for w in (w_input, w_state)
    )
    merged = x.shape[1] < _MOST_MERGED
    if torch.is_grad_enabled():
        return taken + _scratch(x, hidden, merged=merged, backward_too=True)
    _, _, states, cells = _parts(x, hidden)
    return taken + _pages(states) + _pages(cells) + _scratch(x, hidden, merged=merged, backward_too=False)


def backward(out: Any, x: Tensor, w_input: Tensor, w_state: Tensor, *rest: Any) -> int:
    """Gradients that nobody gave as zeros, or copied where they are not dense; weights in rows of whole lines, their
    gradients in another order, the sum of the biases, and scratch."""
    _, _, hx, cx, y, _, _, dout, dhy, dcy, *_ = rest
    hidden = w_state.shape[1]
    taken = sum(t.nbytes for d, t in ((dout, y), (dhy, hx), (dcy, cx)) if d is None or not d.is_contiguous())
    taken += w_input.shape[0] * x.element_size()
    for w in (w_input, w_state):
        rows = _row_bytes(w.shape[1], w) * w.shape[0]
        taken += rows if rows != w.nbytes else 0
        taken += _row_bytes(4 * hidden, w) * w.shape[1]
    return taken + _scratch(x, hidden, merged=True, backward_too=True)


def _hidden(args: tuple[Any, ...]) -> int:
    return args[2].shape[1]


def _parts(x: Tensor, hidden: int) -> tuple[int, int, int, int]:
    """Bytes of (gates, states before a projection, states of layers and steps, cell states)."""
    steps, batch, features = x.shape
    each = 2 * (steps + 1) * batch
    cells = each * hidden * x.element_size()
    gates, states = (steps * batch * _row_bytes(width, x) for width in (4 * hidden, hidden))
    return gates, states, each * _row_bytes(max(features, hidden), x), cells


def _scratch(x: Tensor, hidden: int, *, merged: bool, backward_too: bool) -> int:
    steps, batch, _ = x.shape
    gates = (steps if merged else 1) * batch * _row_bytes(4 * hidden, x)
    state = batch * _row_bytes(hidden, x)
    return _pages(gates) + _pages(state) * (2 if backward_too else 1) + _ALIGNMENT


def _row_bytes(numbers: int, like: Tensor) -> int:
    line = _LINE // like.element_size()
    aligned = math.ceil(numbers / line) * line
    return (aligned + line if aligned % _ALIASING == 0 else aligned) * like.element_size()


def _pages(nbytes: int) -> int:
    return math.ceil(nbytes / _PAGE) * _PAGE
