"""A small model with what a capture can get wrong: dropout, a buffer that forward writes, a group without decay, a residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan

ROOT = Path(__file__).parents[2]
Run = Callable[..., Verdict]
"""What the fixture of this name is."""
HEAD = """
[model]
factory = "suites.eager.eager_net:build"
batch = "suites.eager.eager_net:batch"
loss = "suites.eager.eager_net:loss"
[parallel]
dp_shard = 2
param_dtype = "bfloat16"
reduce_dtype = "float32"
[bucket]
plan = ["embed", "layers.[0-1]", "head"]
[run]
timeout_s = 60
"""
TEXT = (
    HEAD
    + """
[step]
microbatches = 2
clip_norm = 0.05
[optimizer]
factory = "torch.optim:AdamW"
args = { lr = 0.03125, weight_decay = 0.25 }
groups = [{ params = ["layers.0.norm", "layers.1.norm"], weight_decay = 0.0 }, {}]
"""
)


class Layer(nn.Module):
    """Norm, up, gelu, dropout, down, and around it a residual; counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Tokens (batch, sequence) int64 to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x.sin()  # nobody reads it, so no graph has it
            x = layer(x)
        return self.head(x)


def build() -> nn.Module:
    return Net()


def batch(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {"tokens": torch.randint(16, (4, 6), generator=generator)}


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), batch["tokens"].roll(-1, 1).flatten())


def plan_of(text: str = TEXT) -> Plan:
    (plan,) = parse_plans(text, Path(__file__).with_name("eager_net.toml"))
    return plan
