"""Mutants of a plan: which places of which graphs are broken, and the plan with one of them broken."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import zip_longest
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.mutate.operator import BrokenGraph, Form, Operator, SeenGraph, Site
from pytest_fxbucket.passes.registry import Bucketed
from pytest_fxbucket.step.portable import own_copy

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.plan_on_mesh import PlanOnMesh
    from pytest_fxbucket.step.roles import Phase


class CannotMakeError(FxbucketError):
    """An operator cannot change a graph at one of its places."""


@dataclass(frozen=True)
class Mutant:
    """One place of one graph, to be broken."""

    operator: str
    says: str
    """What the operator does."""
    phase: Phase
    stage: int
    """Place along pp of the ranks that have the graph."""
    site: Site
    form: Form = "passed"

    @property
    def name(self) -> str:
        """For people: ``wait_dropped at wait_tensor_3 of backward on rank 3``."""
        on_rank = "" if self.site.on_rank is None else f" on rank {self.site.on_rank}"
        return f"{self.operator} at {self.site.node} of {self.phase}{on_rank}"


def mutants_of(world: PlanOnMesh, operators: Sequence[Operator], seed: int) -> list[Mutant]:
    """All mutants, operators taking turns, places of an operator in an order that ``seed`` gives."""
    # One rank of each pipeline stage is asked for places. Each operator has random numbers of its own, so that its order does
    # not depend on which others run; taking turns lets a limit on the number of mutants fall on all operators alike.
    by_operator: list[list[Mutant]] = []
    for operator in operators:
        found = [
            Mutant(operator.name, operator.says, phase, stage, site, operator.form)
            for stage, rank in enumerate(world.mesh.ranks(0, "pp"))
            for phase, passed in (world.passed(rank) if operator.form == "passed" else world.final(rank)).items()
            for site in operator.sites(SeenGraph(phase, passed, rank, world.mesh, world.entry_of))
        ]
        random.Random(f"{seed} {operator.name}").shuffle(found)
        by_operator.append(found)
    return [mutant for turn in zip_longest(*by_operator) for mutant in turn if mutant is not None]


class Spoiling:
    """Breaks ``mutant`` in the graphs of every rank that has its place."""

    def __init__(self, world: PlanOnMesh, mutant: Mutant) -> None:
        self._world, self._mutant = world, mutant
        self._made: dict[int, tuple[Bucketed, Bucketed]] = {}
        """By ``id`` of a graph: that graph, which is kept so that no other one gets its id, and the broken one.

        Ranks that share a graph share the broken one.
        """
        self.changed: tuple[fx.Graph, fx.Graph] | None = None
        """The first graph that was broken, before and after."""

    def world(self, of: PlanOnMesh) -> PlanOnMesh:
        """What ``of`` is with the mutant in place."""
        return of.spoiled(self, final=self._mutant.form == "final")

    def __call__(self, rank: int, phase: Phase, bucketed: Bucketed) -> Bucketed:
        """The graph that ``rank`` runs instead of ``bucketed``. Raises CannotMakeError."""
        site = self._mutant.site
        if phase != self._mutant.phase or self._world.mesh.at(rank, "pp") != self._mutant.stage:
            return bucketed
        if site.on_rank not in (None, rank) or site.node not in {node.name for node in bucketed.graph.nodes}:
            return bucketed
        key = id(bucketed)
        if key not in self._made:
            self._made[key] = bucketed, self._broken(bucketed)
        return self._made[key][1]

    def _broken(self, bucketed: Bucketed) -> Bucketed:
        graph, root = copy.deepcopy(bucketed.graph), bucketed.root
        # A copied graph still names the constants and subgraphs of its root: these are copied too, if there are any.
        if any(node.op == "get_attr" for node in graph.nodes):
            root = own_copy(bucketed.graph_module)
            graph = root.graph
        try:
            self._mutant.site.change(BrokenGraph(graph, root))
            graph.lint()
        except Exception as error:
            raise CannotMakeError(f"{self._mutant.name} cannot be made: {type(error).__name__}: {error}") from error
        if self.changed is None:
            self.changed = bucketed.graph, graph
        return Bucketed(graph, root, bucketed.report, bucketed.modules)


def diff_of(before: fx.Graph, after: fx.Graph) -> Iterator[str]:
    """Nodes that differ between two graphs, with a node around each change."""
    old, new = ([_shown(node) for node in graph.nodes] for graph in (before, after))
    lines = unified_diff(old, new, n=1, lineterm="")
    yield from (line for line in lines if not line.startswith(("---", "+++")))


def _shown(node: fx.Node) -> str:
    args = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"%{node.name} = {node.target}({', '.join(args)})"
