"""One plan at one world size: captured, and passed once for each rank that is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_fxbucket import collector
from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.capture.mesh import Mesh, fake_mesh
from pytest_fxbucket.checks.collectives import Call, calls_of
from pytest_fxbucket.compat.groups import group_ranks, untwinned
from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.graph.portable import PortableGraph, digest, encode, encode_module
from pytest_fxbucket.graph.reading import Reading, read_graph
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.registry import Bucketed, Job, run_pass
from pytest_fxbucket.plan.resolved import entries_of
from pytest_fxbucket.plan.selector import Resolution
from pytest_fxbucket.schedule.dims import dims_text

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Phase, StepGraph
    from pytest_fxbucket.plan.schema import Plan

_ALL_RANKS = 16


@dataclass(frozen=True)
class Passed:
    """A graph as it came out of the pass, and what was read off it. Ranks with equal graphs share one."""

    bucketed: Bucketed
    portable: PortableGraph
    digest: str
    reading: Reading
    calls: list[Call]
    problems: list[str]
    """What is wrong with launches and waits inside the graph."""


class Seconds(dict[str, float]):
    """Seconds of what was done, by its name."""

    @contextmanager
    def of(self, what: str, rank: int) -> Iterator[None]:
        """Take the time of a block that works for ``rank``, if that is the first."""
        begin = time.perf_counter()
        yield
        if rank == 0:
            self[what] = time.perf_counter() - begin


@dataclass
class World:
    """``plan`` on the ranks of ``mesh``, through the pass ``pass_name``. Work is done when asked for, once."""

    plan: Plan
    mesh: Mesh
    pass_name: str
    say: Callable[[str], None]
    seconds: Seconds = field(default_factory=Seconds)
    """What the first rank's capture and its pass took, as "capture" and "pass"."""
    _passed: dict[int, dict[Phase, Passed]] = field(default_factory=dict)
    _known: dict[tuple[Phase, str, tuple[tuple[str, tuple[int, ...]], ...]], Passed] = field(default_factory=dict)
    _steps: dict[int, StepGraph] = field(default_factory=dict)
    _sent: dict[tuple[int, Phase], PortableGraph] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.mesh.size

    def step(self, rank: int) -> StepGraph:
        """The unbucketed step. A model is traced once: it gives the same graph on every rank; a factory is asked on each."""
        traced = rank if self.plan.graph is not None else 0
        if traced not in self._steps:
            self.say(f"tracing the step as rank {traced} of {self.size}")
            with collector.paused(), self.seconds.of("capture", traced):
                self._steps[traced] = capture_plan(self.plan, self.mesh, traced)
        return self._steps[traced]

    @cached_property
    def resolution(self) -> Resolution:
        """What the plan's entries mean. Raises PlanError for entries that match nothing or overlap."""
        step = self.step(0)
        if not step.has_roles:
            return Resolution((), (), ())
        return entries_of(self.plan, [parameter.fqn for parameter in step.parameters], step.modules, step.aliases)

    @property
    def entry_of(self) -> dict[str, str]:
        """FQN of each planned parameter to its entry."""
        return {fqn: entry.name for entry in self.resolution.entries for fqn in entry.parameters}

    def reading(self, rank: int) -> Mapping[Phase, Reading]:
        """The unbucketed graphs, read."""
        return self._readings(self.step(rank))

    def passed(self, rank: int) -> Mapping[Phase, Passed]:
        """The graphs after the pass, as rank ``rank`` gets them."""
        if rank not in self._passed:
            step, entries = self.step(rank), self.resolution.entries
            readings = self._readings(step)
            self.say(f"running pass {self.pass_name} as rank {rank} of {self.size}")
            with collector.paused(), fake_mesh(self.mesh, rank):
                with self.seconds.of("pass", rank):
                    made = {
                        phase: run_pass(self.pass_name, Job(step, phase, readings[phase], self.plan, entries))
                        for phase in step.graphs
                    }
                self._passed[rank] = {phase: self._look(phase, step, bucketed) for phase, bucketed in made.items()}
        return self._passed[rank]

    def unbucketed(self, rank: int, phase: Phase) -> PortableGraph:
        """The unbucketed graph as plain data."""
        step = self.step(rank)
        key = (step.rank, phase)
        if key not in self._sent:
            self._sent[key] = encode_module(step.graphs[phase])
        return self._sent[key]

    def ranks(self) -> Sequence[int]:
        """Ranks whose graphs are looked at: all up to 16; above, first, last, and those a power of two away from the first."""
        if self.size <= _ALL_RANKS:
            return range(self.size)
        near = [1 << n for n in range(self.size.bit_length()) if 1 << n < self.size]
        return sorted({0, *near, self.size - 1})

    def distinct(self) -> list[tuple[list[int], Mapping[Phase, Passed]]]:
        """(ranks, their graphs) for each distinct set of graphs among :meth:`ranks`, the one of rank 0 first."""
        groups: dict[tuple[str, ...], tuple[list[int], Mapping[Phase, Passed]]] = {}
        for rank in self.ranks():
            passed = self.passed(rank)
            key = tuple(passed[phase].digest for phase in passed)
            groups.setdefault(key, ([], passed))[0].append(rank)
        return list(groups.values())

    def dims_of(self, graph: fx.Graph) -> dict[str, str]:
        """Mesh dimension of each process group that ``graph`` names, for people."""
        mesh = self.mesh.dims
        with fake_mesh(self.mesh, 0):
            groups = _group_ranks(graph)
        return {name: dims_text(ranks, mesh) + (" (own)" if name != untwinned(name) else "") for name, ranks in groups.items()}

    def by_pass(self, pass_name: str) -> World:
        """The same step through another pass; captured once."""
        return World(self.plan, self.mesh, pass_name, self.say, Seconds(self.seconds), _steps=self._steps, _sent=self._sent)

    def members_of(self, phase: Phase) -> dict[str, tuple[int, ...]]:
        """Ranks of each process group that rank 0's graphs of ``phase`` name."""
        graph = self.passed(0)[phase].bucketed.graph
        with fake_mesh(self.mesh, 0):
            return _group_ranks(graph) | _group_ranks(self.step(0).graphs[phase].graph)

    def _readings(self, step: StepGraph) -> Mapping[Phase, Reading]:
        key = step.rank
        if key not in self._read:
            self._read[key] = {
                phase: read_graph(without_kept_order(graph.graph), step.inputs[phase], step.outputs[phase])
                for phase, graph in step.graphs.items()
            }
        return self._read[key]

    @cached_property
    def _read(self) -> dict[int, Mapping[Phase, Reading]]:
        return {}

    def _look(self, phase: Phase, step: StepGraph, bucketed: Bucketed) -> Passed:
        """Read ``bucketed``, unless a rank before had the same graph."""
        portable = encode(bucketed.graph, bucketed.root, bucketed.modules)
        name, groups = digest(portable), _group_ranks(bucketed.graph)
        key = (phase, name, tuple(sorted(groups.items())))
        if key not in self._known:
            graph = without_kept_order(bucketed.graph)
            reading = read_graph(graph, step.inputs[phase], step.outputs[phase])
            calls, problems = calls_of(graph, reading, groups)
            self._known[key] = Passed(bucketed, portable, name, reading, calls, problems)
        return self._known[key]


def _group_ranks(graph: fx.Graph) -> dict[str, tuple[int, ...]]:
    """Ranks of each process group that ``graph`` names and this process knows."""
    names = {launch.group for node in graph.nodes if (launch := read_launch(node)) is not None}
    found = {}
    for name in sorted(names):
        try:
            found[name] = group_ranks(name)
        except KeyError:
            continue
    return found
