"""How far a long call has come, told to whoever passed `progress=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OnProgress = Callable[[str, int, int], None]  # (what runs now, pieces of work done, pieces of work in all)


def check_progress(progress: Any) -> None:
    """Raises TypeError unless it is a function or None."""
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress must be a function of (text, done, total) or None, got {type(progress).__name__}; e.g. "
            "lambda text, done, total: print(f'{done}/{total} {text}')"
        )


class Progress:
    """Counts pieces of work and calls `tell(text, done, total)` before each, and with done = total at the end.

    `total` grows where there turns out to be more to do than was expected, and `done` never falls.
    """

    def __init__(self, tell: OnProgress | None, expected: int = 0):
        self._tell, self.done, self.total = tell, 0, expected

    def expect(self, more: int) -> None:
        """`more` pieces beyond those that are done will come."""
        self.total = max(self.total, self.done + more)

    @contextmanager
    def piece(self, text: str) -> Iterator[None]:
        """One piece of work, which is what happens inside."""
        self.total = max(self.total, self.done + 1)
        self._say(text)
        yield
        self.done += 1

    def finish(self) -> None:
        """There is nothing more to do, though more may have been expected."""
        self.total = self.done
        self._say("done")

    def _say(self, text: str) -> None:
        if self._tell is not None:
            self._tell(text, self.done, self.total)
