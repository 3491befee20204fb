"""Marked tests in modules as users have them: packages, conftest files of one name, helpers, both kinds of import mode."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.usefixtures("warm")

MARK = "import pytest\npytestmark = pytest.mark.fxbucket_ranks(2)\n"
IN_PACKAGE = (
    MARK
    + """
import dataclasses
from .near import pick

@dataclasses.dataclass
class Thing:
    number: int

@pytest.mark.parametrize("thing", [Thing(1)], ids=["one"])
def test_class_of_this_module(thing):
    assert isinstance(thing, Thing)
    assert pick([thing]).number == 1

class TestOuter:
    class TestInner:
        @staticmethod
        def test_static(fxbucket_rank):
            assert fxbucket_rank in (0, 1)

def test_fails_in_conftest(mine, fxbucket_rank):
    mine.must_be(fxbucket_rank + 5)
"""
)
CONFTEST = """
import pytest

class Mine:
    def must_be(self, number):
        assert number == {number}

@pytest.fixture
def mine():
    return Mine()
"""
BESIDE = MARK + "def test_beside(mine, fxbucket_rank):\n    mine.must_be({number})\n"
AT_ROOT = (
    MARK
    + """
import os
import sys

@pytest.fixture
def path():
    return [os.path.abspath(entry) for entry in sys.path]

def test_path_is_that_of_pytest(path):
    assert sys.path == path

def test_helper_registered_for_rewriting():
    import checks_of_ours
    checks_of_ours.same(1, 2)
"""
)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Tests in a package, in two folders with a conftest each, and at the root."""
    pytester.makeini("[pytest]\npythonpath = .\n")
    (pytester.path / "checks_of_ours.py").write_text("def same(left, right):\n    assert left == right\n")
    (pytester.path / "conftest.py").write_text(
        "import pytest\npytest.register_assert_rewrite('checks_of_ours')\nimport checks_of_ours\n"
    )
    files = {
        "package/__init__.py": "",
        "package/inner/__init__.py": "",
        "package/inner/near.py": "def pick(things):\n    return things[0]\n",
        "package/inner/conftest.py": CONFTEST.format(number=3),
        "package/inner/test_inside.py": IN_PACKAGE,
        "first/conftest.py": CONFTEST.format(number=1),
        "first/test_first.py": BESIDE.format(number=1),
        "further/conftest.py": CONFTEST.format(number=2),
        "further/test_further.py": BESIDE.format(number=2),
        "test_root.py": AT_ROOT,
    }
    for name, text in files.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return pytester


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_ranks_import_what_pytest_did_and_rewrite_its_asserts(project: pytest.Pytester, mode: str) -> None:
    result = project.runpytest_subprocess(f"--import-mode={mode}", "-p", "no:cacheprovider", "-rA")
    result.assert_outcomes(passed=5, failed=2)
    text = result.stdout.str()
    # pytest 8 itself leaves the conftest of a package as it is in this mode
    is_plain = mode == "importlib" and pytest.version_tuple < (9,)
    explained = "" if is_plain else ": assert 5 == 3"
    assert re.search(rf"raised AssertionError{explained} \(package/inner/.*test_fails_in_conftest\)", text), text
    assert re.search(r"raised AssertionError: assert 1 == 2 \(test_root.py::test_helper_registered_for_rewriting\)", text), text


def test_helpers_of_one_name_are_each_folders_own(pytester: pytest.Pytester) -> None:
    """With pytest's own import mode the folder that was collected last is first on the import path."""
    for folder in ("first", "further"):
        place = pytester.mkdir(folder)
        (place / "helper.py").write_text(f"NAME = {folder!r}\n")
        if folder == "first":
            (place / "test_first.py").write_text(MARK + "from helper import NAME\ndef test_it():\n    assert NAME == 'first'\n")
        else:
            (place / "test_further.py").write_text("def test_it():\n    pass\n")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_a_module_that_changes_between_two_tests_is_read_again(pytester: pytest.Pytester) -> None:
    (pytester.path / "changing.py").write_text("number = 0\n")
    pytester.makepyfile(
        MARK
        + """
from pathlib import Path

@pytest.fixture
def written(request):
    Path("changing.py").write_text(f"number = {request.param}\\n# " + "x" * request.param)

@pytest.mark.parametrize("written", [1, 2], indirect=True)
@pytest.mark.usefixtures("written")
def test_it():
    import changing
    assert changing.number in (1, 2)
    print("number is", changing.number)
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*[[]rank 0] number is 1", "*[[]rank 0] number is 2"])
