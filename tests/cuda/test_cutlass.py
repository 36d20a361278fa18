"""Stage 1 as a CUTLASS GEMM: its epilogues run on the host, thread for thread, and what the kernels compile to.

A tensor core's product is given (`dhidden`); everything after it is the kernels' own code, with CUTLASS's exchange of
accumulators between threads. The main loops are CUTLASS's.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import re
import subprocess
from collections.abc import Callable

import cutlass_host
import pytest
import torch
from cutlass_host import Stage1Gemm
from guarded import guards
from torch import Tensor

from fused_remat import _build, _build_cuda, _cuda_toolkit
from fused_remat._build import BuildUnavailable
from fused_remat.activations import ACTIVATIONS
from fused_remat.reference import dropout_mask

NAMES = list(ACTIVATIONS)
KERNELS = ("sm80", "sm90a")
PROT_NONE = 0
IN_PLACE = ("in place", "apart", "hidden over up")


@pytest.fixture(autouse=True)
def cuda_on_cpu() -> None:
    """In place of the folder's: the backend's operators are not called here."""


@pytest.fixture(scope="module")
def host() -> ctypes.CDLL:
    try:
        return cutlass_host.library()
    except BuildUnavailable as error:
        pytest.skip(str(error))


class Case:
    """A problem, its buffers as `placement` says, and what they must hold afterwards (float64)."""

    def __init__(
        self, rows: int, features: int, dtype: torch.dtype, *, gated: bool, activation: str = "gelu",
        placement: str = "in place", p: float = 0.0, seed: int = 0, hidden_features: int = 0,
        place: Callable[..., Tensor] = lambda values, **_: values.clone(),
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(rows * 1000 + features + seed)

        def random(scale: float = 1.0) -> Tensor:
            return torch.randn(rows, features, generator=generator) * scale

        self.dhidden = random().contiguous()
        up, gate = random(2).to(dtype), random(2).to(dtype)
        self.gemm = gemm = Stage1Gemm(
            dtype=cutlass_host.DTYPES[dtype], rows=rows, features=features, d_out=8, activation=NAMES.index(activation)
        )
        poison = torch.full((rows, features), torch.nan, dtype=dtype)
        self.up = place(up, gap=8)
        self.inputs = {"up": self.up}
        self.outputs = {
            "dup": self.up if placement == "in place" else place(poison, gap=16),
            "hidden": self.up if placement == "hidden over up" else place(poison),
        }
        if gated:
            self.inputs["gate"] = place(gate, gap=24)
            self.outputs["dgate"] = place(poison) if placement == "apart" else self.inputs["gate"]
        gemm.place(**self.inputs, **self.outputs)
        scale = torch.ones(rows, features, dtype=torch.float64)
        if p > 0:
            gemm.row0, gemm.feature0, gemm.hidden_features = 3, 5, hidden_features or features + 7
            self.seed = torch.tensor([0x123456789ABCDEF + seed])
            gemm.seed, gemm.drop_threshold = self.seed.data_ptr(), round(p * 2**32)
            gemm.keep_scale = 1 / (1 - p)
            kept = dropout_mask(self.seed, p, (rows + 3, gemm.hidden_features))[3:, 5 : 5 + features]
            scale = kept.double() / (1 - p)
        self.scale = scale
        self.factors = self.dhidden.abs().clamp(min=1) * up.float().abs().clamp(min=1)
        self.expected = expected(activation, up, gate if gated else None, self.dhidden, scale)

    def run(self, host: ctypes.CDLL, kernel: str) -> None:
        data = ctypes.c_void_p(self.dhidden.data_ptr())
        host.epilogue(self.gemm.reference, data, ctypes.c_bool(kernel == "sm90a"))

    def check(self) -> None:
        for name, actual in self.outputs.items():
            exact = self.expected[name]
            # Half a unit in the last place, and fp32 arithmetic before the rounding: an activation's slope is a sum
            # of terms that may cancel, and dhidden and up multiply its error.
            allowed = 0.51 * torch.finfo(actual.dtype).eps * exact.abs() + 2e-6 * self.factors
            wrong = ~((actual.double() - exact).abs() <= allowed)
            assert not wrong.any(), (name, wrong.nonzero()[:4], actual[wrong][:4], exact[wrong][:4])
            assert (actual[self.scale == 0] == 0).all(), name


def expected(activation: str, up: Tensor, gate: Tensor | None, dhidden: Tensor, scale: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad():
        pre = {name: t.double().requires_grad_() for name, t in (("up", up), ("gate", gate)) if t is not None}
        act = ACTIVATIONS[activation]
        hidden = (act(pre["up"]) if gate is None else act(pre["gate"]) * pre["up"]) * scale
        gradients = torch.autograd.grad(hidden, list(pre.values()), dhidden.double())
    return {"hidden": hidden.detach(), **{f"d{name}": d for name, d in zip(pre, gradients, strict=True)}}


# Rows around the tiles of 128 and the slabs of 64; features around the tiles, in steps of vectors.
SHAPES = ((1, 8), (63, 128), (64, 136), (65, 120), (127, 248), (128, 128), (129, 256), (260, 264))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
def test_every_element_is_made_once_and_nothing_else(host, kernel, shape, gated):
    dtype = torch.float16 if gated else torch.bfloat16
    with guards() as made:
        case = Case(*shape, dtype, gated=gated, p=0.3, place=made.place)
        case.run(host, kernel)
        case.check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", cutlass_host.DTYPES, ids=str)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@pytest.mark.parametrize("activation", NAMES)
def test_activations(host, kernel, dtype, gated, activation):
    case = Case(70, 136, dtype, gated=gated, activation=activation)
    case.run(host, kernel)
    case.check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))
@pytest.mark.parametrize("placement", IN_PLACE)
def test_outputs_over_inputs_or_apart(host, kernel, gated, placement):
    with guards() as made:
        case = Case(130, 136, torch.bfloat16, gated=gated, placement=placement, place=made.place)
        kept = {
            name: t.clone() for name, t in case.inputs.items() if all(t is not out for out in case.outputs.values())
        }
        case.run(host, kernel)
        case.check()
        assert all(torch.equal(case.inputs[name], values) for name, values in kept.items())
        assert len(kept) == (1 + gated if placement == "apart" else 0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("beyond", range(4))
@pytest.mark.parametrize("p", (0.5, 1e-12, 0.999))
def test_dropout_at_every_place_within_a_call_of_the_generator(host, kernel, beyond, p):
    # Linear indices of the vectors' first elements take all remainders by 4.
    case = Case(66, 40, torch.bfloat16, gated=True, p=p, seed=beyond, hidden_features=1020 + beyond)
    case.run(host, kernel)
    case.check()


def before_a_wall(values: Tensor, **_: int) -> Tensor:
    """A copy that ends where memory ends: whoever reads or writes on is stopped by the system."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), PROT_NONE) == 0
    start = page - values.numel() * values.element_size()
    return (
        torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=start).view_as(values).copy_(values)
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", (1, 9, 70))
def test_nothing_is_touched_past_the_end(host, kernel, rows):
    case = Case(rows, 24, torch.float16, gated=True, placement="apart", place=before_a_wall)
    case.run(host, kernel)
    case.check()


