"""A real repository with a small model in it, whose second rank computes more at some commits than at others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300
PLAN = """
[model]
factory = "net:build"
batch = "net:batch"
loss = "net:loss"

[parallel]
dp_shard = 2

[bucket]
plan = ["layers.[0-3]", "out"]

[run]
backend = "gloo"

[checks]
golden = false
benchmark = true
"""
MODEL = '''
"""A few linear layers, and an operator that does what extra.txt says on rank 1."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

DIM = 128
BASE = 60
EXTRA = int(Path(__file__).with_name("extra.txt").read_text())
LIBRARY = torch.library.Library("speeds", "DEF")
LIBRARY.define("work(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "work", "CPU")
def work(x):
    value = torch.full((64, 64), 0.01)
    is_slow = dist.is_initialized() and dist.get_rank() == 1
    for _ in range(BASE + EXTRA * is_slow):
        value = torch.tanh(value @ value + 0.01)
    return x.clone()


@torch.library.register_fake("speeds::work", lib=LIBRARY)
def _(x):
    return torch.empty_like(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = torch.ops.speeds.work(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.out(x)


def build():
    return Net()


def batch(rank, step):
    return (torch.randn(64, DIM, generator=torch.Generator().manual_seed(7 * step + rank)),)


def loss(output, batch):
    return output.square().mean()
'''


@dataclass(frozen=True, slots=True)
class Run:
    """What one `fxbucket compare` said."""

    status: int
    verdict: str
    """slower, faster or same; what it printed instead, if it came to none"""
    log_ratio: float = 0.0
    step_s: tuple[float, float] = (0.0, 0.0)
    """median of either side"""


class SpeedsProject:
    """The repository in `folder`; its commits are tags, `extra-0` and so on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._git("init", "-q", "-b", "main")
        for name, text in {"plan.toml": PLAN, "net.py": MODEL, "pytest.ini": "[pytest]\n"}.items():
            (folder / name).write_text(text)

    def commit(self, extra: int) -> str:
        """The name of a commit in which rank 1 does `extra` units of work more."""
        (self.folder / "extra.txt").write_text(str(extra))
        self._git("add", "-A")
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        self._git(*who, "commit", "-q", "--no-verify", "--allow-empty", "-m", f"{extra} units")
        self._git("tag", "-f", f"extra-{extra}")
        return f"extra-{extra}"

    def compare(self, old: str, new: str, budget_s: float) -> Run:
        """Run the command as a user does."""
        words = ["compare", old, new, "--plan", "plan.toml", "--budget-s", str(budget_s), "--json"]
        done = subprocess.run(
            [os.path.abspath(sys.executable), "-m", "pytest_fxbucket.cli", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        plans: list[dict[str, Any]] = json.loads(done.stdout)["plans"] if done.stdout.startswith("{") else []
        if not plans:
            return Run(done.returncode, f"no verdict: {done.stderr.strip()}")
        sides = [median(sample for one in side["samples_s"] for sample in one) for side in plans[0]["sides"]]
        return Run(done.returncode, plans[0]["verdict"], plans[0]["log_ratio"], (sides[0], sides[1]))

    def _git(self, *words: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        subprocess.run(["git", *words], cwd=self.folder, env=clean, check=True, capture_output=True)
