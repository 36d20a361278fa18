"""Running something that may take more memory than there is, and going on if it does."""

from __future__ import annotations

import errno
import gc
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

_TYPES = (MemoryError, torch.OutOfMemoryError)

# What libraries say that raise a plain RuntimeError; compared in lower case.
_TEXTS = (
    "out of memory",  # CUDA, HIP, MPS, XPU, and cuBLAS's and NCCL's own words
    "can't allocate memory",  # torch's allocator on the CPU
    "cannot allocate memory",  # the operating system
    "not enough memory",  # torch's allocator on the CPU, on Windows
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_insufficient_resources",
)


@dataclass(frozen=True)
class RanOut:
    """What a run that memory did not suffice for left: `error`, the type and first line of what said so."""

    error: str


def unless_out_of_memory(run: Callable[[], T], device: torch.device) -> T | RanOut:
    """What `run` returns, or, if memory ran out, that, with everything that its error held released again.

    Other errors are raised.
    """
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = RanOut(in_words(error))
        forget(error)
    clean(device)  # past the handler, where nothing refers to the error any more
    return failed


def clean(device: torch.device) -> None:
    """Releases what only cycles hold, and on a GPU what the allocator holds in reserve."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or an error that it was raised from or while handling, says that memory ran out.

    By type first, then by what it says (in any of its arguments). A context that `raise ... from None` hid is not
    looked at.
    """
    return any(_says_so(each) for each in _chain(error))


def forget(error: BaseException) -> None:
    """Let go of the tensors that the frames of `error` and of its causes hold: an error that is kept keeps them all."""
    for each in list(_chain(error, hidden=True)):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = each.__cause__ = each.__context__ = None


def in_words(error: BaseException) -> str:
    """Type and first line of `error`."""
    lines = " ".join(map(str, error.args)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _says_so(error: BaseException) -> bool:
    if isinstance(error, _TYPES) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = " ".join(map(str, error.args)).lower()
    return isinstance(error, Exception) and any(known in text for known in _TEXTS)


def _chain(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """`error`, its cause or context, the one's of that, ...; with `hidden` both of each, the suppressed ones too."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if hidden:
            waiting += [each.__cause__, each.__context__]
        else:
            waiting.append(each.__cause__ or (None if each.__suppress_context__ else each.__context__))
