"""Which backend runs a call on a GPU, asked without one: what is loaded and compiled for what is made up."""

from __future__ import annotations

from dataclasses import replace

import mlp_cases as cases
import pytest
import torch

import fused_remat
from fused_remat import _cuda, _extension, _triton, dispatch
from fused_remat.dispatch import Call
from fused_remat.ops.triton import IMPLEMENTERS

pytestmark = pytest.mark.skipif(cases.needs_extension is not None, reason=str(cases.needs_extension))

BF16 = torch.bfloat16
MLP = Call("mlp", "cuda", BF16, "gelu", arch=90, features=(1024, 1024, 4096))
WIDE = replace(MLP, features=(4096, 4096, 16384))
GELU_TANH = {"activation": "gelu_tanh"}


class Library:
    """What the CUDA library would say of itself."""

    def __init__(self) -> None:
        self.targets, self.missing, self.reason, self.there, self.built = "8.0;9.0a+PTX", [], None, True, 0
        self.gemms = ("sm80", "sm90a")

    def load_cuda(self, *, build: bool = True) -> str | None:
        if build and not self.there and self.reason is None:
            self.built += 1
            self.there = True
        return None if self.there else self.reason or "it has not been compiled"


@pytest.fixture
def library(monkeypatch) -> Library:
    """A GPU whose CUDA library is there and whole."""
    library = Library()
    monkeypatch.setattr(_extension, "load_cuda", library.load_cuda)
    monkeypatch.setattr(_cuda, "_targets", lambda: library.targets)
    monkeypatch.setattr(_cuda, "_missing", lambda op, key: library.missing)
    monkeypatch.setattr(_cuda, "_gemm_kinds", lambda: library.gemms)
    return library


@pytest.fixture
def triton(monkeypatch) -> list[str]:
    """What speaks against Triton: nothing, until a reason is put in."""
    reasons: list[str] = []
    monkeypatch.setattr(_triton, "why_not", lambda device, dtype, arch: tuple(reasons))
    return reasons


PREFERRED = {
    "triton by default": (MLP, "triton"),
    "wide": (replace(MLP, features=(2048, 16, 16)), "cuda"),
    "wide out": (replace(MLP, features=(16, 2048, 16)), "cuda"),
    "almost wide": (replace(MLP, features=(2040, 2040, 8192)), "triton"),
    "wide, before any CUTLASS": (replace(WIDE, arch=75), "triton"),
    "wide, no CUTLASS for it": (replace(WIDE, arch=100), "triton"),
    "wide, gated, no CUTLASS for it": (replace(WIDE, **GELU_TANH, arch=100, against_library="gated"), "triton"),
    "wide, cuBLASLt's epilogues": (replace(WIDE, **GELU_TANH, arch=100), "cuda"),
    "wide, fp16, cuBLASLt's epilogues": (replace(WIDE, **GELU_TANH, arch=100, dtype=torch.float16), "cuda"),
    "wide, cuBLASLt's epilogues, odd D": (replace(WIDE, **GELU_TANH, arch=100, features=(4095, 4096, 64)), "triton"),
    "wide, odd F": (replace(WIDE, features=(4096, 4096, 14335)), "triton"),
    "wide, odd D": (replace(WIDE, features=(4095, 4096, 14336)), "cuda"),
    "wide, odd D_out": (replace(WIDE, features=(4096, 4095, 14336)), "triton"),
    "wide, transposed w_down": (replace(WIDE, against_gemm="rows of dy or w_down are not dense"), "triton"),
    "wide, transposed w_down, gelu_tanh": (replace(WIDE, **GELU_TANH, against_gemm="not dense"), "cuda"),
    "wide, behind a norm": (replace(WIDE, against_one_kernel="a norm is folded in"), "cuda"),
    "narrow": (replace(MLP, features=(128, 128, 512)), "cuda"),
    "narrow, many features": (replace(MLP, features=(128, 128, 513)), "triton"),
    "almost narrow": (replace(MLP, features=(128, 129, 512)), "triton"),
    "narrow, behind a norm": (replace(MLP, features=(64, 64, 256), against_one_kernel="a norm is folded in"), "triton"),
    "fp16, narrow": (replace(MLP, features=(16, 16, 16), dtype=torch.float16), "cuda"),
    "float64": (replace(MLP, dtype=torch.float64), "cuda"),
    "float64, no CUTLASS for it": (replace(WIDE, dtype=torch.float64, arch=100), "cuda"),
    "float32": (replace(MLP, dtype=torch.float32), "cuda"),
    "attention": (Call("attention", "cuda", BF16, arch=90, width=64), "triton"),
    "attention in float32": (Call("attention", "cuda", torch.float32, arch=90, width=64), "triton"),
    "block": (Call("multi_head_attention", "cuda", BF16, arch=90, width=64), "triton"),
}


