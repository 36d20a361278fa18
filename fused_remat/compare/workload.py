"""What a model with its data has to offer to be compared, and the optimizer settings that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Batch = Any  # of the workload's own kind: what its `loss` takes


@dataclass(frozen=True)
class MlpShape:
    """`rows` M that each MLP sees per step, model width D, `hidden` width F, whether gated, and how many MLPs."""

    rows: int
    width: int
    hidden: int
    gated: bool
    count: int

    @property
    def gemm_flop(self) -> int:
        """FLOP of one matrix product of one MLP: 2 M D F."""
        return 2 * self.rows * self.width * self.hidden


class Workload(ABC):
    """A model and its data, deterministic in `seed`: batch `i` is a function of `seed` and `i` alone."""

    name: str  # of files too
    title: str
    metric: ClassVar[str]  # what `validate` returns, with its unit
    unit: ClassVar[str] = "nats"  # of the loss
    learning_rate: ClassVar[float]
    # What is checkpointed; no class of MLPs: the model's repeated blocks, found by structure.
    mlp_class: ClassVar[type[nn.Module] | None]
    attention_class: ClassVar[type[nn.Module]] = nn.MultiheadAttention
    depth: int  # blocks, each with one attention and one MLP

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device

    @property
    @abstractmethod
    def shape(self) -> MlpShape | None:
        """The sizes of the model's MLPs; None if they are not known."""

    @abstractmethod
    def describe(self) -> str:
        """One line on the model and the data, with sizes."""

    def remarks(self) -> tuple[str, ...]:
        """What else a reader of the numbers should know, a sentence each."""
        return ("Dropout is 0, so that losses differ by rounding alone.",)

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model in training mode, its weights drawn from `seed`."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The inputs (and targets) of optimizer step `step` (from 0)."""

    @abstractmethod
    def inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model for `batch`."""

    @abstractmethod
    def loss_of(self, output: Any, batch: Batch) -> Tensor:
        """The training loss of what the model returned, a scalar in `unit`."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss, a scalar in `unit`."""
        args, kwargs = self.inputs(batch)
        return self.loss_of(model(*args, **kwargs), batch)

    @abstractmethod
    def validate(self, model: nn.Module) -> float:
        """`metric` on data that no batch contains."""

    def generator(self, stream: int) -> torch.Generator:
        """A CPU generator that is a function of `seed` and `stream`, so that no draw depends on earlier ones."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + stream)
