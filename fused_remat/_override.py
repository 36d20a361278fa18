"""A setting that a `with` block overrides, for the thread that runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Override(threading.local):
    """`value` is None outside of every `during`.

    Not a ContextVar: torch.compile traces those from torch 2.14 on only.
    """

    value: Any = None

    @contextmanager
    def during(self, value: Any) -> Iterator[None]:
        """Have `value` hold inside the block, and what held before after it."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
