"""The one place that starts an op's kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    kernel[grid](*args, **meta)


# What is done with a launch: started, or handed to whoever replaced it.
launch_hook: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None] = _start


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Start `kernel` on a grid; `meta` are its constexpr arguments, num_warps and num_stages."""
    launch_hook(kernel, grid, args, meta)


@contextmanager
def replaced(hook: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Hand every launch inside the `with` block to `hook(kernel, grid, args, meta)` instead of starting it."""
    global launch_hook
    before, launch_hook = launch_hook, hook
    try:
        yield
    finally:
        launch_hook = before