@pytest.mark.parametrize("name", PREFERRED)
def test_preferences_on_a_gpu(name, library, triton):
    call, expected = PREFERRED[name]
    library.targets = "8.0+PTX;9.0a"
    assert dispatch.resolve(call) == expected
    assert library.built == 0


@pytest.mark.parametrize(("d", "hidden", "narrow"), ((128, 512, True), (129, 512, False), (128, 513, False)))
def test_narrow_is_what_one_kernel_takes(d, hidden, narrow):
    assert ((d <= _cuda.NARROW) and (hidden <= _cuda.FEW_FEATURES)) == narrow
    against = torch.ops.fused_remat.mlp_small_why_not(64, d, d, hidden, BF16, [BF16] * 3, False, False, False)
    assert (against == []) == narrow


@pytest.mark.parametrize(
    ("gemms", "arch", "runs"),
    (
        ((), 80, "triton"),
        ((), 90, "triton"),
        (("sm80",), 86, "cuda"),
        (("sm80",), 89, "cuda"),
        (("sm80",), 90, "triton"),
        (("sm90a",), 90, "cuda"),
        (("sm90a",), 86, "triton"),
        (("sm80", "sm90a"), 103, "triton"),
        (("sm80", "sm90a"), 120, "triton"),
    ),
)
def test_wide_mlps_run_where_a_gemm_with_their_epilogue_was_compiled(gemms, arch, runs, library, triton):
    library.targets, library.gemms = "8.0+PTX;9.0a", gemms
    assert dispatch.resolve(replace(WIDE, arch=arch)) == runs
    triton.append("no")
    assert dispatch.resolve(replace(WIDE, arch=arch)) == "cuda"  # by products and an elementwise kernel


def test_sums_in_float16_keep_the_librarys_epilogues_out(library, triton):
    library.targets = "8.0+PTX"
    call, matmul = replace(WIDE, **GELU_TANH, dtype=torch.float16, arch=100), torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    try:
        for wanted, runs in ((True, "triton"), (False, "cuda")):
            matmul.allow_fp16_accumulation = wanted
            assert dispatch.resolve(call) == runs
    finally:
        matmul.allow_fp16_accumulation = before


def test_float32_with_tf32_has_tensor_cores_on_both(library, triton, monkeypatch):
    monkeypatch.setattr(_triton, "allows_tf32", lambda: True)
    assert dispatch.resolve(replace(MLP, dtype=torch.float32)) == "triton"
    assert dispatch.resolve(replace(WIDE, dtype=torch.float32)) == "triton"
    assert dispatch.resolve(replace(WIDE, **GELU_TANH, dtype=torch.float32)) == "cuda"
    assert dispatch.resolve(replace(MLP, dtype=torch.float64)) == "cuda"


@pytest.mark.parametrize("call", (MLP, WIDE), ids=("other", "wide"))
def test_kernels_are_compiled_only_where_triton_cannot_run(call, library, triton):
    library.there = False
    assert dispatch.resolve(call) == "triton" and library.built == 0
    triton.append("Triton is not installed")
    assert dispatch.resolve(call) == "cuda" and library.built == 1
    assert dispatch.resolve(call) == "cuda" and library.built == 1


def test_kernels_are_compiled_where_they_are_named(library, triton):
    library.there = False
    assert dispatch.why_not("cuda", MLP) == ["the CUDA C++ kernels are not available: it has not been compiled"]
    with fused_remat.backend("cuda"):
        assert dispatch.resolve(MLP) == "cuda" and library.built == 1


@pytest.mark.parametrize("named", (False, True))
def test_nothing_is_compiled_for_a_gpu_that_is_not_there(named, library, triton):
    """Tensors may claim to be on one, for tracing; or the call may be one for the reference path."""
    library.there = False
    triton.append("no")
    absent = replace(MLP, arch=None)
    if named:
        with fused_remat.backend("cuda"), pytest.raises(RuntimeError, match="it has not been compiled"):
            dispatch.resolve(absent)
    else:
        assert dispatch.resolve(absent) == "aten"
        assert dispatch.resolve(replace(MLP, dtype=torch.complex64)) == "reference"
    assert library.built == 0


def test_a_build_that_fails_leaves_the_others(library, triton):
    library.there, library.reason = False, "nvcc is missing"
    assert dispatch.resolve(WIDE) == "triton"
    triton.append("no")
    assert dispatch.resolve(MLP) == "aten"
    with fused_remat.backend("cuda"), pytest.raises(RuntimeError, match="not available: nvcc is missing"):
        dispatch.resolve(MLP)


