"""`python -m benchmarks.budgets`: compile every kernel, print the table, and write it to tests/ and docs/kernels.md.

The CUDA C++ kernels are read out of the library that is built; where that cannot be, their rows stay as they are. With
`--cuda` they alone are renewed, in seconds.

Exit status: 0 done, 1 a kernel breaks the law (nothing is written then, unless `--force`) or does not compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.budgets import cubins, table
from benchmarks.budgets.run import measure, triton_version
from benchmarks.budgets.table import Table
from benchmarks.docs import replace_section

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.budgets", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="only kernels whose key has all of these; prints, writes nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--cuda", action="store_true", help="only the kernels in CUDA C++")
    parser.add_argument("--force", action="store_true", help="write even what breaks the law")
    options = parser.parse_args(arguments)
    known = table.load() if table.PATH.exists() else Table(triton_version(), "", {}, {})
    budgets, errors = table.from_rows([] if options.cuda else measure(options.jobs, options.parts))
    kept = list(known.of("triton").values()) if options.cuda else []
    reason = cubins.why_not()
    if reason is None:
        cuda, nvcc = cubins.measure(), cubins.nvcc_version()
        cuda = [budget for budget in cuda if all(part in budget.key for part in options.parts)]
    else:
        print(f"rows of CUDA C++ as they were: {reason}", file=sys.stderr)
        cuda, nvcc = list(known.of("cuda").values()), known.nvcc
    budgets += [*kept, *cuda]
    reasons = {key: why for key, why in known.reasons.items() if key in {budget.key for budget in budgets}}
    made = Table(
        known.triton if options.cuda else triton_version(), nvcc, {budget.key: budget for budget in budgets}, reasons
    )
    print(table.markdown(made))
    wrong = errors + [line for budget in budgets for line in table.unlawful(budget, reasons)]
    for line in wrong:
        print(line, file=sys.stderr)
    if not options.parts and (options.force or not wrong):
        table.save(made)
        replace_section(DOCS, "budgets", table.markdown(made))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
