"""Graphs of collectives of every kind, written by hand for any number of ranks; and our pass on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pytest_fxbucket.fuzz.lockstep import compare
from pytest_fxbucket.fuzz.our_pass import run_pass
from pytest_fxbucket.fuzz.program import COLUMNS, Program, aten, copied, fake_groups
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.report import PassReport

SGD = {
    "weight_decay": 0.0,
    "momentum": 0.0,
    "lr": 1.0,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": True,
}
"""Arguments of aten._fused_sgd_ for a plain step of size 1."""


@dataclass(frozen=True)
class Passed:
    """A graph before and after our pass."""

    before: fx.GraphModule
    after: fx.GraphModule
    report: PassReport

    @property
    def launches(self) -> list[str]:
        """Operators of the launches after the pass, in order."""
        return launches(self.after.graph)

    @property
    def reasons(self) -> list[str]:
        """Why launches were left alone, each reason once."""
        return sorted({left.reason for left in self.report.left_alone})


Entry = str | Sequence[str]


def through(program: Program, graph_module: fx.GraphModule, entries: Sequence[Entry] = ("a",), **options: Any) -> Passed:
    """``graph_module`` through our pass, with its groups in place; ``entries`` as the drop-in function takes them.

    ``options`` are ManualPass's; with ``by="size"`` there are no entries.
    """
    after = copied(graph_module)
    with fake_groups(program.world, program.groups):
        report = run_pass(after.graph, entries, **options)
    after.recompile()
    return Passed(graph_module, after, report)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"prefetch": 0, "defer_reduce": False},
    {"prefetch": 2, "layout": "execution", "dtypes": "mixed"},
)
"""Each graph goes through the pass with each of these."""


def equal(
    program: Program, nodes: Sequence[fx.Node], entries: Sequence[Entry] = ("a",), settings: Sequence[dict[str, Any]] = SETTINGS
) -> Passed:
    """The graph that returns ``nodes``, through the pass with each of ``settings``, and on all ranks the same each time.

    Gives the first of them.
    """
    graph_module = program.returns(*nodes)
    passed = [through(program, graph_module, entries, **options) for options in settings]
    for options, one in zip(settings, passed, strict=True):
        assert compare(graph_module, one.after, program.world, program.groups) == [], options
    return passed[0]


def chain(modules: Sequence[str] = ("a", "b", "c"), *, backward: bool = False) -> fx.GraphModule:
    """Two shards in each of ``modules`` on 4 ranks, gathered one after the other, read, and reduced again if ``backward``."""
    made = Program(4)
    names = [[f"{module}_{name}".replace(".", "_") for name in ("weight", "scale")] for module in modules]
    shards = [[made.given(name, 2, COLUMNS) for name in pair] for pair in names]
    x, reduced = made.given("x", 8, COLUMNS), []
    for made.module, pair in zip(modules, shards, strict=True):
        for shard in pair:
            x = made.call(aten.mul.Tensor, x, made.gather(shard))
    for made.module in reversed(modules) if backward else ():
        for _ in range(2):
            x = made.neg(x)
            reduced.append(made.reduce(x, "avg"))
    return made.returns(x, *reduced)


def launches(graph: fx.Graph) -> list[str]:
    """Operators of the launches of ``graph``, in order."""
    found = [collectives.read_launch(node) for node in graph.nodes]
    return [one.operator for one in found if one is not None]
