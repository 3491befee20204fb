"""What a failure leaves to look at: both graphs, the pass's report, each rank's log."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.capture.roles import Phase, StepGraph
    from pytest_fxbucket.world import Passed


class Folder:
    """The folder of one check of one plan; made when first written to.

    Several processes may have the same folder. All but one are given the name of their own log (without .log): the one thing
    there that they write and remove.
    """

    def __init__(self, root: Path, plan: str, check: str, log_of: str | None = None) -> None:
        self._root, self._log_of = root, log_of
        self.path = root / re.sub(r"[^A-Za-z0-9_.-]+", "-", plan).strip("-.") / check

    def make(self) -> Path:
        """Create the folder, empty; its root is kept out of git."""
        self.clear()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        ignore = self._root / ".gitignore"
        if self._log_of is None and not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        return self.path

    def clear(self) -> None:
        """Remove the folder of an earlier run."""
        if self._log_of is None:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        with contextlib.suppress(OSError):  # it may not be there, or the others' files may
            (self.path / f"{self._log_of}.log").unlink(missing_ok=True)
            self.path.rmdir()

    def write_graphs(self, step: StepGraph, passed: Mapping[int, Mapping[Phase, Passed]]) -> None:
        """Write the unbucketed graphs, the bucketed graphs by rank, and the pass's report."""
        if self._log_of is not None:
            return
        if not self.path.exists():
            self.make()
        for phase, graph_module in step.graphs.items():
            self.write(f"{phase}.unbucketed.txt", str(graph_module.graph))
        for rank, graphs in passed.items():
            for phase, one in graphs.items():
                self.write(f"{phase}.bucketed.rank{rank}.txt", str(one.bucketed.graph))
                if one.bucketed.report is not None:
                    report = json.dumps(one.bucketed.report.to_dict(), indent=2)
                    self.write(f"{phase}.report.rank{rank}.json", report)

    def file(self, name: str) -> Path | None:
        """Path of a file to write, in the folder, which is there then; None if that is another process's business."""
        if self._log_of is not None:
            return None
        if not self.path.exists():
            self.make()
        return self.path / name

    def write(self, name: str, text: str) -> None:
        """Write a file, unless that is another process's business."""
        if self._log_of is None:
            (self.path / name).write_text(text + "\n", encoding="utf-8")