@pytest.mark.parametrize("kernel", KERNELS)
def test_same_bits_whatever_the_order_of_threads(host, kernel):
    runs = []
    for _ in range(3):
        case = Case(200, 136, torch.float16, gated=True, p=0.1)
        case.run(host, kernel)
        runs.append(case.outputs)
    for again in runs[1:]:
        assert all(torch.equal(again[name], values) for name, values in runs[0].items())


@pytest.mark.parametrize("kernel", KERNELS)
def test_infinities_are_dropped_to_zero(host, kernel):
    case = Case(64, 64, torch.float16, gated=False, activation="identity", placement="apart", p=0.5)
    case.up.fill_(torch.inf)
    case.dhidden.fill_(torch.inf)
    case.run(host, kernel)
    dropped = case.scale == 0
    assert dropped.any() and not dropped.all()
    for name in ("hidden", "dup"):
        assert (case.outputs[name][dropped] == 0).all() and case.outputs[name][~dropped].isposinf().all()


# Operands


@pytest.mark.parametrize("rows,features,d_out", ((128, 128, 32), (130, 136, 8), (1, 8, 40), (300, 264, 72)))
def test_the_sm80_kernel_loads_each_element_of_its_operands_once(host, rows, features, d_out):
    dy = torch.empty(rows, d_out + 8, dtype=torch.bfloat16)[:, :d_out]
    w_down = torch.empty(d_out, features + 16, dtype=torch.bfloat16)[:, :features]
    gemm = Stage1Gemm(rows=rows, features=features, d_out=d_out)
    gemm.place(dy=dy, w_down=w_down)
    first = d_out % 32 or 32  # CUTLASS takes what is no whole step first
    for m, n in itertools.product(range(-(-rows // 128)), range(-(-features // 128))):
        of_dy, of_w = torch.zeros(rows, d_out, dtype=torch.int32), torch.zeros(d_out, features, dtype=torch.int32)
        pointers = (ctypes.c_void_p(of_dy.data_ptr()), ctypes.c_void_p(of_w.data_ptr()))
        assert host.sm80_loads(gemm.reference, m, n, *pointers) == 0
        tile_rows, tile_features = slice(128 * m, 128 * (m + 1)), slice(128 * n, 128 * (n + 1))
        assert (of_dy[tile_rows, :first] == 1).all() and (of_w[:first, tile_features] == 1).all()
        assert of_dy.sum() == of_dy[tile_rows, :first].numel()
        assert of_w.sum() == of_w[:first, tile_features].numel()


def test_two_blocks_of_the_sm80_kernel_share_a_small_multiprocessor(host):
    reserved = 1024  # by CUDA, per block
    assert 2 * (host.sm80_shared_bytes() + reserved) <= 100 * 1024


# What the kernels refuse


def good_gemm() -> Stage1Gemm:
    gemm = Stage1Gemm(dtype=cutlass_host.DTYPES[torch.float16], rows=5, features=16, d_out=24)
    for name in ("dy", "w_down", "up", "hidden", "dup"):
        setattr(gemm, name, cutlass_host.RowMajor(1 << 12, 32))
    return gemm


def test_what_the_kernels_take(host):
    gemm = good_gemm()
    assert host.why_not(gemm.reference) is None
    gemm.rows = 0
    assert host.why_not(gemm.reference) is None


@pytest.mark.parametrize(
    "change,reason",
    (
        ({"dtype": 0}, "dtype"),
        ({"dtype": 1}, "dtype"),
        ({"features": 12}, "number of features is no multiple of 8"),
        ({"d_out": 12}, "output width is no multiple of 8"),
        ({"d_out": 0}, "output width is 0"),
        ({"rows": 2**31 - 8}, "32 bits"),
        ({"d_out": 2**31 - 8}, "32 bits"),
        ({"features": 65536 * 1024}, "32 bits"),
        *(({name: (1 << 12, 36)}, "input") for name in ("dy", "w_down", "up", "gate")),
        *(({name: ((1 << 12) + 8, 32)}, "input") for name in ("dy", "w_down", "up", "gate")),
        *(({name: (1 << 12, 36)}, "output") for name in ("hidden", "dup", "dgate")),
        *(({name: ((1 << 12) + 8, 32)}, "output") for name in ("hidden", "dup", "dgate")),
    ),
    ids=str,
)
def test_what_the_kernels_refuse(host, change, reason):
    gemm = good_gemm()
    for name, value in change.items():
        setattr(gemm, name, cutlass_host.RowMajor(*value) if isinstance(value, tuple) else value)
    assert reason in host.why_not(gemm.reference).decode()


# What they compile to


@pytest.mark.slow
@pytest.mark.parametrize("kind,instruction", (("sm80", "HMMA"), ("sm90a", "HGMMA")))
def test_nvcc_makes_no_spills_and_keeps_wgmma_asynchronous(tmp_path, monkeypatch, kind, instruction):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    cuobjdump = pytest.importorskip("triton.backends.nvidia", reason="needs cuobjdump").__path__[0] + "/bin/cuobjdump"
    try:
        recipe = _build_cuda.recipe(_build.source_root(), _build.find_compiler(), _cuda_toolkit.find_toolkit())
    except BuildUnavailable as error:
        pytest.skip(str(error))
    steps = [step for step in recipe.steps if _build_cuda.cutlass_kind(step.source) == kind]
    if not steps:
        pytest.skip(str(_cuda_toolkit.find_cutlass().reason))
    made = tmp_path / "made.o"
    command = [*recipe.rules[steps[0].rule], *steps[0].flags, "-Xptxas", "-v", "-c", str(steps[0].source)]
    done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert len(re.findall(r"Used \d+ registers", said)) == 4  # 2 dtypes, plain and gated
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill)", said)) == {"0"}
    assert "serialized" not in said and "warning" not in said
    sass = subprocess.run([cuobjdump, "-sass", str(made)], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(rf"\b{instruction}\.", sass)) >= 4 * 16
    assert set(re.findall(r"\bSTG\S*", sass)) == {"STG.E.128"}  # outputs go out 16 bytes at a time
