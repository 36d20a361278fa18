"""The host runner itself: what it computes, and which mistakes of a kernel it finds."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from simt import build
from torch import Tensor

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
LANES = 32


@cache
def probes() -> ctypes.CDLL:
    return ctypes.CDLL(str(build.build("probes", [Path(__file__).with_name("probes.cu")])))


@pytest.fixture(autouse=True)
def ascending_order():
    order(0)
    yield
    order(0)


def order(seed: int) -> None:
    probes().simt_set_thread_order(ctypes.c_uint64(seed))


def address(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


MISUSES = {
    "diverge_by_place": r"waits in __syncthreads at probes.cu:\d+, while thread \(0, 0, 0\) waits in __syncthreads at "
    r"probes.cu:\d+: the block's threads diverge",
    "diverge_by_return": r"waits in __syncthreads at probes.cu:\d+, but thread \(5, 0, 0\) has returned: the block",
    "lane_missing": r"waits in __shfl_sync at probes.cu:\d+ for lane 7 of mask 0xffffffff, which has returned",
    "lane_beyond": r"thread \(32, 0, 0\): waits in __syncwarp at probes.cu:\d+ for lane 8 of mask 0xffffffff, which "
    "does not exist",
    "lane_not_named": r"__shfl_sync: the mask does not name the calling lane",
    "source_not_named": r"a shuffle reads lane 2, which the mask does not name",
    "warp_diverges": r"waits in (__ballot|__shfl)_sync at probes.cu:\d+, while thread \(\d+, 0, 0\) waits in "
    r"(__ballot|__shfl)_sync at probes.cu:\d+: the warp's lanes diverge",
    "mma_diverges": r"waits in mma_m16n8k16 at probes.cu:\d+, while thread \(\d+, 0, 0\) waits in mma_m16n8k16 at",
    "warp_waits_for_barrier": r"waits in __syncwarp at probes.cu:\d+ for lane 16 of mask 0xffffffff, which waits in "
    r"__syncthreads at probes.cu:\d+",
    "overrun": r"the block has written behind its dynamic shared memory",
    "misaligned_copy": r"cp_async_16: the shared address is not aligned to 16 bytes",
    "misaligned_rows": r"ldmatrix: a row address is not aligned to 16 bytes",
    "throws": r"block \(0, 1, 0\), thread \(\d, 2, 0\): no such row",
}


def misuse(name: str) -> str:
    text = ctypes.create_string_buffer(1000)
    probes().probe_misuse(name.encode(), text, len(text))
    return text.value.decode()


@pytest.mark.parametrize("seed", (0, 5))
@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_that_names_kernel_block_and_thread(name, seed):
    order(seed)
    text = misuse(name)
    assert text.startswith(f"kernel {name}, block (0, ") and ", thread (" in text
    assert re.search(MISUSES[name], text), text


def test_the_runner_works_again_after_an_error():
    assert misuse("diverge_by_place")
    out = torch.empty(64)
    probes().probe_neighbours(address(out), 64, True)
    assert out.tolist() == [(i + 1) % 64 for i in range(64)]


def test_a_missing_barrier_shows():
    right = torch.arange(96).roll(-1).float()

    def run(seed: int, with_barrier: bool) -> Tensor:
        order(seed)
        out = torch.empty(96)
        probes().probe_neighbours(address(out), 96, with_barrier)
        return out

    for seed in range(4):
        assert torch.equal(run(seed, True), right)
        assert run(seed, False).isnan().any()  # what nobody has written yet
    assert not torch.equal(run(1, False).isnan(), run(2, False).isnan())


def test_shared_memory_is_nan_before_every_block():
    out = torch.zeros(5)
    probes().probe_fresh_shared(address(out), 5, False)
    assert out.isnan().all()
    out = torch.zeros(5)
    probes().probe_fresh_shared(address(out), 5, True)
    assert out.isnan().all()


@pytest.mark.parametrize("library", ("probes", "cuda"))
def test_nothing_but_shared_memory_is_thread_local(library):
    """All thread-local storage is overwritten before every block."""
    path = build.library() if library == "cuda" else probes()._name
    symbols = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True, check=True).stdout
    fields = [line.split() for line in symbols.splitlines() if " TLS " in line]
    names = {line[7] for line in fields if line[6] != "UND"} - {"_ZN4simt20static_shared_anchorE"}
    assert names and all(name.startswith("_ZZN11fused_remat4cuda") for name in names), names


def test_a_copy_lands_when_it_is_waited_for():
    given = torch.arange(1, 9).float()
    for pending, expected in ((0, [1, 2, 3, 4, 0, 0, 0, 0]), (1, [1, 2, 3, 4, *[float("nan")] * 4])):
        out = torch.zeros(8)
        probes().probe_copies(address(given), address(out), pending)
        torch.testing.assert_close(out, torch.tensor(expected).float(), rtol=0, atol=0, equal_nan=True)


def fragment_places(rows: int, cols: int, registers: int, place) -> tuple[Tensor, Tensor]:
    """The row and column of each element of a fragment, [lane, register, half], by PTX ISA's formulas."""
    where = [[[place(lane, r, h) for h in range(2)] for r in range(registers)] for lane in range(LANES)]
    where = torch.tensor(where)
    assert {tuple(w) for w in where.reshape(-1, 2).tolist()} == {(r, c) for r in range(rows) for c in range(cols)}
    return where[..., 0], where[..., 1]


def place_a(lane: int, r: int, half: int) -> tuple[int, int]:
    """PTX ISA, mma.m16n8k16: a_i with i = 2 r + half."""
    i, group, thread = 2 * r + half, lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    col = thread * 2 + (i & 1) + (8 if i >= 4 else 0)
    return row, col


