"""A project with plan files for runs of pytest within a test."""

from __future__ import annotations

from pathlib import Path

import pytest

PLAN = """
[model]
factory = "tiny:build"
batch = "tiny:batch"
loss = "tiny:loss"

[parallel]
dp_shard = 2

[run]
timeout_s = 30

[bucket]
plan = ["blocks.[0-1]", "head"]
"""
ROW = '\n[[matrix]]\nid = "keep"\nparallel.reshard_after_forward = false\n'
BROKEN = "[modle]\n"

MODEL = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x) + x)
        return self.head(x)

def build():
    return Tiny()

def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(3, 8, generator=generator),)

def loss(output, batch):
    return output.square().mean()
"""


@pytest.fixture
def user(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a module of small graphs, `graphs`, and a folder `tests`."""
    from suites.pytest_plugin.graphs_project import make_project

    return make_project(pytester)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with plans/good.toml (a matrix row `keep`), plans/broken.toml, plans/plain.toml and a tiny model."""
    plans = pytester.mkdir("plans")
    (plans / "good.toml").write_text(PLAN + ROW)
    (plans / "plain.toml").write_text(PLAN)
    (plans / "broken.toml").write_text(BROKEN)
    Path("tiny.py").write_text(MODEL)
    pytester.makeini("[pytest]\n")
    return pytester
