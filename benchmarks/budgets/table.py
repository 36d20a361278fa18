"""The budgets: what each kernel may use, by law and by the table of what it used when the table was written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "tests" / "kernel_budgets.json"

# Bytes of shared memory that one block may have: CUDA C++ Programming Guide, table "Technical Specifications per
# Compute Capability".
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_MEMORY_LIMIT = 512  # columns; a kernel that needs more compiles to a trap, without an error
REGISTER_LIMIT = 255
STACK_LIMIT = {"everything": 32}  # bytes by variant, 0 for all others; each use needs a reason in the table
UNSERIALISED = ("plain", "causal")  # variants whose wgmma products must overlap on sm_90
REGISTER_SLACK = 8


@dataclass(frozen=True)
class Budget:
    """What one kernel, compiled for one architecture, uses.

    Attributes:
        kernel: the kernel and the call that launches it; with `arch` the key of the table.
        variant: "plain", "causal", one mask kind, "dropout", "softcap" or "everything".
        tiles: block sizes, such as "M=128 N=64".
        stack_bytes: of local memory per thread: stack frame or spills, the largest number that ptxas names.
        tensor_memory: columns.
        dots: whether the source multiplies matrices.
        tensor_core: instructions by kind: mma (sm_80 and small tiles), wgmma (sm_90), tcgen05 (sm_100); of Triton's
            kernels in the PTX, of nvcc's in the machine code.
        warnings: ptxas's codes for serialised wgmma.
        source: "triton", or "cuda" for a kernel in CUDA C++, which has neither tiles nor stages here, and whose shared
            memory is the largest that a launch asks for.
    """

    kernel: str
    arch: int
    variant: str
    tiles: str
    warps: int
    stages: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory: int
    dots: bool
    tensor_core: Mapping[str, int]
    warnings: Sequence[str]
    source: str = "triton"

    @property
    def key(self) -> str:
        return f"{self.kernel} sm_{self.arch}"

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.key} ({self.tiles})" if self.tiles else self.key


@dataclass(frozen=True)
class Table:
    """`reasons`: key -> why that kernel may use stack. The numbers hold for these versions of Triton and nvcc alone."""

    triton: str
    nvcc: str
    budgets: Mapping[str, Budget]
    reasons: Mapping[str, str]

    def of(self, source: str) -> dict[str, Budget]:
        """The budgets of "triton" or of "cuda"."""
        return {key: budget for key, budget in self.budgets.items() if budget.source == source}


def load() -> Table:
    """The table of the repository."""
    stored = json.loads(PATH.read_text())
    budgets = [Budget(**row) for row in stored["budgets"]]
    return Table(stored["triton"], stored["nvcc"], {budget.key: budget for budget in budgets}, stored["reasons"])


def save(table: Table) -> None:
    """One line per kernel, so that a change shows as a line."""
    rows = ",\n  ".join(json.dumps(_row(budget)) for budget in table.budgets.values())
    reasons = json.dumps(dict(table.reasons), indent=2).replace("\n", "\n ")
    versions = f'"triton": {json.dumps(table.triton)},\n "nvcc": {json.dumps(table.nvcc)}'
    PATH.write_text(f'{{\n {versions},\n "reasons": {reasons},\n "budgets": [\n  {rows}\n ]\n}}\n')


def _row(budget: Budget) -> dict[str, Any]:
    row = asdict(budget)
    return row if budget.source != "triton" else {name: value for name, value in row.items() if name != "source"}


def unlawful(budget: Budget, reasons: Mapping[str, str]) -> list[str]:
    """What no kernel may do, whatever the table says; each line names kernel, architecture, got and allowed."""
    found = []

    def at_most(what: str, got: int, allowed: int) -> None:
        if got > allowed:
            found.append(f"{budget.where}: {got} {what}, allowed {allowed}")

    stack = STACK_LIMIT.get(budget.variant, 0)
    if 0 < budget.stack_bytes <= stack and budget.key not in reasons:
        found.append(f"{budget.where}: {budget.stack_bytes} bytes of stack without a reason in {PATH.name}")
    at_most("bytes of stack", budget.stack_bytes, stack)
    at_most("registers", budget.registers, REGISTER_LIMIT)
    at_most("bytes of shared memory", budget.shared_bytes, SHARED_LIMIT[budget.arch])
    at_most("columns of tensor memory", budget.tensor_memory, TENSOR_MEMORY_LIMIT)
    if budget.dots and not any(budget.tensor_core.values()):
        found.append(f"{budget.where}: 0 tensor-core instructions, expected at least 1")
    if budget.source == "cuda" and budget.tensor_core and not budget.dots:
        found.append(f"{budget.key}: it multiplies matrices, name it in cubins.PRODUCTS")
    if budget.variant in UNSERIALISED:
        at_most(f"ptxas warnings of serialised wgmma ({', '.join(budget.warnings)})", len(budget.warnings), 0)
    return found


def drifted(budget: Budget, allowed: Budget) -> list[str]:
    """Where a kernel uses more, or something else, than the table holds."""
    where = budget.where
    found = [
        f"{where}: {name.replace('_', ' ')} {got}, the table has {known}"
        for name in ("variant", "tiles", "warps", "stages", "dots")
        if (got := getattr(budget, name)) != (known := getattr(allowed, name))
    ]
    limits = {
        "registers": allowed.registers + REGISTER_SLACK,
        "stack_bytes": allowed.stack_bytes,
        "shared_bytes": allowed.shared_bytes,
        "tensor_memory": allowed.tensor_memory,
    }
    found += [
        f"{where}: {got} {name.replace('_', ' ')}, allowed {limit} by the table"
        for name, limit in limits.items()
        if (got := getattr(budget, name)) > limit
    ]
    if set(budget.tensor_core) != set(allowed.tensor_core):
        kinds = [", ".join(sorted(own)) or "none" for own in (budget.tensor_core, allowed.tensor_core)]
        found.append(f"{where}: tensor-core instructions {kinds[0]}, the table has {kinds[1]}")
    new = sorted(set(budget.warnings) - set(allowed.warnings))
    if new:
        found.append(f"{where}: ptxas warns {', '.join(new)}, the table has {', '.join(allowed.warnings) or 'none'}")
    return found


def markdown(table: Table) -> str:
    """The table as the docs show it: a line per Triton kernel and call or CUDA C++ kernel, a cell per architecture."""
    lines: dict[str, dict[int, str]] = {}
    for budget in table.of("triton").values():
        lines.setdefault(budget.kernel, {})[budget.arch] = _cell(budget)
    architectures = sorted(SHARED_LIMIT)
    head = ["kernel and call", *(f"sm_{arch}" for arch in architectures)]
    rows = [head, ["---"] * len(head)]
    rows += [[kernel, *(cells.get(arch, "as above") for arch in architectures)] for kernel, cells in lines.items()]
    rows += _folded(table.of("cuda").values())
    reasons = [f"- {key}: {reason}" for key, reason in table.reasons.items()]
    return "\n".join([*("| " + " | ".join(row) + " |" for row in rows), *(["", *reasons] if reasons else [])])


def _folded(budgets: Iterable[Budget]) -> list[list[str]]:
    """One line per CUDA C++ kernel, with the range of what its instances use; a kernel may be for one architecture."""
    instances: dict[str, dict[int, list[Budget]]] = {}
    for budget in budgets:
        kernel = budget.kernel.partition("<")[0]
        instances.setdefault(kernel, {}).setdefault(budget.arch, []).append(budget)
    return [
        [
            f"{kernel}, {max(map(len, by_arch.values()))} instances",
            *(_range_cell(by_arch[arch]) if arch in by_arch else "-" for arch in sorted(SHARED_LIMIT)),
        ]
        for kernel, by_arch in instances.items()
    ]


def _range_cell(budgets: Sequence[Budget]) -> str:
    def span(values: Iterable[float]) -> str:
        low, high = min(values := list(values)), max(values)
        return f"{low:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f}-{high:.0f}"

    kinds = sorted({kind for budget in budgets for kind in budget.tensor_core})
    instructions = [f"{kind} {span(b.tensor_core[kind] for b in budgets if kind in b.tensor_core)}" for kind in kinds]
    warps = span(budget.warps for budget in budgets)
    parts = [
        f"w{warps}" if warps != "0" else "-",  # no bound is compiled into some kernels of CUTLASS
        span(budget.registers for budget in budgets),
        span(budget.shared_bytes / 1024 for budget in budgets),
        span(budget.tensor_memory for budget in budgets),
        " ".join(instructions) or "-",
    ]
    stack = max(budget.stack_bytes for budget in budgets)
    return " / ".join(parts) + (f", **{stack} B stack**" if stack else "")


def _cell(budget: Budget) -> str:
    """tiles, warps x stages / registers / KiB shared / columns of tensor memory / instructions, and what is unusual."""
    parts = [
        f"{budget.tiles} w{budget.warps} s{budget.stages}".strip(),
        str(budget.registers),
        f"{budget.shared_bytes / 1024:.0f}",
        str(budget.tensor_memory),
        " ".join(f"{name} {count}" for name, count in budget.tensor_core.items()) or "-",
    ]
    unusual = [f"**{budget.stack_bytes} B stack**"] if budget.stack_bytes else []
    return " / ".join(parts) + "".join(f", {text}" for text in (*unusual, *budget.warnings))


def from_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[list[Budget], list[str]]:
    """Budgets among what the compiling processes printed, and the errors among it as lines."""
    rows = list(rows)
    errors = [f"{row['kernel']} sm_{row['arch']}: {row['error']}" for row in rows if "error" in row]
    return [Budget(**row) for row in rows if "error" not in row], errors
