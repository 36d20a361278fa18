"""The same plan on every rank of a distributed run."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import distributed


def is_shared() -> bool:
    """Whether there are other ranks to agree with."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def of_first_rank(data: Any) -> Any:
    """`data` (as JSON takes it) as rank 0 has it."""
    if not is_shared():
        return data
    held = [json.dumps(data)]
    distributed.broadcast_object_list(held, src=0)
    return json.loads(held[0])


def highest(value: int, device: torch.device) -> int:
    """The highest of all ranks' values: what has to fit, has to fit everywhere."""
    if not is_shared():
        return value
    on = device if distributed.get_backend() == "nccl" else torch.device("cpu")
    shared = torch.tensor([value], dtype=torch.int64, device=on)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return int(shared.item())


def lowest(value: int, device: torch.device) -> int:
    """The lowest of all ranks' values."""
    return -highest(-value, device)