@pytest.mark.parametrize(
    ("targets", "runs", "not_on"),
    (
        ("8.0", (80, 86, 89), (75, 90, 100)),
        ("8.6", (86, 89), (80,)),
        ("9.0a", (90,), (80, 100, 120)),
        ("8.0;9.0a", (80, 86, 90), (100, 120)),
        ("8.0;9.0a;10.0a+PTX", (80, 90, 100, 103, 120), (75,)),
    ),
)
def test_architectures(targets, runs, not_on, library, triton):
    library.targets = targets
    for arch in runs:
        assert dispatch.why_not("cuda", replace(MLP, arch=arch)) == []
    for arch in not_on:
        (reason,) = dispatch.why_not("cuda", replace(MLP, arch=arch))
        assert f"compiled for {targets}, the GPU has compute capability {arch / 10}" in reason
        assert dispatch.resolve(replace(MLP, arch=arch, features=(4096, 4096, 16384))) == "triton"


def test_a_library_that_lacks_kernels_is_refused_by_their_names(library, triton):
    library.missing = ["attention_bwd", "attention_weights"]
    call = Call("multi_head_attention", "cuda", BF16, arch=90, width=64)
    assert dispatch.why_not("cuda", call) == ["the loaded CUDA C++ kernels lack attention_bwd, attention_weights"]


def test_every_kernel_that_a_call_may_run_has_a_schema():
    named = {name for kernels in _cuda.KERNELS.values() for name in kernels}
    assert named == set(IMPLEMENTERS)
    assert all(torch._C._dispatch_has_kernel(f"fused_remat::{name}_cuda") for name in named)


def test_other_devices_and_compiled_reasons(library, triton):
    assert "the tensors are on xpu" in dispatch.why_not("cuda", replace(MLP, device="xpu"))[0]
    assert "complex64 is not one of" in dispatch.why_not("cuda", replace(MLP, dtype=torch.complex64))[0]
    assert dispatch.resolve(replace(MLP, device="cpu")) == "cpp"


def call_of(monkeypatch, **arguments) -> Call:
    seen = []
    monkeypatch.setattr(dispatch, "resolve", lambda call: seen.append(call) or "reference")
    fused_remat.mlp(**arguments)
    return seen[0]


def test_the_call_of_an_mlp_tells_its_widths(monkeypatch):
    call = call_of(monkeypatch, **cases.operands(4, 8, 16, 6))
    assert call.features == (8, 6, 16)
    assert (call.against_one_kernel, call.against_library, call.against_gemm) == (None, None, None)


NOT_DENSE, NO_ROWS = "rows of dy or w_down are not dense", "rows of an input do not start at 16 bytes"
GATED, KEPT, ADAPTED = "the layer is gated", "pre-activations are kept", "a weight has an adapter"


def adapter(rank: int, width: int, out: int) -> fused_remat.LowRank:
    return fused_remat.LowRank(torch.zeros(rank, width), torch.zeros(out, rank))


@pytest.mark.parametrize(
    ("made", "given", "against"),
    (
        ({"gated": True}, {}, (None, GATED, None)),
        ({}, {"dropout_p": 0.1}, (None, "hidden values are dropped", None)),
        ({}, {"dropout_p": 0.1, "training": False}, (None, None, None)),
        ({}, {"keep": ("up",)}, (KEPT, KEPT, None)),
        ({}, {"keep": 0.5}, (KEPT, KEPT, None)),
        ({}, {"norm": fused_remat.Norm("rms_norm")}, ("a norm is folded in", None, None)),
        ({}, {"up_adapter": adapter(2, 8, 16)}, (ADAPTED, None, None)),
        ({}, {"down_adapter": adapter(8, 16, 8)}, (ADAPTED, None, None)),
        ({}, {"down_adapter": adapter(2, 16, 8)}, (ADAPTED, None, "the output width is no multiple of 8")),
        ({}, {"w_down": torch.zeros(16, 8).t()}, (None, None, NOT_DENSE)),
        ({}, {"w_down": torch.zeros(8, 20)[:, :16]}, (None, None, NO_ROWS)),
        ({}, {"w_down": torch.zeros(16, 8).t(), "down_adapter": adapter(8, 16, 8)}, (ADAPTED, None, None)),
    ),
)
def test_the_call_of_an_mlp_tells_what_speaks_against_kernels(made, given, against, monkeypatch):
    operands = cases.operands(4, 8, 16, dtype=torch.float32, requires_grad=False, **made)
    call = call_of(monkeypatch, **operands | given)
    assert (call.against_one_kernel, call.against_library, call.against_gemm) == against


def test_under_autocast_weights_are_copied_and_biases_are_not(monkeypatch):
    operands = cases.operands(4, 8, 16, dtype=torch.float32, requires_grad=False)
    operands["w_down"] = torch.zeros(16, 8).t()
    with torch.autocast("cpu", torch.bfloat16):
        call = call_of(monkeypatch, **operands)
    assert (call.against_library, call.against_gemm) == ("the operands have different dtypes", None)
