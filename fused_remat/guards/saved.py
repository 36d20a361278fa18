"""What a region saves for backward, described: compared with what its replay rebuilds."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_remat.guards import _torch
from fused_remat.guards.arguments import in_words
from fused_remat.guards.checksum import can_sum, checksum
from fused_remat.guards.errors import RematMismatch
from fused_remat.guards.seen import Seen

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_CHANGE = "what a region computes must depend only on its inputs and on state that its modules hold"


class Saved:
    """The tensors that one call of a region saves.

    Torch calls `describe` for each tensor that the forward saves, and again for each that the replay rebuilt, and
    compares the two results.

    Args:
        region: in words.
        values: whether to compare values.
        seen: where to note that they were compared.
        ignored: addresses of tensors whose values are another matter.
    """

    def __init__(self, region: str, values: bool, seen: Seen, ignored: set[int]) -> None:
        self.region = region
        self.seen = seen
        self.values = values
        self.ignored = ignored
        self.count = 0  # saved by the forward
        self.in_forward = False
        self.compared = 0  # whose values were found equal
        self._writes_late, self._unread = False, _none  # of the torch function that runs, see `inside`
        self._waiting: deque[tuple[_Description, Tensor]] = deque()
        self._pending: list[tuple[_Description, _Description]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """While this is entered, what is described is what the forward saves."""
        self.in_forward = True
        try:
            yield
        finally:
            self.in_forward = False
            self._sum_waiting(leave=0)

    @contextmanager
    def inside(self, writes_late: bool, unread: Callable[[Tensor], bool] | None) -> Iterator[None]:
        """While this is entered, one function of torch runs.

        Args:
            writes_late: it changes tensors at its end that it saved before; their values are those at its end.
            unread: tells tensors that it saves and whose values backward does not depend on.
        """
        before = self._writes_late, self._unread
        self._writes_late, self._unread = writes_late, unread or _none
        try:
            yield
        finally:
            self._writes_late, self._unread = before
            if writes_late:
                self._sum_waiting(leave=0)

    def replayed(self) -> None:
        """A replay has run; unless a difference turns up, its values were compared."""
        self.seen.verified |= self.values

    def describe(self, x: Tensor) -> _Description:
        if not self.in_forward:
            return _Description(self, x, self.values)
        self.count += 1
        description = _Description(self, x, False)
        if self.values:
            if not self._writes_late:
                self._sum_waiting(leave=1)
            description.made_by = "" if x.grad_fn is None else x.grad_fn.name()
            description.source = source_line()
            if can_sum(x) and x.data_ptr() not in self.ignored and not self._unread(x):
                self._waiting.append((description, x.detach()))
        return description

    def _sum_waiting(self, leave: int) -> None:
        """An operation may save a tensor, and one more, before it has written it: the last two wait."""
        while len(self._waiting) > leave:
            description, x = self._waiting.popleft()
            description.sum(x)

    def compare_later(self, saved: _Description, rebuilt: _Description) -> None:
        """Compares on the device once backward is done: one wait instead of one for each tensor."""
        self._pending.append((saved, rebuilt))
        if len(self._pending) == 1 and not _torch.after_backward(self.compare_pending):
            self.compare_pending()

    def compare_pending(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        for (saved, _), equal in zip(pending, _equal(pending), strict=True):
            if not equal:
                raise self.other_values(saved)
        self.compared += len(pending)

    def other_values(self, saved: _Description) -> RematMismatch:
        self.seen.verified = False
        return RematMismatch(
            f"{self.region}: the replay rebuilt other values for {saved.name()} than the forward saved; {_CHANGE}"
        )

    def fewer(self) -> RematMismatch:
        return RematMismatch(
            f"{self.region}: the replay saved fewer tensors than the {self.count} of the forward; {_CHANGE}"
        )


def _none(x: Tensor) -> bool:
    return False


class _Description:
    """Form, and with `verify` a checksum, of one saved tensor."""

    __slots__ = ("checksum", "device", "index", "made_by", "of", "source", "words")

    def __init__(self, of: Saved, x: Tensor, with_sum: bool) -> None:
        self.of = of
        self.index = of.count - 1
        self.words = in_words(x)
        self.device = x.device
        self.checksum: Any = None
        self.made_by = self.source = None
        if with_sum and can_sum(x):
            self.sum(x)

    def sum(self, x: Tensor) -> None:
        """Two numbers; on a device they stay there, so that nobody waits."""
        sums = checksum(x)
        self.checksum = tuple(sums.tolist()) if _on_host(x) else sums

    def name(self) -> str:
        made = f", made by {self.made_by}" if self.made_by else ""
        return f"tensor {self.index} ({self.words}{made}{f', saved at {self.source}' if self.source else ''})"

    def __ne__(self, rebuilt: object) -> bool:
        assert isinstance(rebuilt, _Description)
        if (self.words, self.device) != (rebuilt.words, rebuilt.device):
            raise RematMismatch(
                f"{self.of.region}: the replay rebuilt {rebuilt.words} on {rebuilt.device} where the forward saved "
                f"{self.name()} on {self.device}; {_CHANGE}"
            )
        if self.checksum is None or rebuilt.checksum is None:
            return False
        if isinstance(self.checksum, Tensor):
            self.of.compare_later(self, rebuilt)
        elif self.checksum != rebuilt.checksum:
            raise self.of.other_values(self)
        else:
            self.of.compared += 1
        return False

    def __eq__(self, rebuilt: object) -> bool:
        return not self != rebuilt

    __hash__ = None


def _on_host(x: Tensor) -> bool:
    """Whether reading a number of it waits for no device."""
    return x.device.type == "cpu"


def _equal(pairs: list[tuple[_Description, _Description]]) -> list[bool]:
    """Which checksums agree; waits once for all."""
    device = pairs[0][0].checksum.device
    return torch.stack([(a.checksum == b.checksum).all().to(device) for a, b in pairs]).tolist()


def source_line() -> str | None:
    """The line of the caller's code that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE)) and not file.startswith("<"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
