"""Tests marked `fxbucket_ranks`, as a user writes them: one run of pytest, and what it says of each."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

HELPER = """
def three():
    return 3
"""

TESTS = """
import os
import sys
import unittest
import pytest
import torch
import torch.distributed as dist
from helper import three

pytestmark = pytest.mark.fxbucket_ranks(4)

@pytest.fixture
def doubled(size):
    return torch.ones(size) * 2

@pytest.fixture
def closure():
    return lambda: 1

@pytest.mark.parametrize("size", [1, 5], ids=["one", "five"])
def test_sum(size, doubled, fxbucket_rank):
    tensor = doubled * fxbucket_rank
    dist.all_reduce(tensor)
    assert tensor.tolist() == [12.0] * size

def test_folder(tmp_path, fxbucket_rank):
    assert tmp_path.name == f"rank{fxbucket_rank}"
    (tmp_path / "file").write_text("x")
    assert len(list(tmp_path.iterdir())) == 1

def test_list(fxbucket_rank):
    print("hello from", fxbucket_rank)
    print("to stderr", file=sys.stderr)
    assert [1, 2, fxbucket_rank] == [1, 2, 0]

def test_call():
    assert three() == 4

def test_dict(fxbucket_rank):
    assert {"a": 1, "b": fxbucket_rank} == {"a": 1, "b": 0}

@pytest.mark.fxbucket_ranks(4, mesh={"dp_replicate": 2, "dp_shard": 2})
def test_two_dimensions(fxbucket_mesh):
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=fxbucket_mesh.get_group("dp_shard"))
    assert (fxbucket_mesh.mesh_dim_names, tensor.item()) == (("dp_replicate", "dp_shard"), 2)

@pytest.mark.fxbucket_ranks(2)
def test_one_dimension(fxbucket_mesh):
    assert (fxbucket_mesh.mesh_dim_names, fxbucket_mesh.size()) == (("dp_shard",), 2)

def test_skip():
    pytest.skip("no reason")

def test_skip_on_one(fxbucket_rank):
    if fxbucket_rank == 1:
        pytest.skip("only here")

@pytest.mark.xfail(reason="known")
def test_expected():
    assert three() == 4

def test_xfail_inside():
    pytest.xfail("later")

def test_fail_inside():
    pytest.fail("on purpose")

def test_leave():
    sys.exit(3)

def test_vanish(fxbucket_rank):
    dist.barrier()
    if fxbucket_rank == 3:
        os._exit(4)
    dist.barrier()

def test_capsys(capsys):
    pass

def test_closure(closure):
    pass

class TestMethods:
    def setup_method(self):
        self.given = 5

    def test_method(self, fxbucket_rank):
        assert self.given == 5
        with pytest.raises(ValueError, match="rank"):
            raise ValueError(f"rank {fxbucket_rank}")

class TestUnit(unittest.TestCase):
    def test_unit(self):
        pass

async def test_async():
    pass

@pytest.mark.fxbucket_ranks(4, bakend="gloo")
def test_unknown_argument():
    pass

@pytest.mark.fxbucket_ranks(3, mesh={"a": 2})
def test_mesh_of_another_size():
    pass

@pytest.mark.fxbucket_ranks("4")
def test_world_in_words():
    pass

@pytest.mark.fxbucket_ranks(4, backend="glow")
def test_unknown_backend():
    pass

@pytest.mark.fxbucket_ranks(4, timeout_s=1e7)
def test_too_long():
    pass
"""
UNMARKED = """
def test_rank_without_ranks(fxbucket_rank):
    pass

