"""Too few GPUs, as people see it: skips with both numbers, failures where GPUs are required."""

from __future__ import annotations

import pytest

BODY = """
import pytest

@pytest.mark.fxbucket_ranks(2, backend="nccl")
def test_it():
    raise AssertionError("must not run")
"""


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_plan_item_is_skipped_by_name(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess(
        "--fxbucket-plans=plans/plain.toml", "--fxbucket-backend=nccl", "-k", "bitwise", "-rs"
    )
    result.assert_outcomes(skipped=1, deselected=5)
    result.stdout.fnmatch_lines(["SKIPPED*bitwise: nccl needs 2 GPUs, this machine has 0"])


@pytest.mark.parametrize("how", ["option", "ini"])
def test_required_gpus_make_it_a_failure(project: pytest.Pytester, how: str) -> None:
    if how == "ini":
        project.makeini("[pytest]\nfxbucket_require_gpus = true\n")
    flag = ["--fxbucket-require-gpus"] if how == "option" else []
    result = project.runpytest_subprocess("--fxbucket-plans=plans/plain.toml", "-k", "bitwise", *flag)
    result.assert_outcomes(failed=1, deselected=5)
    result.stdout.fnmatch_lines(["*nccl needs 2 GPUs, this machine has 0; --fxbucket-require-gpus makes that an error*"])


def test_a_marked_test_is_skipped_or_failed_alike(project: pytest.Pytester) -> None:
    project.makepyfile(test_marked=BODY)
    result = project.runpytest_subprocess("test_marked.py", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*nccl needs 2 GPUs, this machine has 0"])
    project.runpytest_subprocess("test_marked.py", "--fxbucket-require-gpus").assert_outcomes(failed=1)
