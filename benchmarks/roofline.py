"""`python -m benchmarks.roofline`: FLOP, bytes and what limits each kernel on one H200. MODELLED; nothing is measured.

A kernel's floor is the longest of four times, each that of one unit working at its peak while the others are hidden
behind it: tensor cores, memory, special functions, and the lanes that do everything else. `--write` puts the tables
into docs/kernels.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attention_cases import BlockCase, CoreCase
from benchmarks.cases import MLPCase
from benchmarks.docs import replace_section
from benchmarks.gpu_cases import FULL, MODEL, TOKENS

DOCS = Path(__file__).parents[1] / "docs" / "kernels.md"


@dataclass(frozen=True)
class Peaks:
    """Per second. `flop` of dense half-precision products; `exponentials` of the special-function units; `lanes`:
    fp32 or int32 instructions of one lane."""

    name: str
    flop: float
    nbytes: float
    exponentials: float
    lanes: float


_SMS, _CLOCK = 132, 1.83e9  # the clock at which NVIDIA's figure for the tensor cores holds
H200 = Peaks(
    "NVIDIA H200 SXM",
    flop=989e12,
    nbytes=4.8e12,
    exponentials=16 * _SMS * _CLOCK,
    lanes=128 * _SMS * _CLOCK,
)
SOURCES = """\
Peaks of one H200 SXM: 989 TFLOP/s of dense bf16 and 4.8 TB/s (NVIDIA's H200 data sheet, which gives twice the former,
with sparsity); 132 multiprocessors at 1.83 GHz, which is where that figure holds, with 16 special functions and 128
fp32 or int32 instructions per clock (CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions",
compute capability 9.0). Instructions per element are counted by hand from the formulas: 6 around each score, 25 for an
activation, twice that with its slope, 110 for a Philox word that no other element shares."""

_SCORE, _ACTIVATION, _PHILOX = 6, 25, 110


@dataclass(frozen=True)
class Work:
    """What one kernel does at one shape. `nbytes`: every operand read once and every result written once.
    `library`: a product that a library makes."""

    kernel: str
    flop: float = 0.0
    nbytes: float = 0.0
    exponentials: float = 0.0
    lanes: float = 0.0
    library: bool = False

    def seconds(self, peaks: Peaks) -> dict[str, float]:
        """By unit."""
        return {
            "tensor cores": self.flop / peaks.flop,
            "memory": self.nbytes / peaks.nbytes,
            "special functions": self.exponentials / peaks.exponentials,
            "lanes": self.lanes / peaks.lanes,
        }

    def floor(self, peaks: Peaks = H200) -> tuple[float, str]:
        """Seconds at least, and the unit that takes them."""
        times = self.seconds(peaks)
        limit = max(times, key=times.__getitem__)
        return times[limit], limit


def mlp(case: MLPCase) -> Iterator[Work]:
    """Forward and backward of an MLP that keeps nothing but its input."""
    size, m, d, f = case.dtype.itemsize, case.rows, case.width, case.hidden
    x, weight, hidden, flop = size * m * d, size * d * f, size * m * f, case.gemm_flop
    ups = 2 if case.gated else 1
    one = m * f  # elements of one hidden tensor
    exponentials = one
    yield Work("mlp_fwd", ups * flop, x + ups * weight + hidden, exponentials, one * (_ACTIVATION + case.gated))
    yield Work("y = hidden w_down^T", flop, hidden + weight + x, library=True)
    reads = 2 * x + (ups + 1) * weight
    backward = (exponentials, one * (2 * _ACTIVATION + 4 * case.gated))
    if d <= 1024:
        yield Work("mlp_fused", (ups + 1) * flop, reads + (ups + 1) * hidden, *backward)
    else:
        for _ in range(ups):
            yield Work("pre-activation = x w^T", flop, x + weight + hidden, library=True)
        # The pre-activations are read and overwritten in place; hidden is written beside them.
        yield Work("mlp_dhidden", flop, x + weight + (2 * ups + 1) * hidden, *backward)
    for name in ("dw_down", *("dw_up", "dw_gate")[:ups]):
        yield Work(name, flop, x + hidden + 4 * d * f, library=True)
    for index in range(ups):
        yield Work("dx" if not index else "dx (gate)", flop, hidden + weight + 4 * m * d, library=True)


def attention(case: CoreCase) -> Iterator[Work]:
    """Forward and backward from q, k and v; out is kept."""
    size = case.dtype.itemsize
    rows = case.batch * case.heads * case.length
    operand, accumulated, statistic = size * rows * case.width, 4 * rows * case.width, 4 * rows
    part = (case.length + 1) / (2 * case.length) if case.causal else 1.0
    scores = rows * case.length * part
    product = 2 * scores * case.width
    lanes = scores * (_SCORE + (_PHILOX if case.dropout_p else 0))
    yield Work("attention_fwd", 2 * product, 4 * operand + statistic, scores, lanes)
    yield Work("attention_delta", 0.0, 2 * operand + 2 * statistic, 0.0, 2 * rows * case.width)
    yield Work("attention_dkdv", 4 * product, 4 * operand + 2 * accumulated + 2 * statistic, scores, lanes)
    yield Work("attention_dq", 3 * product, 4 * operand + accumulated + 2 * statistic, scores, lanes)


def rebuild(case: CoreCase) -> Work:
    """out and delta from the known lse, where out was not kept."""
    forward = next(attention(case))
    operand = case.dtype.itemsize * case.batch * case.heads * case.length * case.width
    return Work(
        "attention_delta, out rebuilt", forward.flop, forward.nbytes + operand, forward.exponentials, forward.lanes
    )


def mha(case: BlockCase) -> Iterator[Work]:
    """The block from x that keeps x, out and lse: forward and backward."""
    unit, weight, flop = case.unit_bytes, case.dtype.itemsize * case.model**2, case.gemm_flop
    for pass_name in ("forward", "backward"):
        yield Work(f"q, k, v = x w_in^T ({pass_name})", 3 * flop, 4 * unit + 3 * weight, library=True)
    yield Work("y = out w_out^T", flop, 2 * unit + weight, library=True)
    core = CoreCase(
        case.batch, case.heads, case.length, case.model // case.heads, case.causal, case.dropout_p, case.dtype
    )
    yield from attention(core)
    yield Work("dout, dw_out", 2 * flop, 4 * unit + 3 * weight, library=True)
    yield Work("dx, dw_in", 6 * flop, 8 * unit + 9 * weight, library=True)


MODELS = {"mlp": mlp, "attention": attention, "mha": mha}


def floor_seconds(operation: str, case: Any, peaks: Peaks = H200) -> float:
    """The least time of forward and backward: the sum of its kernels' floors."""
    return sum(work.floor(peaks)[0] for work in MODELS[operation](case))


