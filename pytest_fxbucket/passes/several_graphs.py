"""One plan for the several graphs that ``torch.compile`` makes of a model: forward and backward apart, more at graph breaks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from pytest_fxbucket.compat.compilers import mark_backward
from pytest_fxbucket.cost.cluster import cluster_of
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.groups import ensure_twins
from pytest_fxbucket.graph.modules import ModuleStackFn, direction_of, module_path, module_stack
from pytest_fxbucket.passes.auto.estimates import of_cluster, refuse_symbolic
from pytest_fxbucket.passes.keep_order import forget_order
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import Targets, by_module, by_size
from pytest_fxbucket.plan.pass_consistency import agree_with_entries
from pytest_fxbucket.plan.selectors import resolve
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.auto.estimates import Estimates
    from pytest_fxbucket.passes.report import PassReport
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.plan.table_rules import Places
    from pytest_fxbucket.step.roles import Direction

_PACKAGE = Path(__file__).parents[1]


class SeveralGraphs:
    """A plan, and what it came to in each graph so far.

    No graph alone can tell that an entry is wrong: each holds some of the model's collectives. So what a graph lacks is passed
    over, and :meth:`check` tells what none of them had.
    """

    def __init__(self, plan: Plan, module_stack_fn: ModuleStackFn | None, where: str) -> None:
        self._plan, self._stack, self._where = plan, module_stack_fn, where
        self._reports: list[PassReport] = []
        self._launching: dict[str, None] = {}
        self._modules: dict[str, None] = {}
        self._compiled: set[str] = set()
        self._looked_at: set[str] = set()
        self._placed: set[tuple[str, str, str]] = set()
        self._nameless = 0
        """Launches that name no module, so that no entry has them."""

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """What was done to each graph that launches collectives, in order of compilation."""
        return tuple(self._reports)

    @property
    def keeps_order(self) -> bool:
        """Whether the order of launches and waits is to be kept through later compilers."""
        return self._plan.overlap.insert_overlap_deps

    def apply(self, graph: fx.Graph, of: str) -> bool:
        """Bucket ``graph`` in place, which was compiled from dynamo's graph ``of``; whether it belongs to backward.

        Raises :class:`PlanError` and :class:`PassError` as the pass does; then throw ``graph`` away.
        """
        self._compiled.add(of)
        mark_backward(graph)
        self._modules |= dict.fromkeys(self._names(graph))
        launches = [node for node in graph.nodes if collectives.launch_kind(node)]
        if not launches:
            return False
        self._nameless += sum(not (self._stack or module_stack)(node) for node in launches)
        forget_order(graph)
        targets = self._targets(graph)
        self._launching |= dict.fromkeys(targets.launching)
        gathers = {(target.direction, target.entry) for target in targets.planned if target.kind == "all_gather"}
        reductions = {(target.direction, target.entry) for target in targets.planned if target.kind != "all_gather"}
        asked = self._plan.overlap
        overlap = dataclasses.replace(
            asked,
            launch_at=self._places_here("launch_at", asked.launch_at, gathers),
            wait_before=self._places_here("wait_before", asked.wait_before, reductions),
        )
        self._reports.append(ManualPass(self._plan.bucket, overlap).run(graph, targets, self._estimates(graph)))
        if dist.is_initialized():
            with suppress(KeyError):  # a process group that this process lacks is told of when the graph runs
                ensure_twins(graph)
        return any(direction_of(node) == "backward" for node in launches)

    def look_at(self, graph: fx.Graph, of: str) -> None:
        """Note the modules in dynamo's graph ``of``, which a compiler may find in its cache and never hand to the pass."""
        self._looked_at.add(of)
        self._modules |= dict.fromkeys(self._names(graph))

    def key(self, graph: fx.Graph) -> str | None:
        """Hash of all that decides what becomes of dynamo's ``graph`` and that a cache of graphs does not know by itself.

        Names of modules are part of it. None if there can be no such hash, since a function of somebody else's has a say, and
        where the graph needs process groups that only the pass makes.
        """
        if self._stack is not None or self._plan.bucket.packer != "default":
            return None
        # A cached graph never comes to ``apply``, so nobody would make the twins of groups that it gathers on.
        if self._plan.overlap.gather_group != "same":
            return None
        # Names node by node: two graphs of the same modules may differ in which node is whose. Of a cluster its figures: a file
        # of that name may have others by now.
        names, cluster = list(self._names(graph, each=True)), cluster_of(self._plan)
        said = repr((_code(), self._plan.bucket, self._plan.overlap, cluster, names))
        return hashlib.sha256(said.encode()).hexdigest()

    def check(self) -> None:
        """Raise :class:`PlanError` for entries and places by hand that no graph so far had."""
        # Whether every graph of dynamo's came to the pass. If a compiler had one in its cache, nobody knows which of its
        # modules launch, so any module counts as one that does.
        whole = self._looked_at <= self._compiled
        if whole and not self._reports:
            raise PlanError(f"{self._where}: no entry can match: no graph compiled so far launches a collective")
        if not self._plan.bucket.has_entries:
            return
        modules = list(dict.fromkeys([*_behind_prefixes(self._modules), *self._launching]))
        launching = list(self._launching) if whole else modules
        try:
            found = resolve(
                self._plan.bucket.plan, launching, modules, unplanned="allow", where=self._where, what="collectives"
            )
        except PlanError as error:
            said = str(error).removesuffix("; take it out") if self._nameless else str(error)
            raise PlanError(f"{said}{self._without_name()}{self._broken()}") from None
        root = [self._plan.bucket.root] if self._plan.bucket.root else []
        agree_with_entries(self._plan, [*(entry.name for entry in found.entries), *root], self._where)
        for key in ("launch_at", "wait_before"):
            places: Places = getattr(self._plan.overlap, key)
            wanted = {(key, direction, entry) for direction, pairs in places.items() for entry in pairs}
            never = sorted(wanted - self._placed)
            if never and whole:
                _, direction, entry = never[0]
                raise PlanError(f'{self._where}: {key}.{direction}: entry "{entry}" has no bucket in any graph of {direction}')

    def missing(self) -> str:
        """What :meth:`check` would say; empty if it would say nothing."""
        try:
            self.check()
        except PlanError as error:
            return str(error)
        return ""

    def _without_name(self) -> str:
        """What launches that name no module have to do with an entry that matches nothing."""
        if not self._nameless:
            return ""
        return f"; {counted(self._nameless, 'collective')} named no module: bucket by size, or name them by module_stack_fn"

    def _broken(self) -> str:
        """What graph breaks have to do with a name that is not there."""
        functions = {of.partition("/")[0] for of in self._looked_at | self._compiled}
        if len(functions) == 1:
            return ""
        return (
            f"; {len(functions)} functions were compiled, and what dynamo compiles for itself, because of a graph break within "
            "or around it, has names that begin there: find the break with fullgraph=True, or bucket by size"
        )

    def _estimates(self, graph: fx.Graph) -> Estimates | None:
        if self._plan.overlap.schedule == "manual":
            return None
        refuse_symbolic(graph)
        cluster = cluster_of(self._plan)
        assert cluster is not None  # the options were refused without
        return of_cluster(cluster)

    def _targets(self, graph: fx.Graph) -> Targets:
        bucket = self._plan.bucket
        if not bucket.has_entries:
            return by_size(graph)
        plans = [(entry.name, entry.selectors) for entry in bucket.plan]
        return by_module(graph, plans, self._stack, where=self._where, unplanned=bucket.unplanned, partial=True)

    def _places_here(self, key: str, places: Places, here: set[tuple[Direction, str]]) -> Places:
        """``places`` of entries that have a bucket of the right kind and direction in this graph."""
        kept = {d: {entry: at for entry, at in pairs.items() if (d, entry) in here} for d, pairs in places.items()}
        self._placed |= {(key, direction, entry) for direction, pairs in kept.items() for entry in pairs}
        return kept

    def _names(self, graph: fx.Graph, *, each: bool = False) -> Sequence[str]:
        """FQNs of the modules that nodes name, or of ``each`` node's in turn."""
        spelled = [item[0] for node in graph.nodes for item in (self._stack or module_stack)(node)]
        clean = {name: ".".join(module_path(name)) for name in dict.fromkeys(spelled)}
        return [clean[name] for name in spelled] if each else [name for name in clean.values() if name]


def _behind_prefixes(modules: Iterable[str]) -> list[str]:
    """``modules``, also without what all of them begin with: a model within another is named as it is alone."""
    paths = [module.split(".") for module in modules]
    levels = [len(set(parts)) for parts in zip(*paths, strict=False)]  # as many as the shortest has parts
    shared = next((length for length, names in enumerate(levels) if names > 1), len(levels))
    return [".".join(path[length:]) for length in range(shared + 1) for path in paths if path[length:]]


@cache
def _code() -> str:
    """Hash of this package's code, which may change while its version stays."""
    said = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        said.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return said.hexdigest()