def test_plain():
    pass
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Outcome of each test by name, and all that pytest printed."""
    folder = tmp_path_factory.mktemp("marked")
    (folder / "helper.py").write_text(HELPER)
    (folder / "test_theirs.py").write_text(TESTS)
    (folder / "test_unmarked.py").write_text(UNMARKED)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "--junitxml=junit.xml", "-rs"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    outcomes = {}
    for case in ElementTree.parse(folder / "junit.xml").getroot().iter("testcase"):
        found = {child.tag: child.get("message") or "" for child in case if child.tag in ("failure", "error", "skipped")}
        text = "\n".join(child.text or "" for child in case if child.tag in ("failure", "error"))
        outcomes[case.get("name")] = (*(next(iter(found.items())) if found else ("passed", "")), text)
    return outcomes, done.stdout


PASSED = [
    "test_sum[one]",
    "test_sum[five]",
    "test_folder",
    "test_two_dimensions",
    "test_one_dimension",
    "test_method",
    "test_plain",
]


@pytest.mark.parametrize("name", PASSED)
def test_a_body_that_holds_on_every_rank_passes(told, name):
    assert told[0][name][0] == "passed", told[0][name]


FAILED = {
    "test_list": [
        r"rank \d of 4 raised AssertionError: assert \[1, 2, \d\] == \[1, 2, 0\]",
        r"At index 2 diff: \d != 0",
        r"rank 0  returned",
    ],
    "test_call": [r"assert 3 == 4\n \+  where 3 = three\(\)"],
    "test_dict": [r"Differing items:", r"\{'b': \d\} != \{'b': 0\}"],
    "test_skip_on_one": [r"the ranks disagree: rank 0 passed, rank 1 skipped \(only here\), rank 2 passed, rank 3 passed"],
    "test_fail_inside": [r"raised Failed: on purpose"],
    "test_leave": [r"raised SystemExit: 3"],
    "test_vanish": [
        r"rank 3 of 4 exited with status 4",
        r"rank 0  (lost the connection to a peer|is still waiting) +waits for barrier, number [12]",
    ],
    "test_capsys": [r"the fixture capsys works in pytest's own process only, not on ranks; what ranks print is shown by rank"],
    "test_closure": [r"the value of closure cannot be sent to the ranks \(.*\); make it in the body"],
    "test_unit": [r"only test functions and methods of plain classes run on ranks"],
    "test_async": [r"an async test does not run on ranks; let a plain function call asyncio.run"],
    "test_unknown_argument": [r"got \(4, bakend='gloo'\): got an unexpected keyword argument 'bakend'"],
    "test_mesh_of_another_size": [r"mesh is \{'a': 2\}; expected a size for each dimension by name, 3 ranks in all"],
    "test_world_in_words": [r"world is '4'; expected a number of ranks, 1 or more"],
    "test_too_long": [r"timeout_s is 10000000.0; expected seconds, more than 0 and at most 1000000"],
    "test_unknown_backend": [r"'glow' is no backend; expected one of auto, gloo, "],
    "test_rank_without_ranks": [
        r"fxbucket_rank is for tests that run on ranks; mark this one with @pytest.mark.fxbucket_ranks"
    ],
}


@pytest.mark.parametrize("name", FAILED)
def test_one_that_does_not_fails_and_says_why(told, name):
    kind, _, text = told[0][name]
    assert kind in ("failure", "error")
    for pattern in FAILED[name]:
        assert re.search(pattern, text), text
    assert "pytest_fxbucket" not in text.partition("--- the ranks")[0]


def test_no_test_is_left_over(told):
    assert set(told[0]) == {*PASSED, *FAILED, "test_skip", "test_expected", "test_xfail_inside"}


def test_skips_and_expected_failures_are_those_of_the_ranks(told):
    outcomes, text = told
    assert outcomes["test_skip"][:2] == ("skipped", "no reason")
    assert outcomes["test_expected"][:2] == ("skipped", "known")
    assert outcomes["test_xfail_inside"][:2] == ("skipped", "later")
    assert "SKIPPED [1] test_theirs.py:" in text


def test_output_is_shown_by_rank(told):
    text = told[1]
    for rank in range(4):
        part = text.partition(f"Captured stdout rank {rank} call")[2].partition("Captured stdout")[0]
        assert f"hello from {rank}" in part
        assert "to stderr" in part
        assert f"hello from {(rank + 1) % 4}" not in part


def test_with_s_lines_carry_the_rank(pytester):
    pytester.makepyfile(
        "import pytest\n@pytest.mark.fxbucket_ranks(2)\ndef test_it(fxbucket_rank):\n    print('I am', fxbucket_rank)\n"
    )
    result = pytester.runpytest_subprocess("-s", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*[[]rank 0] I am 0", "[[]rank 1] I am 1"])
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_every_import_mode_finds_the_module_again(pytester, mode):
    folder = pytester.mkdir("inside")
    (folder / "test_module.py").write_text(
        "import pytest\n@pytest.mark.fxbucket_ranks(2)\ndef test_it(fxbucket_rank):\n    assert fxbucket_rank < 1, 'said'\n"
    )
    result = pytester.runpytest_subprocess(f"--import-mode={mode}", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*rank 1 of 2 raised AssertionError: said*", "*assert 1 < 1*"])
    result.assert_outcomes(failed=1)


def test_workers_of_xdist_have_ranks_of_their_own(pytester):
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(6))\n@pytest.mark.fxbucket_ranks(2)\ndef test_it(n, fxbucket_mesh):\n"
        "    assert fxbucket_mesh.size() == 2\n"
    )
    pytester.runpytest_subprocess("-n", "2", "-p", "no:cacheprovider").assert_outcomes(passed=6)
