"""A program, and what a pass is asked to make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.fuzz.crossing import NAME, over_calls
from pytest_fxbucket.fuzz.roles import step_of

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
    """What the pass is given by keyword; ours also ``costs``, a number that says which seconds nodes take,
    ``transforms``, names of transformations that come before it, and ``next_iteration``, entries whose reductions and updates
    move to the next call behind it."""
    wrong: str = ""
    """What is wrong with plan or options, in words: a pass must refuse it. Empty: nothing is."""

    @property
    def crosses(self) -> bool:
        """Whether work is to go from call to call."""
        return NAME in self.options

    @cached_property
    def before(self) -> fx.GraphModule:
        """What the graph behind the pass is held against: the program, or several calls of it if work crosses them."""
        return over_calls(step_of(self.graph_module)) if self.crosses else self.graph_module

    def of(self, graph_module: fx.GraphModule) -> Trial:
        """The same of another graph."""
        return replace(self, graph_module=graph_module)
