"""TORCH_DISTRIBUTED_DEBUG, which people leave in their environment, changes no verdict."""

from __future__ import annotations

import pytest


def test_every_item_that_asks_ranks_passes_with_debug_detail(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
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
    project.makepyfile(test_marked="import pytest\nimport torch\nimport torch.distributed as dist\n" + marks)
    with (project.path / "plans" / "plain.toml").open("a") as plan:
        plan.write(
            "[checks]\naudit = false\ngolden = false\ncollectives = false\nsame = false\nbenchmark = { budget_s = 0.1 }\n"
        )
    result = project.runpytest_subprocess("-p", "no:cacheprovider", "-rA", "plans/plain.toml", "test_marked.py")
    result.assert_outcomes(passed=7)
