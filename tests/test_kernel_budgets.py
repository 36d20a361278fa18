"""What the GPU kernels compile to for three architectures, without a GPU, against `kernel_budgets.json`."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest
from budget_cases import FITS

from benchmarks import docs
from benchmarks.budgets import __main__ as command
from benchmarks.budgets import cubins, run, table
from benchmarks.budgets.table import SHARED_LIMIT, Budget, drifted, unlawful
from fused_remat import _extension

TABLE = table.load()
TESTS = Path(__file__).parent


def why_not_compiled() -> str | None:
    """Why this environment cannot compile what the table holds, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if run.triton_version() != TABLE.triton:
        return f"the table of kernel budgets holds for Triton {TABLE.triton}, this is {run.triton_version()}"
    return None


needs_this_triton = pytest.mark.skipif(why_not_compiled() is not None, reason=str(why_not_compiled()))


# The gate


@pytest.fixture(scope="module")
def compiled() -> tuple[dict[str, Budget], list[str]]:
    budgets, errors = table.from_rows(run.measure())
    return {budget.key: budget for budget in budgets}, errors


@needs_this_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_within_the_law(compiled):
    budgets, errors = compiled
    assert errors + [line for budget in budgets.values() for line in unlawful(budget, TABLE.reasons)] == []


@needs_this_triton
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_uses_what_the_table_says(compiled):
    budgets, _ = compiled
    assert sorted(budgets) == sorted(TABLE.of("triton")), "python -m benchmarks.budgets writes the table anew"
    assert [line for key in budgets for line in drifted(budgets[key], TABLE.budgets[key])] == []


@needs_this_triton
@pytest.mark.slow
def test_kernels_that_break_a_budget_are_found():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_stand_ins"], cwd=TESTS.parent, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {name: unlawful(Budget(**row), {}) for name, row in json.loads(done.stdout).items()}
    assert found["fits"] == []
    assert [line.split(": ")[1].split(" ", 1)[1] for line in found["spills"]] == ["bytes of stack, allowed 0"]
    assert any("ptxas warnings of serialised wgmma (C75" in line for line in found["serialised"])
    assert [line.split(": ")[1] for line in found["trap"]] == [
        "311328 bytes of shared memory, allowed 232448",
        "1024 columns of tensor memory, allowed 512",
        "0 tensor-core instructions, expected at least 1",
    ]


# The gate of the kernels in CUDA C++


def cuda_budgets() -> dict[str, Budget]:
    """By whatever nvcc: the law is for all of them."""
    if (reason := cubins.why_not()) is not None:
        pytest.skip(reason)
    return {budget.key: budget for budget in cubins.measure()}


def need_the_nvcc_of_the_table() -> None:
    if cubins.nvcc_version() != TABLE.nvcc:
        pytest.skip(f"the table of kernel budgets holds for nvcc {TABLE.nvcc}, this is {cubins.nvcc_version()}")


@pytest.fixture(scope="module")
def cuda() -> dict[str, Budget]:
    return cuda_budgets()


@pytest.fixture
def cuda_of_the_table(cuda) -> dict[str, Budget]:
    need_the_nvcc_of_the_table()
    return cuda


def test_every_cuda_kernel_is_within_the_law(cuda):
    assert [line for budget in cuda.values() for line in unlawful(budget, TABLE.reasons)] == []


def test_every_cuda_kernel_uses_what_the_table_says(cuda_of_the_table):
    found = cuda_of_the_table
    assert sorted(found) == sorted(TABLE.of("cuda")), "python -m benchmarks.budgets --cuda writes their rows anew"
    assert [line for key in found for line in drifted(found[key], TABLE.budgets[key])] == []


