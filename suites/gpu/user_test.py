"""A test file as a user writes one, run by a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

BODY = """
import pytest
import torch
import torch.distributed as dist
from pytest_fxbucket.ranks import device


@pytest.mark.fxbucket_ranks({ranks}, backend="{backend}")
def test_total():
    rank = dist.get_rank()
    total = torch.full((1 << 16,), float(rank + 1), device=device())
    dist.all_reduce(total)
    assert total.eq({total}).all()
    gathered = torch.empty({ranks}, device=device())
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device=device()))
    assert gathered.tolist() == list(range({ranks}))
"""


def outcome(backend: str, ranks: int) -> tuple[bool, str]:
    """Whether the test passes on ``ranks`` ranks, and is not skipped; and what pytest printed."""
    with tempfile.TemporaryDirectory(prefix="fxbucket-gpu-") as folder:
        path = Path(folder, f"test_on_{ranks}_ranks.py")
        path.write_text(BODY.format(ranks=ranks, backend=backend, total=float(sum(range(1, ranks + 1)))), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", path.name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode == 0 and "1 passed" in done.stdout, (done.stdout + done.stderr)[-2000:]
