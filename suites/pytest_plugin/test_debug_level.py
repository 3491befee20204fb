"""TORCH_DISTRIBUTED_DEBUG, which people leave in their environment, changes no verdict."""

from __future__ import annotations

import pytest

PLAN = """
[model]
factory = "small:build"
batch = "small:batch"
loss = "small:loss"
[parallel]
dp_shard = 2
[bucket]
plan = ["0", "1"]
[checks]
golden = false
benchmark = { budget_s = 0.1 }
"""
MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))

def batch(rank, step):
    return (torch.full((2, 4), 1.0 + rank + step),)

def loss(output, batch):
    return output.sum()
"""


def test_every_item_passes_with_debug_detail(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    pytester.makepyfile(small=MODEL)
    marks = "".join(
        f'''
@pytest.mark.fxbucket_ranks(2, backend="{backend}")
def test_{backend}(fxbucket_mesh):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=fxbucket_mesh.get_group())
    assert tensor.tolist() == [{2.0 if backend != "fake" else 1.0}] * 3
'''
        for backend in ("gloo", "local", "fake")
    )
    pytester.makepyfile(test_marked="import pytest\nimport torch\nimport torch.distributed as dist\n" + marks)
    (pytester.path / "small.toml").write_text(PLAN)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rA", "small.toml", "test_marked.py")
    result.assert_outcomes(passed=10)
