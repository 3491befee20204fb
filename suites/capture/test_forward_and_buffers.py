"""Buffers that forward writes: what is made for them alone is forward, and what writes them again in backward is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_fxbucket.plan.load import parse_plans


class Centred(nn.Module):
    """Keeps a moving mean of what it makes, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mean = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(made.mean(0), alpha=0.1)
        out: Tensor = x + self.down(F.relu(made - self.mean))
        return out


class Normed(nn.Module):
    """BatchNorm, whose statistics nobody reads in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + F.relu(self.norm(self.up(x)))
        return out


class Distilled(nn.Module):
    """The teacher, which is frozen, runs once more for the centre alone, as DINO's does."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.centre = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        wanted = (self.teacher(x.flip(1)) - self.centre).softmax(-1)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(self.teacher(x).mean(0), alpha=0.1)
        out: Tensor = wanted * self.student(x).log_softmax(-1)
        return out


def blocks(kind: str) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *(globals()[kind]() for _ in range(2)))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


TWICE = '[step]\nmicrobatches = 2\ncheckpoint = ["1", "2"]\n'
CASES = {
    "read, and written again in backward": ("blocks", 'kind = "Centred"', '"[0-2]"', TWICE),
    "not read, and written again in backward": ("blocks", 'kind = "Normed"', '"[0-2]"', TWICE),
    "read, in two microbatches": ("blocks", 'kind = "Centred"', '"[0-2]"', "[step]\nmicrobatches = 2\n"),
    "made by a module that nobody else needs": ("Distilled", "", '"student", "teacher"', ""),
}


@pytest.mark.parametrize(("factory", "args", "entries", "step"), CASES.values(), ids=CASES.keys())
def test_what_is_forward_is_kept_to_its_promises(
    factory: str, args: str, entries: str, step: str, checked: Callable[..., Any]
) -> None:
    model = f'factory = "{__name__}:{factory}"\nargs = {{ {args} }}\nbatch = "{__name__}:batch"\nloss = "{__name__}:loss"\n'
    text = f"[model]\n{model}[parallel]\ndp_shard = 2\n[bucket]\nplan = [{entries}]\n{step}"
    (plan,) = parse_plans(text, Path("plan.toml"))
    verdict = checked(plan, "audit")
    assert verdict.outcome == "passed", verdict
