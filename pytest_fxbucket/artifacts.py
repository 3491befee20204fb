"""What a failure leaves to look at: both graphs, the pass's report, each rank's log."""

from __future__ import annotations

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
    """The folder of one check of one plan; made when first written to."""

    def __init__(self, root: Path, plan: str, check: str) -> None:
        self._root = root
        self.path = root / re.sub(r"[^A-Za-z0-9_.-]+", "-", plan).strip("-.") / check

    def make(self) -> Path:
        """Create the folder, empty; its root is kept out of git."""
        self.clear()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.mkdir(parents=True)
        ignore = self._root / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
        return self.path

    def clear(self) -> None:
        """Remove the folder of an earlier run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write_graphs(self, step: StepGraph, passed: Mapping[int, Mapping[Phase, Passed]]) -> None:
        """Write the unbucketed graphs, the bucketed graphs by rank, and the pass's report."""
        if not self.path.exists():
            self.make()
        for phase, graph_module in step.graphs.items():
            self._write(f"{phase}.unbucketed.txt", str(graph_module.graph))
        for rank, graphs in passed.items():
            for phase, one in graphs.items():
                self._write(f"{phase}.bucketed.rank{rank}.txt", str(one.bucketed.graph))
                if one.bucketed.report is not None:
                    report = json.dumps(one.bucketed.report.to_dict(), indent=2)
                    self._write(f"{phase}.report.rank{rank}.json", report)

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text + "\n", encoding="utf-8")
