"""Two processes in a gloo group that run what they are sent."""

from __future__ import annotations

import datetime
import importlib.util
import multiprocessing
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# As in tests/conftest.py, which the new processes do not run: the folder of Triton's tests is not Triton.
_triton = importlib.util.find_spec("triton")
if _triton is None or _triton.origin is None:
    sys.modules["triton"] = None

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from fused_remat import _extension, ops  # noqa: E402

RANKS = 2
SECONDS = 60  # a check may take; also what a collective waits for the other rank


class Ranks:
    """Calling it runs `function(*args)` on every rank, at the same time, and returns the results by rank."""

    def __init__(self, folder: Path) -> None:
        ops.ready()
        spawn = multiprocessing.get_context("spawn")
        pipes = [spawn.Pipe() for _ in range(RANKS)]
        libraries = [str(path) for path in torch.ops.loaded_libraries], _extension.status()
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            spawn.Process(target=_serve, args=(rank, folder / "store", libraries, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = [self._answer(rank) for rank in range(RANKS)]
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(answers) if error]
        if errors:
            if len(errors) < RANKS:  # the ranks are out of step: what comes next would fail as well
                self.stop()
            pytest.fail("\n".join(errors), pytrace=False)
        return [result for result, _ in answers]

    def _answer(self, rank: int) -> tuple[Any, str]:
        try:
            if self._pipes[rank].poll(SECONDS):
                return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            self.stop()
            return None, "the process is gone"
        self.stop()
        return None, f"no answer within {SECONDS} seconds"

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(rank: int, store: Path, libraries: tuple[list[str], _extension.Status], pipe: Connection) -> None:
    paths, _extension._status = libraries
    for path in paths:
        torch.ops.load_library(path)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Functions that torch's own modules call when they are imported.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=RANKS, timeout=timeout)
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of modules of torch that the test's module imports
                function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        torch.manual_seed(0)
        try:
            answer = function(*args), ""
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
