"""What pip installs: built from the sources as they are, tagged v1.2.3, and used as a reader of the tutorial would."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from suites.dist.build import ROOT, follow_tutorial

TAG = "1.2.3"


def call(*words: str | Path, folder: Path) -> str:
    return subprocess.run([str(word) for word in words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip makes of the sources, which are committed and tagged in a repository of their own."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    shutil.copytree(ROOT / "pytest_fxbucket", source / "pytest_fxbucket", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
    for words in (["init", "--quiet"], ["add", "."], [*who, "commit", "--quiet", "-m", "all"], ["tag", f"v{TAG}"]):
        call("git", *words, folder=source)
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, ".", folder=source)
    (found,) = made.iterdir()
    return found


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"pytest_fxbucket-{TAG}-py3-none-any.whl"
    package = ROOT / "pytest_fxbucket"
    ours = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    about = f"pytest_fxbucket-{TAG}.dist-info/"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if not name.startswith(about)} == {name for name in ours if "__pycache__" not in name}
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= {name.removeprefix(about) for name in names}
    assert "pytest_fxbucket/py.typed" in names


def test_the_tutorial_goes_with_the_wheel_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """What it needs is that of the environment that tests run in, behind its own; ``make dist`` installs that, too."""
    fresh, folder = tmp_path / "fresh", tmp_path / "empty"
    venv.create(fresh)
    folder.mkdir()
    pip = (sys.executable, "-m", "pip", "--python", fresh / "bin" / "python")
    call(*pip, "install", "--quiet", "--no-deps", wheel, f"pytest=={pytest.__version__}", folder=folder)
    (packages,) = fresh.glob("lib/python*/site-packages")
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    assert call(fresh / "bin" / "fxbucket", "--version", folder=folder) == f"pytest-fxbucket {TAG}\n"
    follow_tutorial(folder, fresh / "bin")