def test_another_nvcc_is_excused_from_the_table_alone(monkeypatch):
    own = replace(FITS, source="cuda")
    monkeypatch.setattr(cubins, "why_not", lambda: None)
    monkeypatch.setattr(cubins, "measure", lambda: [own])
    monkeypatch.setattr(cubins, "nvcc_version", lambda: TABLE.nvcc)
    need_the_nvcc_of_the_table()
    monkeypatch.setattr(cubins, "nvcc_version", lambda: "other")
    try:
        assert cuda_budgets() == {own.key: own}
    except pytest.skip.Exception as skipped:
        pytest.fail(f"the law is not judged: {skipped}")
    with pytest.raises(pytest.skip.Exception, match="this is other"):
        need_the_nvcc_of_the_table()
    for judged in (test_every_cuda_kernel_is_within_the_law, test_the_disassembler_counts_the_same_instructions):
        assert list(signature(judged).parameters) == ["cuda"]


def test_the_table_covers_every_cuda_kernel():
    source = TESTS.parent / "csrc" / "cuda"
    text = "".join(path.read_text() for path in sorted(source.iterdir()) if path.suffix in (".cu", ".cuh"))
    defined = set(re.findall(r"__global__ void(?: __launch_bounds__\([^)]*\))?\s+(\w+)_kernel\(", text))
    rows = TABLE.of("cuda").values()
    own = {name for budget in rows if not (name := cuda_name(budget)).startswith("cutlass_")}
    assert own == defined
    for budget in rows:
        only = {"cutlass_stage1_sm80": {80}, "cutlass_stage1_sm90a": {90}}.get(cuda_name(budget), set(SHARED_LIMIT))
        assert {other.arch for other in rows if other.kernel == budget.kernel} == only
    assert {cuda_name(budget) for budget in rows if budget.dots} == set(cubins.PRODUCTS)


def cuda_name(budget: Budget) -> str:
    return budget.kernel.removeprefix("CUDA C++ ").partition("<")[0]


# The table


def test_the_table_covers_every_kernel_on_every_architecture():
    kernels = {(budget.kernel.split()[0], budget.arch) for budget in TABLE.of("triton").values()}
    names = {name for name, _ in kernels}
    assert kernels == {(name, arch) for name in names for arch in SHARED_LIMIT}
    for width in (64, 128, 256):
        for variant in ("plain", "causal", "bool mask", "float mask", "dropout", "softcap", "everything"):
            for kernel in ("attention_fwd", "attention_dkdv", "attention_dq"):
                assert f"{kernel} E={width} {variant} sm_90" in TABLE.budgets
    assert {"attention_delta", "attention_weights", "attention_dmask", "mlp_fwd", "mlp_fused", "mlp_dhidden"} <= names
    assert {"column_sums", "normalize_rows", "row_gradients", "transform_heads", "transform_heads_bwd"} <= names


@needs_this_triton
def test_every_kernel_of_the_package_has_a_budget():
    defined = {
        line.split("(")[0].removeprefix("def ").removesuffix("_kernel")
        for path in (TESTS.parent / "fused_remat" / "triton").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert defined == {budget.kernel.split()[0] for budget in TABLE.of("triton").values()}


def test_the_table_keeps_the_law_and_gives_its_reasons():
    assert [line for budget in TABLE.budgets.values() for line in unlawful(budget, TABLE.reasons)] == []
    with_stack = {key for key, budget in TABLE.budgets.items() if budget.stack_bytes}
    assert set(TABLE.reasons) == with_stack
    assert all(len(reason) > 20 for reason in TABLE.reasons.values())


def test_the_docs_show_the_table():
    assert docs.section(command.DOCS, "budgets") == table.markdown(TABLE)


# Judging


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stack_bytes": 8}, "8 bytes of stack, allowed 0"),
        ({"variant": "dropout", "stack_bytes": 8}, "8 bytes of stack, allowed 0"),
        ({"variant": "everything", "stack_bytes": 40}, "40 bytes of stack, allowed 32"),
        ({"variant": "everything", "stack_bytes": 8}, "8 bytes of stack without a reason in kernel_budgets.json"),
        ({"registers": 256}, "256 registers, allowed 255"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory, allowed 232448"),
        ({"arch": 80, "shared_bytes": 166913}, "166913 bytes of shared memory, allowed 166912"),
        ({"arch": 100, "tensor_memory": 513}, "513 columns of tensor memory, allowed 512"),
        ({"tensor_core": {}}, "0 tensor-core instructions, expected at least 1"),
        ({"warnings": ["C7515"]}, "1 ptxas warnings of serialised wgmma (C7515), allowed 0"),
        ({"variant": "causal", "warnings": ["C7510"]}, "1 ptxas warnings of serialised wgmma (C7510), allowed 0"),
    ],
)
def test_what_is_unlawful_names_kernel_architecture_got_and_allowed(change, message):
    budget = replace(FITS, **change)
    lines = unlawful(budget, {})
    assert f"attention_fwd E=64 plain sm_{budget.arch} (M=128 N=128): {message}" in lines


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"registers": 255, "shared_bytes": 232448},
        {"variant": "bool mask", "warnings": ["C7515"]},
        {"dots": False, "tensor_core": {}},
    ],
)
def test_what_is_lawful(change):
    assert unlawful(replace(FITS, **change), {}) == []


