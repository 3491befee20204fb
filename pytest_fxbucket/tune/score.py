"""Scores plans of one model on a cluster: captured once as long as they trace the same, passed and simulated each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.last_step import as_traced
from pytest_fxbucket.capture.names import single_selectors
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.consistency import entries_of
from pytest_fxbucket.plan.schema import Bucket, Overlap, Plan
from pytest_fxbucket.plan.selectors import entry_by_parameter, kept_entries, resolve
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate.of_plan import bucketed, in_schedule, simulated_ranks
from pytest_fxbucket.tune.moves import Facts, Move, moves_of
from pytest_fxbucket.tune.search import Score

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.simulate.timeline import Timeline

_LAYER = re.compile(r"(.+)\.(\d+)")


@dataclass
class Simulated:
    """Simulates plans that differ in buckets and schedule alone from ``start``, on ``cluster``, as rank 0 runs them.

    Of a plan in pipeline stages all ranks along pp are simulated.
    """

    start: Plan
    cluster: Cluster
    say: Callable[[str], None]
    _worlds: dict[Hashable, PlanOnMesh] = field(default_factory=dict)
    """By what is traced. Each was captured for one plan, and others that trace the same go under it."""
    _facts: dict[Hashable, Facts] = field(default_factory=dict)
    _longest: float = 0.0
    """Seconds of the longest pass and simulation."""
    _capturing: float = 0.0

    def score(self, plan: Plan) -> Score:
        """Simulate ``plan``. Raises FxbucketError for one that the model or the pass refuses."""
        base = self._base(plan)
        begin = time.monotonic()
        score = self._scored(base.under(plan))
        self._longest = max(self._longest, time.monotonic() - begin)
        return score

    def takes(self, plan: Plan) -> float:
        """Seconds that scoring ``plan`` is likely to take: as long as the longest, and a capture if it traces another step."""
        return self._longest + (0.0 if self._traced(plan) in self._worlds else self._capturing)

    def moves(self, plan: Plan) -> Sequence[Move]:
        """Moves from ``plan``, which was scored."""
        return moves_of(plan, self._facts[_key(plan)], self.start)

    def _base(self, plan: Plan) -> PlanOnMesh:
        """The step that ``plan`` traces, captured if no plan before it traced the same."""
        if not self._worlds:
            first = self._captured(self.start)
            self._worlds[None] = first  # for its names, which all have
            self._worlds[self._traced(self.start)] = first
        key = self._traced(plan)
        if key not in self._worlds:
            self._worlds[key] = self._captured(plan)
        return self._worlds[key]

    def _captured(self, plan: Plan) -> PlanOnMesh:
        begin = time.monotonic()
        world = PlanOnMesh(plan, mesh_of(plan), "manual", self.say)
        world.step(0), world.resolution
        self._capturing = max(self._capturing, time.monotonic() - begin)
        return world

    def _scored(self, world: PlanOnMesh) -> Score:
        timelines, seconds = self._simulated(world)
        reasons: dict[str, float] = {}
        for line in timelines:
            for flight in line.flights:
                reasons[flight.why] = reasons.get(flight.why, 0.0) + flight.exposed * flight.times
        launches = [flight.bytes for line in timelines for flight in line.flights]
        entries, modules = [entry.name for entry in world.resolution.entries], world.step(0).modules
        self._facts[_key(world.plan)] = Facts(entries, modules, max(launches, default=0), _numbered(modules))
        exposed = max(line.exposed for line in timelines)
        return Score(seconds, exposed, max(line.peak_bytes for line in timelines), reasons)

    def _simulated(self, world: PlanOnMesh) -> tuple[list[Timeline], float]:
        if world.plan.pipeline is None:
            line = bucketed(world, 0, self.cluster)
            return [line], line.seconds
        scheduled = in_schedule(world, self.cluster)
        assert scheduled is not None
        return [one.timeline for one in simulated_ranks(world, self.cluster, believed=True)], scheduled.seconds

    def _traced(self, plan: Plan) -> Hashable:
        """What of ``plan``'s buckets and entries the captured step hangs on: plans of one key trace the same.

        As :func:`as_traced`, and less of it: entries say which modules get their inputs cast, which parameters stay gathered,
        and, where an optimizer asks for it, what it updates together; not which of them share a launch.
        """
        world = self._worlds[None]
        step, (reading,) = world.step(0), world.reading(0).values()
        fqns = [parameter.fqn for parameter in step.parameters]
        try:
            entries = entries_of(plan, fqns, step.modules, step.aliases).entries
            singles = resolve(
                single_selectors(plan.bucket.plan), fqns, step.modules, aliases=step.aliases, unplanned="allow"
            )
            entry_of = entry_by_parameter(entries)
            last = reading.last_read(entry_of)
            names = [entry.name for entry in entries]
            kept = kept_entries(plan.parallel.reshard_after_forward, names, last and entry_of[last])
        except PlanError as error:  # said when it is scored
            return str(error)
        units = frozenset(entry.name for entry in singles.entries).intersection(step.modules)
        stays = frozenset(fqn for fqn, entry in entry_of.items() if entry in kept)
        grouped = entries if any(one.groups == "entry" for one in plan.optimizer) else ()
        rest = repr(as_traced(_without_buckets(plan)))
        return units, stays if plan.parallel.reshard_after_forward not in (True, False) else None, grouped, rest


def _without_buckets(plan: Plan) -> Plan:
    from dataclasses import replace

    return replace(plan, bucket=Bucket(), overlap=Overlap())


def _key(plan: Plan) -> Hashable:
    return repr((plan.bucket, plan.overlap))


def _numbered(modules: Sequence[str]) -> dict[str, list[str]]:
    """Of each module whose children are all numbered those."""
    children: dict[str, list[str]] = {}
    for fqn in modules:
        if fqn:
            children.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    return {
        module: below for module, below in children.items() if module and all(_LAYER.fullmatch(one) for one in below)
    }
