"""`python -m benchmarks.host_cost`: the Python that a level-3 call of the Triton backend runs before its launch, in us.

Needs no GPU: the calls are those of the budgets, on tensors without storage, and their launches go nowhere. What Triton
itself does per launch is not in the numbers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.budgets.launches import Case, cases
from fused_remat.triton import launch, targets

ARCHITECTURE = 90
_REPEATS, _CALLS = 7, 50


def main() -> int:
    print(f"{'launched':50} {'call':32} {'us':>8}")
    for case in cases():
        kernels, seconds = cost(case)
        print(f"{', '.join(kernels):50} {case.name:32} {1e6 * seconds:8.1f}")
    return 0


def cost(case: Case) -> tuple[list[str], float]:
    """The kernels that one call launches, and the median seconds of a call like one that was made before."""
    kernels: list[str] = []

    def noted(kernel: Any, *_: object) -> None:
        kernels.append(kernel.__name__.removesuffix("_kernel"))

    with targets.pretending(ARCHITECTURE):
        with launch.replaced(noted):
            case.call()
        with launch.replaced(lambda *_: None):
            return kernels, median(_seconds(case.call) for _ in range(_REPEATS))


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - start) / _CALLS


if __name__ == "__main__":
    sys.exit(main())
