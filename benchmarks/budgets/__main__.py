"""`python -m benchmarks.budgets`: compile every kernel, print the table, and write it to tests/ and docs/kernels.md.

Exit status: 0 done, 1 a kernel breaks the law (nothing is written then, unless `--force`) or does not compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.budgets import table
from benchmarks.budgets.run import measure, triton_version
from benchmarks.budgets.table import Table
from benchmarks.docs import replace_section

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.budgets", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="only kernels whose key has all of these; prints, writes nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--force", action="store_true", help="write even what breaks the law")
    options = parser.parse_args(arguments)
    budgets, errors = table.from_rows(measure(options.jobs, options.parts))
    reasons = table.load().reasons if table.PATH.exists() else {}
    made = Table(triton_version(), {budget.key: budget for budget in budgets}, reasons)
    made = Table(made.triton, made.budgets, {key: why for key, why in reasons.items() if key in made.budgets})
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