def place_b(lane: int, r: int, half: int) -> tuple[int, int]:
    """b_i with i = 2 r + half."""
    i, group, thread = 2 * r + half, lane >> 2, lane % 4
    return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group


def place_d(lane: int, r: int, half: int) -> tuple[int, int]:
    """c_i and d_i with i = 2 r + half."""
    i, group, thread = 2 * r + half, lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_mma_is_a_matmul_in_float(dtype):
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    a_part = a[fragment_places(16, 16, 4, place_a)].contiguous()
    b_part = b[fragment_places(16, 8, 2, place_b)].contiguous()
    places = fragment_places(16, 8, 2, place_d)
    d_part = c[places].contiguous()
    probes().probe_multiply(address(a_part), address(b_part), address(d_part), dtype == torch.bfloat16)
    d = torch.empty(16, 8)
    d[places] = d_part
    truth = c.double() + a.double() @ b.double()
    scale = c.double().abs() + a.double().abs() @ b.double().abs()
    assert ((d - truth).abs() <= 16 * 2**-24 * scale).all()
    assert not torch.equal(d, c)


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("matrices", (2, 4))
def test_ldmatrix_has_the_layout_of_the_isa(matrices, transposed):
    given = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    out = torch.zeros(LANES, matrices, 2, dtype=torch.int16)
    probes().probe_load_matrices(address(given), address(out), matrices, transposed)
    for lane in range(LANES):
        for matrix in range(matrices):
            for half in range(2):
                row, col = lane // 4, lane % 4 * 2 + half
                expected = given[matrix, col, row] if transposed else given[matrix, row, col]
                assert out[lane, matrix, half] == expected


def test_warp_functions():
    x = torch.randn(LANES, dtype=torch.float64)
    for seed in (0, 3):
        order(seed)
        out = torch.zeros(LANES, 10, dtype=torch.float64)
        probes().probe_warp_functions(address(x), address(out))
        lanes, half = torch.arange(LANES), x.float()
        assert torch.equal(out[:, 0], x[(lanes & ~7) | ((lanes + 3) & 7)])
        assert torch.equal(out[:, 1], half[lanes ^ 5].double())
        assert torch.equal(out[:, 2], torch.where(lanes % 16 + 3 < 16, lanes + 3, lanes).double())
        assert torch.equal(out[:, 3], torch.where(lanes >= 2, lanes - 2, lanes).double() * 2**40)
        assert (out[:, 4] == sum(1 << lane for lane in range(0, LANES, 3))).all()
        assert (out[:, 5] == 1).all() and (out[:, 6] == 0).all()
        assert (out[:, 7] == out[0, 7]).all() and (out[:, 8] == out[0, 8]).all()
        assert abs(out[0, 7] - half.double().sum()) <= 1e-5 and abs(out[0, 8] - x.sum()) <= 1e-14 * x.abs().sum()
        assert torch.equal(out[:, 9], torch.where(lanes < 16, 4, -1).double())


def test_block_sum_is_the_same_in_every_thread_and_order():
    given = torch.randn(128)
    results = []
    for seed in (0, 1, 2):
        order(seed)
        out = torch.zeros(128)
        probes().probe_block_sums(address(given), address(out))
        assert (out == out[0]).all()
        results.append(out[0].item())
    assert len(set(results)) == 1
    assert abs(results[0] - 2 * given.double().sum()) <= 1e-5 * given.abs().sum()


def test_orders_are_told_apart_by_their_seed():
    def tickets(seed: int) -> list[int]:
        order(seed)
        taken, counter = torch.full((150,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        probes().probe_tickets(address(counter), address(taken))
        assert counter.item() == 150
        return taken.tolist()

    assert tickets(0) == list(range(150))
    one, again, other = tickets(1), tickets(1), tickets(2)
    assert one == again != other
    assert sorted(one) == sorted(other) == list(range(150))
    assert one[0] // 50 != 0 or other[0] // 50 != 0 or tickets(4)[0] // 50 != 0  # blocks too


def test_every_thread_of_every_block_runs_once():
    out = torch.zeros(24 * 30, dtype=torch.int32)
    probes().probe_coordinates(address(out))
    assert (out == 1).all()


def test_threads_switch_without_assembly_too():
    library = build.build("probes-ucontext", [Path(__file__).with_name("probes.cu")], "-DFUSED_REMAT_SIMT_UCONTEXT")
    other, given, out = ctypes.CDLL(str(library)), torch.randn(128), torch.zeros(128)
    other.probe_block_sums(address(given), address(out))
    expected = torch.zeros(128)
    probes().probe_block_sums(address(given), address(expected))
    assert torch.equal(out, expected) and not (out == 0).any()
    text = ctypes.create_string_buffer(1000)
    other.probe_misuse(b"throws", text, len(text))
    assert re.search(MISUSES["throws"], text.value.decode())


def test_a_compile_error_carries_the_compilers_words(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text("int f() { return no_such_name; }")
    with pytest.raises(RuntimeError, match="no_such_name"):
        build.build(f"wrong-{tmp_path.name}", [source])


def test_a_library_is_built_once_per_content(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSED_REMAT_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "small.cu"
    source.write_text("int one() { return 1; }")
    first = build.build("small", [source])
    stamp = first.stat().st_mtime_ns
    assert build.build("small", [source]) == first and first.stat().st_mtime_ns == stamp
    source.write_text("int one() { return 2; }")
    second = build.build("small", [source])
    assert second != first and second.is_file() and not first.exists()
    assert build.build("small", [source], "-DX") != second
