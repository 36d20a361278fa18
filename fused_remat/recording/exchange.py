"""Fake tensors in the place of real ones: a step that computes nothing, and the objects it stands for untouched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from fused_remat._snapshot import RandomStates, Snapshot, set_items
from fused_remat.recording import _torch
from fused_remat.recording.others import asked_for_values
from fused_remat.recording.static import device_of
from fused_remat.recording.values import Values
from fused_remat.training_step import TrainingStep, tensors_in


class Fakes:
    """Makes one fake tensor for each tensor, on `device` (None: where the tensor is; on the CPU for one on "meta")."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None):
        self.mode = mode
        self._device = device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the original is held, so that its id stays its own
        self._storages: dict[int, Tensor] = {}
        self._stay: set[int] = set()
        self.values = Values()

    def leave_on_cpu(self, tensors: Iterable[Tensor]) -> None:
        """These do not move to `device` (counters of an optimizer, which it reads)."""
        self._stay.update(map(id, tensors))

    def new(self, real: Tensor) -> Tensor:
        """A fake of a result."""
        with torch.no_grad():
            return self.mode.from_tensor(real)

    def of(self, tensor: Any) -> Any:
        """The fake of a tensor; anything else, and a tensor that is fake already, comes back as it is."""
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._made:
            fake = self._make(tensor)
            self._made[id(tensor)] = tensor, fake
            self.values.learn(fake, tensor)
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        stays = self._device is None or id(tensor) in self._stay
        if stays and tensor.device.type != "meta":
            return self.mode.from_tensor(tensor)
        device = torch.device("cpu") if self._device is None else self._device
        with self.mode, torch.no_grad():
            storage_bytes = tensor.untyped_storage().nbytes()
            key = tensor.untyped_storage()._cdata
            base = self._storages.get(key)
            if base is None:
                base = torch.empty(storage_bytes, dtype=torch.uint8, device=device)
                self._storages[key] = base
            flat = base.view(tensor.dtype) if base.numel() % tensor.element_size() == 0 else None
            made = (
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                if flat is None
                else flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made.detach(), requires_grad=tensor.requires_grad)
        return made.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def exchanged(step: TrainingStep, device: torch.device | None) -> Iterator[tuple[TrainingStep, Fakes]]:
    """The step on fake tensors, while the model and the optimizer hold them. Tied parameters stay tied.

    Afterwards every container holds what it held, every `.grad` is back, and so are the random generators. A model
    whose tensors are fake already keeps them.
    """
    roots = [vars(module) for module in step.model.modules()]
    if step.optimizer is not None:
        roots.append(vars(step.optimizer))
    snapshot = Snapshot([*roots, list(step.args), dict(step.kwargs)], values=False)
    random_states = RandomStates()
    compiled = _torch.compiled_modules(step.model)
    if compiled:
        raise RuntimeError(
            f"module {compiled[0] or 'the model'} is compiled, and its kernels take no fake tensors; record a real "
            "step (fake=False), or the model before torch.compile"
        )
    _check_device(device_of(step) if device is None else device)
    fakes = Fakes(_mode_of(snapshot.tensors), device)
    if step.optimizer is not None:
        state = tensors_in(list(step.optimizer.state.values()))
        fakes.leave_on_cpu(t for t in state if t.device.type == "cpu" and t.numel() == 1)
    snapshot.take_gradients()
    try:
        for container in snapshot.containers:
            _exchange(container, fakes)
        inputs = tree_map(fakes.of, (step.args, step.kwargs))
        with _torch.optimizers_take_fake_tensors(), asked_for_values(fakes.values):
            yield replace(step, args=inputs[0], kwargs=inputs[1]), fakes
    finally:
        snapshot.restore()
        random_states.restore()


def _check_device(device: torch.device) -> None:
    """Raises RuntimeError where torch cannot run backward on fake tensors of that device.

    It asks the device's driver; without one it raises from inside the engine, or ends the process.
    """
    if device.type not in ("cpu", "meta") and not (device.type == "cuda" and torch.cuda.is_available()):
        raise RuntimeError(
            f"device is {device}, which torch does not find here: it cannot run backward on fake {device.type} tensors "
            "without one. Predict on a machine that has one, or predict for the CPU"
        )


def _mode_of(tensors: list[Tensor]) -> FakeTensorMode:
    fake = next((tensor for tensor in tensors if isinstance(tensor, FakeTensor)), None)
    return FakeTensorMode(allow_non_fake_inputs=True) if fake is None else fake.fake_mode


def _exchange(container: dict | list, fakes: Fakes) -> None:
    def exchange(value: Any) -> Any:
        return tuple(map(exchange, value)) if type(value) is tuple else fakes.of(value)

    if isinstance(container, list):
        container[:] = [exchange(value) for value in container]
    else:
        set_items(container, {fakes.of(key): exchange(value) for key, value in container.items()})
