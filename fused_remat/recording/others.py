"""Libraries that look at whether a tensor is fake, and take other paths for those."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from fused_remat.recording.values import Values


@contextmanager
def asked_for_values(values: Values) -> Iterator[None]:
    """transformers takes fake tensors for tracing, and then makes masks that it leaves out otherwise. Here it may ask
    for the values that are known."""
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        yield
        return

    def is_fake_tensor(x: Any) -> bool:
        return isinstance(x, FakeTensor) and not values.knows(x)

    module.is_fake_tensor = is_fake_tensor
    try:
        yield
    finally:
        module.is_fake_tensor = original
