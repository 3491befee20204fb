"""A model, its batches in the forms that people have them, and losses that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Labelled(nn.Module):
    """Takes inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(x)))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Losing(Labelled):
    """Makes its own loss, if it is given labels."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(x)
        if self.gives == "losses":
            return {"first": logits.mean(), "second": logits.sum()}
        loss = None if labels is None else (logits - labels).square().mean()
        forms = {"loss": loss, "dict": {"logits": logits, "loss": loss}, "dataclass": Output(logits, loss)}
        return forms.get(self.gives, (loss, logits))


def build(gives: str = "") -> nn.Module:
    return Losing(gives) if gives else Labelled()


def pair(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    x, labels = torch.randn(2, 4, WIDTH, generator=generator)
    return x, labels


def names(rank: int, step: int) -> dict[str, Tensor]:
    x, labels = pair(rank, step)
    return {"labels": labels, "x": x}


def nested(rank: int, step: int) -> tuple[dict[str, Tensor], Tensor]:
    x, labels = pair(rank, step)
    return {"x": x}, labels


def swapped(rank: int, step: int) -> tuple[Tensor, Tensor]:
    x, labels = pair(rank, step)
    return labels, x


def inputs_alone(rank: int, step: int) -> Tensor:
    return pair(rank, step)[0]


def loss_of_labels(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().mean()


def loss_of_named_labels(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return loss_of_labels(output, targets["labels"])


def loss_of_batch(output: Tensor, batch: Any) -> Tensor:
    return loss_of_labels(output, batch["labels"] if isinstance(batch, dict) else batch[1])