def markdown(peaks: Peaks = H200) -> str:
    """The tables of docs/kernels.md."""
    return "\n".join(
        [
            f"**MODELLED for one {peaks.name}; nothing below was measured.** {SOURCES}",
            "",
            f"MLP, M = {FULL.mlp[0].rows} token rows, bf16; library products are left out:",
            "",
            *_table(_mlp_rows(), peaks),
            "",
            f"Attention, B L = {TOKENS} tokens, H E = {MODEL} features, bf16:",
            "",
            *_table(_core_rows(), peaks),
        ]
    )


def _mlp_rows() -> Iterator[tuple[str, Work]]:
    for case in FULL.mlp:
        shape = f"{'gated' if case.gated else 'plain'}, D={case.width} F={case.hidden}"
        yield from ((shape, work) for work in mlp(case) if not work.library)


def _core_rows() -> Iterator[tuple[str, Work]]:
    seen = set()
    with_dropout = CoreCase(4, 16, 8192, 128, dropout_p=0.1, dtype=FULL.attention[0].dtype)
    for case in (*FULL.attention, with_dropout):
        shape = (
            f"E={case.width} L={case.length}{' causal' if case.causal else ''}{' dropout' if case.dropout_p else ''}"
        )
        for work in (*attention(case), rebuild(case)):
            # Without a product it depends on the number of rows alone, which all cases share.
            if work.flop or (work.kernel, case.width) not in seen:
                yield shape, work
            seen.add((work.kernel, case.width))


def _table(rows: Iterable[tuple[str, Work]], peaks: Peaks) -> Iterator[str]:
    yield "| shape | kernel | TFLOP | MB | FLOP per byte | floor, us | limited by | next |"
    yield "|---|---|---|---|---|---|---|---|"
    for shape, work in rows:
        (limit, seconds), (second, less), *_ = sorted(work.seconds(peaks).items(), key=lambda item: -item[1])
        yield (
            f"| {shape} | {work.kernel} | {work.flop / 1e12:.3f} | {work.nbytes / 1e6:.0f} "
            f"| {work.flop / work.nbytes:.0f} | {1e6 * seconds:.0f} | {limit} | {second} {100 * less / seconds:.0f} % |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="also put the tables into docs/kernels.md")
    options = parser.parse_args(arguments)
    print(markdown())
    if options.write:
        replace_section(DOCS, "roofline", markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
