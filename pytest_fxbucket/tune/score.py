"""Scores plans of one model on a cluster: each goes through the pass and is simulated; plans with the same trace share it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_fxbucket.capture.names import modules_named_by
from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.pass_consistency import entries_of
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.selectors import entry_by_parameter, kept_entries
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate.of_plan import bucketed, by_layout, in_schedule, simulated_ranks, unbucketed
from pytest_fxbucket.tune.moves import PlanMove, StepFacts, key_of, moves_of
from pytest_fxbucket.tune.search import SimulatedScore

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.simulate.timeline import Timeline

_GIB = 1 << 30
_AUTO, _CAPTURE = 2.0, 10.0
"""Effort of the automatic schedule, and of a capture, in units of a pass with the manual schedule; measured on large models."""


@dataclass
class PlanSimulator:
    """Simulates, on ``cluster`` and as rank 0, plans that differ from ``start`` in buckets and schedule only.

    For a plan with pipeline stages all ranks along pp are simulated.
    """

    start: Plan
    cluster: Cluster
    say: Callable[[str], None]
    _first: PlanOnMesh | None = None
    """The captured start; all other plans have its parameters and modules."""
    _worlds: dict[Hashable, PlanOnMesh] = field(default_factory=dict)
    """Captures by the key of :meth:`_traced`. Each was made for one plan, and others with the same key use it."""
    _keys: dict[Hashable, Hashable] = field(default_factory=dict)
    """By plan its key of :meth:`_traced`."""
    _facts: dict[Hashable, StepFacts] = field(default_factory=dict)
    _largest: int = 0
    _unit: float = 0.0
    """The most seconds that a pass with its simulation took so far, scaled to the manual schedule."""
    _capturing: float = 0.0
    """The most seconds that a capture took so far."""

    def limit(self) -> float:
        """Bytes that a rank may hold: what the plan's ``[checks] memory`` allows, else what the cluster's devices have."""
        memory = self.start.checks.memory
        limits = [self.cluster.memory]
        if memory and memory.peak_max_gb is not None:
            # It may be more than the devices have: the plan's word counts.
            limits = [memory.peak_max_gb * _GIB]
        if memory and memory.increase_max is not None:
            world = self._base(self.start)
            before = max(unbucketed(world, rank, self.cluster).peak_bytes for rank in world.mesh.ranks(0, "pp"))
            limits.append(before * (1 + memory.increase_max))
        return min(limits)

    def agree(self, plan: Plan) -> None:
        """Raise PlanError if keys of ``plan``, a row of the start's file, do not fit the start's model."""
        if plan.model == self.start.model:
            step = self._base(self.start).step(0)
            entries_of(plan, step.names, step.modules)

    def score(self, plan: Plan) -> SimulatedScore:
        """Simulate ``plan``. Raises FxbucketError for one that the model or the pass refuses."""
        base = self._base(plan)
        begin = time.monotonic()
        # What is timed is a pass and its simulation: a capture, if there was one, is done and was timed by itself.
        score = self._scored(base.under(plan))
        self._unit = max(self._unit, (time.monotonic() - begin) / _passing(plan))
        return score

    def effort(self, plan: Plan) -> float:
        """How much work scoring ``plan`` is, relative to others: much if it needs a capture of its own."""
        return _passing(plan) + (0.0 if self._is_captured(plan) else _CAPTURE)

    def takes(self, plan: Plan) -> float:
        """Seconds that scoring ``plan`` is likely to take."""
        return _passing(plan) * self._unit + (0.0 if self._is_captured(plan) else self._capturing)

    def _is_captured(self, plan: Plan) -> bool:
        return self._traced(plan) in self._worlds

    def moves(self, plan: Plan) -> Sequence[PlanMove]:
        """Moves from ``plan``, which was scored."""
        return moves_of(plan, self._facts[key_of(plan)], self.start)

    def _base(self, plan: Plan) -> PlanOnMesh:
        """The captured step of ``plan``; captured now if no earlier plan has the same trace."""
        if self._first is None:
            self._first = self._captured(self.start)
            self._worlds[self._traced(self.start)] = self._first
        key = self._traced(plan)
        if key not in self._worlds:
            self._worlds[key] = self._captured(plan)
        return self._worlds[key]

    def _captured(self, plan: Plan) -> PlanOnMesh:
        begin = time.monotonic()
        world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan), self.say), plan.pass_name)
        # A step is made when first asked for: here, so that the capture is not timed as part of the first pass.
        world.step(0), world.resolution
        self._capturing = max(self._capturing, time.monotonic() - begin)
        return world

    def _scored(self, world: PlanOnMesh) -> SimulatedScore:
        timelines, seconds = self._simulated(world)
        reasons: dict[str, float] = {}
        for line in timelines:
            for flight in line.flights:
                reasons[flight.why] = reasons.get(flight.why, 0.0) + flight.exposed * flight.times
        # Of all plans so far: under a cap no launch shows how large one without it would be.
        self._largest = max(self._largest, *(flight.bytes for line in timelines for flight in line.flights), 0)
        entries = [entry.name for entry in world.resolution.entries]
        self._facts[key_of(world.plan)] = StepFacts(entries, self._largest, _numbered(world.step(0).modules))
        exposed = max(line.exposed for line in timelines)
        return SimulatedScore(seconds, exposed, max(line.peak_bytes for line in timelines), reasons)

    def _simulated(self, world: PlanOnMesh) -> tuple[list[Timeline], float]:
        if world.plan.pipeline is None:
            ranks = [alike[0] for alike in by_layout(range(world.mesh.size), world, self.cluster)]
            lines = [bucketed(world, rank, self.cluster) for rank in ranks]
            return lines, max(line.seconds for line in lines)
        scheduled = in_schedule(world, self.cluster)
        assert scheduled is not None
        return [one.timeline for one in simulated_ranks(world, self.cluster, believed=True)], scheduled.seconds

    def _traced(self, plan: Plan) -> Hashable:
        key = key_of(plan)
        if key not in self._keys:
            self._keys[key] = self._traced_anew(plan)
        return self._keys[key]

    def _traced_anew(self, plan: Plan) -> Hashable:
        """The parts of ``plan``'s ``[bucket]`` that the captured step depends on: plans with an equal key trace the same step.

        Entries decide which modules get their inputs cast, which parameters stay gathered after forward, and, if an optimizer
        has ``groups = "entry"``, which parameters it updates together. Which ones are launched together does not matter to a
        capture. This key keeps less than :func:`pytest_fxbucket.capture.last_step.as_traced`.
        """
        world = self._first
        assert world is not None  # the start is scored first
        step = world.step(0)
        (reading,) = world.captured.readings(step).values()
        try:
            entries = entries_of(plan, step.names, step.modules).entries
            entry_of = entry_by_parameter(entries)
            last = reading.last_read(entry_of)
            names = [entry.name for entry in entries]
            kept = kept_entries(plan.parallel.reshard_after_forward, names, (last and entry_of[last], plan.bucket.root))
        except PlanError as error:  # said when it is scored
            return str(error)
        units = frozenset(modules_named_by(plan.bucket.plan, list(step.names), step.modules))
        stays = frozenset(fqn for fqn, entry in entry_of.items() if entry in kept)
        grouped = entries if any(one.groups == "entry" for one in plan.optimizer) else ()
        # With one answer for all, how parameters are cut into entries does not change which of them stay gathered.
        return units, stays if not isinstance(plan.parallel.reshard_after_forward, bool) else None, grouped


def _passing(plan: Plan) -> float:
    return _AUTO if plan.overlap.schedule == "auto" else 1.0


def _numbered(modules: Sequence[str]) -> frozenset[str]:
    """Modules whose children are all numbered."""
    children: dict[str, list[str]] = {}
    for parent, _, name in (fqn.rpartition(".") for fqn in modules):
        children.setdefault(parent, []).append(name)
    return frozenset(module for module, names in children.items() if module and all(name.isdecimal() for name in names))