def test_stack_with_a_reason_is_lawful_where_everything_is_on():
    assert unlawful(replace(FITS, variant="everything", stack_bytes=32), {FITS.key: "because"}) == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"registers": 209}, "209 registers, allowed 208 by the table"),
        ({"shared_bytes": 81921}, "81921 shared bytes, allowed 81920 by the table"),
        ({"tiles": "M=64 N=64"}, "tiles M=64 N=64, the table has M=128 N=128"),
        ({"warps": 4}, "warps 4, the table has 8"),
        ({"tensor_core": {"mma": 12}}, "tensor-core instructions mma, the table has wgmma"),
        ({"warnings": ["C7515"]}, "ptxas warns C7515, the table has none"),
    ],
)
def test_what_differs_from_the_table(change, message):
    (line,) = drifted(replace(FITS, **change), FITS)
    assert line.endswith(message) and line.startswith("attention_fwd E=64 plain sm_90 (")


def test_fewer_registers_and_more_instructions_are_no_drift():
    assert drifted(replace(FITS, registers=120, tensor_core={"wgmma": 24}), FITS) == []


def test_tensor_cores_where_none_were_announced():
    own = replace(FITS, source="cuda", dots=False)
    assert unlawful(own, {}) == [f"{own.key}: it multiplies matrices, name it in cubins.PRODUCTS"]


# Reading cubins

MANGLED = "_ZN11fused_remat4cuda12_GLOBAL__N_120mlp_small_fwd_kernelIN3c104HalfELi32ELb1EEEvi"
USAGE = f"""
Fatbin elf code:
================
arch = sm_90a
 Function {MANGLED}:
  REG:120 STACK:16 SHARED:2048 LOCAL:24 CONSTANT[0]:608 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = f"""arch = sm_90a
\t\tFunction : {MANGLED}
        /*0010*/                   HMMA.16816.F32 R4, R8, R2, R4 ;      /* 0x1 */
        /*0020*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;  /* 0x2 */
        /*0030*/                   FFMA R0, R0, R1, R2 ;                /* 0x3 */
        /*0040*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;  /* 0x4 */
