"""Bytes that are there before a step begins."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fused_remat.training_step import TrainingStep, tensors_in

STATIC_KINDS = ("parameters", "buffers", "optimizer", "inputs", "gradients")


def device_of(step: TrainingStep) -> torch.device:
    """Where the first trainable parameter is."""
    return next(p.device for p in step.model.parameters() if p.requires_grad)


def static_storages(step: TrainingStep, device: torch.device) -> dict[int, tuple[str, int]]:
    """By address: kind and bytes of each distinct storage on `device`; the first kind that it belongs to counts."""
    state = () if step.optimizer is None else tensors_in(step.optimizer.state)
    found: dict[int, tuple[str, int]] = {}
    for kind, tensors in (
        ("parameters", step.model.parameters()),
        ("buffers", step.model.buffers()),
        ("optimizer", state),
        ("inputs", step.inputs()),
    ):
        for address, nbytes in _storages(tensors, device):
            found.setdefault(address, (kind, nbytes))
    return found


def static_bytes(storages: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by kind, for all `STATIC_KINDS`."""
    total = dict.fromkeys(STATIC_KINDS, 0)
    for kind, nbytes in storages:
        total[kind] += nbytes
    return total


def _storages(tensors: Iterable[Tensor], device: torch.device) -> Iterable[tuple[int, int]]:
    for tensor in tensors:
        if tensor.device == device and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            yield address_of(storage), storage.nbytes()


def address_of(storage: torch.UntypedStorage) -> int:
    """Where a storage begins; a number of its own where it has no memory."""
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()
