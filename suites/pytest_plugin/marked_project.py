"""Tests marked `fxbucket_ranks`, as a user writes them: what their bodies do, and what they keep of pytest's manner."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

from suites.warm.runs import WarmRuns

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

def hidden(function):
    def inner():
        return function()
    return inner

@pytest.mark.fxbucket_ranks(4)
@hidden
async def test_hidden_async():
    assert False

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
MARK = "import pytest\npytestmark = pytest.mark.fxbucket_ranks(2)\n"
MANNER = (
    MARK
    + """
import threading
import unittest
import warnings

@pytest.fixture
def early(fxbucket_rank):
    return "zero" if fxbucket_rank == 0 else "other"

@pytest.mark.xfail(raises=ArithmeticError, reason="divides")
def test_expected_error():
    1 / 0

@pytest.mark.xfail(raises=ArithmeticError)
def test_another_error_than_expected():
    assert 0

@pytest.mark.xfail(raises=pytest.RaisesExc(ArithmeticError, match="by zero"), reason="says so")
def test_expected_text():
    1 / 0

@pytest.mark.xfail(raises=pytest.RaisesExc(ArithmeticError, match="overflow"))
def test_another_text_than_expected():
    1 / 0

@pytest.mark.xfail(raises=pytest.RaisesExc(ValueError, match="second line$"), reason="both lines")
def test_expected_lines():
    raise ValueError("first line\\nsecond line")

@pytest.mark.xfail(raises=pytest.RaisesExc(ValueError, match="first line$"))
def test_not_the_first_line_alone():
    raise ValueError("first line\\nsecond line")

@pytest.mark.xfail(raises=pytest.fail.Exception, reason="is meant")
def test_expected_fail():
    pytest.fail("on purpose")

@pytest.mark.xfail(raises=pytest.fail.Exception)
def test_no_fail():
    assert 0

class Mine:
    class KeyError(Exception):
        pass

@pytest.mark.xfail(raises=KeyError)
def test_another_error_of_the_same_name():
    raise Mine.KeyError("mine")

@pytest.mark.xfail(raises=Mine.KeyError, reason="is mine")
def test_error_of_its_own():
    raise Mine.KeyError("mine")

@pytest.mark.xfail(raises=KeyError)
def test_another_error_on_another_rank(fxbucket_rank):
    if fxbucket_rank == 0:
        raise KeyError("expected")
    assert fxbucket_rank == 0, "not expected"

class TestOfItsOwn:
    @pytest.fixture(autouse=True)
    def kept(self, fxbucket_rank):
        self.rank = fxbucket_rank

    @pytest.fixture
    def pair(self, fxbucket_rank):
        return {"ranks": [fxbucket_rank]}

    def test_rank_that_is_handed_on(self, pair):
        assert self.rank in (0, 1)
        assert pair == {"ranks": [self.rank]}

def test_skipped_as_unittest_does():
    raise unittest.SkipTest("no disk")

@pytest.mark.xfail(strict=True)
def test_strict():
    pass

def test_warning_of_the_ini():
    warnings.warn("of the ini")

@pytest.mark.filterwarnings("error:marked")
def test_warning_of_the_mark():
    warnings.warn("marked", FutureWarning)

@pytest.mark.filterwarnings("error:a test gives None")
def test_that_returns():
    return 1 == 2

@pytest.mark.filterwarnings("error:Exception in thread")
def test_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_raised_as_it_goes():
    class Held:
        def __del__(self):
            raise ValueError("held")
    Held()

@pytest.mark.filterwarnings("ignore:of the ini")
def test_ignored_warning():
    warnings.warn("of the ini")

def test_rank_in_a_fixture(early):
    pass

@pytest.fixture
def power(fxbucket_rank):
    return 2 ** fxbucket_rank

def test_rank_in_a_fixtures_power(power):
    pass

@pytest.mark.skip(reason="not today")
async def test_skipped_before_refused():
    pass

def test_breakpoint():
    breakpoint()
    assert False

def test_long_lists():
    print("printed", flush=True)
    assert list(range(100)) == list(range(99)) + [0]

def test_passes_and_prints():
    print("heard", flush=True)

@pytest.mark.fxbucket_ranks(2, backend="nccl")
def test_on_gpus():
    pass
"""
)
INI = "[pytest]\nmarkers =\nfilterwarnings = error:of the ini\njunit_logging = all\n"
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")} | {
    "CUDA_VISIBLE_DEVICES": ""
}


def run(runs: WarmRuns, folder: Path) -> tuple[dict[str, tuple[str, str, str]], str]:
    """Run all of them once; all that was printed, and of each test by name its outcome, what is said of it (the message, and
    behind a form feed the traceback), and captured output."""
    files = {"helper.py": HELPER, "test_theirs.py": TESTS, "test_unmarked.py": UNMARKED, "test_manner.py": MANNER}
    for name, text in {**files, "pytest.ini": INI}.items():
        (folder / name).write_text(text)
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "--junitxml=junit.xml", "-rs"]
    done = runs.run(words, folder, ENVIRON)
    found = {}
    for case in ElementTree.parse(folder / "junit.xml").getroot().iter("testcase"):
        parts = {child.tag: f"{child.get('message', '')}\f{child.text or ''}" for child in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in parts), "passed")
        found[case.get("name", "")] = (outcome, parts.get(outcome, ""), parts.get("system-out", ""))
    return found, done.stdout
