"""A program, and what a pass is asked to make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.fuzz.program import Program


@dataclass(frozen=True)
class Trial:
    """A legal program, a plan and options; a pass that changes what the program computes is wrong."""

    program: Program
    """With the world, and the process groups that the graph names."""
    graph_module: fx.GraphModule
    """What ``program.returns`` gave."""
    plan: Any = ("a",)
    """Entries as passes take them: module FQNs, or lists of FQNs that share a bucket."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the pass is given by keyword; ours also ``costs``, a number that says which seconds nodes take, and
    ``transforms``, names of transformations that come before it."""
    wrong: str = ""
    """What is wrong with plan or options, in words: a pass must refuse it. Empty: nothing is."""

    def of(self, graph_module: fx.GraphModule) -> Trial:
        """The same of another graph."""
        return replace(self, graph_module=graph_module)
