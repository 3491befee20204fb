"""An environment with one torch: this package in its own folder's source, and all else as constraints.txt has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = "dev,models,xdist"
_PINS = ROOT / "constraints.txt"
_ABOUT = "import json, platform, torch; print(torch.__version__, platform.python_version())"


@dataclass(frozen=True)
class Environment:
    """A virtual environment with torch ``version`` (``2.15``: the last of its patches; ``2.15.0``: that one) in ``folder``."""

    version: str
    folder: Path
    made_with: str = sys.executable
    """The Python that it is of."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Install what is not there yet. Raises CalledProcessError where pip cannot."""
        wanted = f"{self._torch}\n{EXTRAS}\n{_without_torch()}{(ROOT / 'pyproject.toml').read_text()}"
        done = self.folder / "made-from.txt"
        if done.exists() and done.read_text() == wanted:
            return
        pins = self.folder / "constraints.txt"
        if not self.python.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            subprocess.run([self.made_with, "-m", "venv", self.folder], check=True)
        pins.write_text(_without_torch())
        # Without pip's cache: each torch is some gigabytes, and is installed once.
        pip = [self.python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--constraint", pins]
        subprocess.run([*pip, self._torch, "--editable", f"{ROOT}[{EXTRAS}]"], check=True)
        done.write_text(wanted)

    def versions(self) -> tuple[str, str]:
        """Of torch (``2.13.0+cpu``) and of Python that are in it."""
        told = subprocess.run([self.python, "-c", _ABOUT], check=True, capture_output=True, text=True).stdout.split()
        return told[0], told[1]

    def variables(self) -> Mapping[str, str]:
        """What its processes run with: the source of this folder, whoever made the environment; commands of its own first."""
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")])
        return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}

    @property
    def _torch(self) -> str:
        return f"torch=={self.version}" + ("" if self.version.count(".") > 1 else ".*")


def _without_torch() -> str:
    return "".join(line for line in _PINS.read_text().splitlines(keepends=True) if not line.startswith("torch=="))