"""


def elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections, and one without content."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".nobits", ".shstrtab"))
    contents = [*sections.values(), b"", names]
    offset, body, headers = 64, b"", struct.pack("<IIQQQQ16x8x", 0, 0, 0, 0, 0, 0)
    for name, content in zip((*sections, ".nobits", ".shstrtab"), contents, strict=True):
        place = names.index(b"\0" + name.encode() + b"\0") + 1
        kind, size = (8, 10**6) if name == ".nobits" else (1, len(content))
        headers += struct.pack("<IIQQQQ16x8x", place, kind, 0, 0, offset + len(body), size)
        body += content
    count = len(contents) + 1
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(body))
    struct.pack_into("<HHH", header, 0x3A, 64, count, count - 1)
    return bytes(header) + body + headers


def test_reports_of_cuobjdump_are_read():
    ((name, kernel),) = cubins.usage(USAGE).items()
    assert name == (MANGLED, 90)
    assert (kernel.registers, kernel.stack_bytes, kernel.shared_bytes) == (120, 24, 2048)
    assert cubins.disassembled(SASS) == {name: {"mma": 1, "wgmma": 1, "tcgen05": 1}}


def test_threads_and_instructions_are_read_out_of_a_cubin():
    code = b"".join(struct.pack("<QQ", opcode, 0x23C) for opcode in (0x7000_023C, 0x9F0, 0x9F0, 0x223))
    barriers, threads = struct.pack("<BBH", 2, 0x4C, 1), struct.pack("<BBHIII", 4, 5, 12, 64, 2, 1)
    other = struct.pack("<BBHI", 4, 0x2F, 4, 7)
    cubin = elf({f".text.{MANGLED}": code, f".nv.info.{MANGLED}": barriers + other + threads, ".text.bare": b""})
    found = cubins.read_cubin(cubin)
    assert (found[MANGLED].threads, found[MANGLED].instructions) == (128, {"mma": 1, "wgmma": 2})
    assert (found["bare"].threads, found["bare"].instructions) == (0, {})


def test_a_budget_counts_what_launches_ask_for_and_not_what_the_system_keeps():
    kernel = cubins.Kernel(120, 24, 2048, 128, Counter(mma=1))
    name = "mlp_small_fwd<Half, 32, true>"
    budget = cubins._budget(name, 90, kernel, {"mlp_small_fwd": 1000})
    assert (budget.kernel, budget.warps, budget.source, budget.dots) == (f"CUDA C++ {name}", 4, "cuda", True)
    assert budget.shared_bytes == 2048 - 1024 + 1000
    assert cubins._budget(name, 80, kernel, {}).shared_bytes == 2048
    assert cubins._budget(name, 90, replace(kernel, shared_bytes=0), {}).shared_bytes == 0
    assert not cubins._budget("mlp_small_fwd<float, 32, true>", 90, kernel, {}).dots
    assert unlawful(budget, {}) == [f"CUDA C++ {name} sm_90: 24 bytes of stack, allowed 0"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_disassembler_counts_the_same_instructions(cuda):
    """Every kernel: the opcodes are those of the tensor cores and of nothing else."""
    shown = cubins.disassembled(cubins.dump("-sass", _extension.status().cuda.path))
    names = dict(zip(mangled := sorted({name for name, _ in shown}), cubins._demangled(mangled), strict=True))
    counted = {
        f"CUDA C++ {cubins.readable(names[name])} sm_{arch}": dict(kinds) for (name, arch), kinds in shown.items()
    }
    assert counted == {key: dict(budget.tensor_core) for key, budget in cuda.items()}


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("void fused_remat::cuda::small::mlp_small_bwd_kernel<c10::BFloat16, 64, false>(Args, long)",
         "mlp_small_bwd<BFloat16, 64, false>"),
        ("fused_remat::cuda::(anonymous namespace)::copy_kernel(fused_remat::cuda::Args)", "copy"),
        ("void cutlass::Kernel2<cutlass::Gemm<fused_remat::cuda::stage1::Sm80Visitor<c10::Half, true, Map> > >(Params)",
         "cutlass_stage1_sm80<Half, gated>"),
        ("void cutlass::device_kernel<Gemm<fused_remat::cuda::stage1::Sm90Epilogue<c10::BFloat16, false, 128> > >(P)",
         "cutlass_stage1_sm90a<BFloat16, plain>"),
    ],
)  # fmt: skip
def test_names_are_readable(demangled, name):
    assert cubins.readable(demangled) == name
