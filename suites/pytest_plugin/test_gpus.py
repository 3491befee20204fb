"""Too few GPUs, as people see it: skips with both numbers, failures where GPUs are required."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("warm")

BODY = """
import pytest

@pytest.mark.fxbucket_ranks(2, backend="nccl")
def test_it():
    raise AssertionError("must not run")
"""


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def run(project: pytest.Pytester, *options: str) -> pytest.RunResult:
    """A plan and a marked test in one run."""
    project.makepyfile(test_marked=BODY)
    return project.runpytest_subprocess("plans/plain.toml::bitwise", "test_marked.py", "-rs", *options)


def test_items_and_tests_are_skipped_by_name(project: pytest.Pytester) -> None:
    result = run(project, "--fxbucket-backend=nccl")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED*bitwise: nccl needs 2 GPUs, this machine has 0*",
            "SKIPPED*test_marked.py*: nccl needs 2 GPUs, this machine has 0*",
        ]
    )


def test_required_gpus_make_it_a_failure(project: pytest.Pytester) -> None:
    result = run(project, "--fxbucket-require-gpus")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*nccl needs 2 GPUs, this machine has 0*; --fxbucket-require-gpus makes that an error*"])
