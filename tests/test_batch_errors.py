"""Which errors mean that memory ran out, and that none of them keeps a tensor alive."""

from __future__ import annotations

import errno
import gc
import weakref

import pytest
import torch

from fused_remat._out_of_memory import RanOut, forget, in_words, is_out_of_memory, unless_out_of_memory

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("anything"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA out of memory. Tried to allocate", 20, "GiB"),
    RuntimeError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda e: in_words(e)[:40])
def test_an_out_of_memory_error_is_known(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [ValueError("shapes differ"), RuntimeError("a memory of old times"), OSError(errno.ENOENT, "no such file"),
     RuntimeError(), KeyboardInterrupt("out of memory")],
    ids=lambda e: in_words(e)[:40],
)  # fmt: skip
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def raised(outer, inner, *, hide=False, cause=False):
    try:
        try:
            raise inner
        except Exception as caught:
            if cause:
                raise outer from caught
            if hide:
                raise outer from None
            raise outer  # noqa: B904
    except Exception as error:
        return error


def test_causes_and_contexts_count_unless_they_were_hidden():
    assert is_out_of_memory(raised(ValueError("no"), MemoryError(), cause=True))
    assert is_out_of_memory(raised(ValueError("no"), MemoryError()))
    assert not is_out_of_memory(raised(ValueError("no"), MemoryError(), hide=True))
    assert not is_out_of_memory(raised(ValueError("no"), ValueError("neither")))


def test_an_error_that_refers_to_itself_ends():
    error = ValueError("no")
    error.__cause__ = error
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("nested", ["alone", "cause", "hidden"])
def test_a_forgotten_error_holds_no_frames(nested):
    held = []

    def fails():
        big = torch.zeros(1000)
        held.append(weakref.ref(big))
        raise MemoryError

    try:
        try:
            fails()
        except MemoryError as inner:
            if nested == "alone":
                raise
            raise RuntimeError("again") from (inner if nested == "cause" else None)
    except Exception as error:
        kept = error
    gc.collect()
    assert held[0]() is not None
    forget(kept)
    gc.collect()
    assert held[0]() is None


def test_a_run_that_ends_for_want_of_memory_leaves_words_and_nothing_else():
    held, logged = [], []

    def fails():
        big = torch.zeros(1000)
        held.append(weakref.ref(big))
        big.itself = [big]  # a cycle, as those of hooks and modules
        error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
        logged.append(error)
        raise error

    cpu = torch.device("cpu")
    assert unless_out_of_memory(fails, cpu) == RanOut("RuntimeError: DefaultCPUAllocator: can't allocate memory")
    assert held[0]() is None
    assert unless_out_of_memory(lambda: 7, cpu) == 7
    with pytest.raises(ZeroDivisionError):
        unless_out_of_memory(lambda: 1 / 0, cpu)
