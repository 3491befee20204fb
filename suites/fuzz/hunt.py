"""Hunts for a graph that our pass changes, breaks or refuses: random programs and plans, on all ranks before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import fx

from pytest_fxbucket.checks.promises.automatic import in_flight_problems
from pytest_fxbucket.cost.costs import launched_bytes
from pytest_fxbucket.cost.memory import liveness_of
from pytest_fxbucket.fuzz import lockstep
from pytest_fxbucket.fuzz.drawing import Step
from pytest_fxbucket.fuzz.drawn import NAMES, drawn
from pytest_fxbucket.fuzz.groups import fake_groups
from pytest_fxbucket.fuzz.on_ranks import compare
from pytest_fxbucket.fuzz.ours import run_pass
from pytest_fxbucket.fuzz.program import Program, copied
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.calls import Call, calls_of, joint_problems
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.carried import carried
from pytest_fxbucket.passes.grouping import MB
from pytest_fxbucket.plan.tables import Overlap
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.same import two_graphs
from pytest_fxbucket.step.roles import Value
from suites.passes.programs import through

PLANS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("a", "b", "c"),),
    (("a",), ("b",), ("c",)),
    (("a", "b"), ("c",)),
    (("b",), ("a",)),
    (("c",),),
)
"""Entries, each of one module or several."""
BYTES = (0, 60, 200, 1000, 20_000)
"""Caps; 0: none."""


@dataclass(frozen=True)
class Chosen:
    """A plan: which modules share an entry, and how buckets and overlap are to be."""

    plan: int = 0
    by: str = "plan"
    caps: tuple[int, ...] = (0,)
    dtypes: str = "separate"
    enabled: bool = True
    layout: str = "registration"
    prefetch: int = 1
    defer_reduce: bool = True
    schedule: str = "manual"
    max_prefetch: int | None = None
    in_flight: float | None = None
    """By how much more may be in flight than the largest collective has that the pass makes without this limit."""
    max_memory_increase: float | None = None
    """Where nothing is merged: buckets may need more."""
    costs: int = 0
    """Which seconds nodes take, for schedules that go by them."""

    def entries(self, modules: Sequence[str]) -> list[list[str]]:
        """The plan's entries, as far as they name modules that have launches; all in one if that leaves none."""
        named = [[name for name in entry if name in modules] for entry in PLANS[self.plan]]
        return [entry for entry in named if entry] or [sorted(set(modules))]

    @property
    def options(self) -> dict[str, Any]:
        """ManualPass's, but for what may be in flight."""
        names: tuple[str, ...] = ("by", "enabled", "dtypes", "layout", "prefetch", "defer_reduce")
        caps = self.caps
        if self.schedule == "auto":
            names, caps = ("by", "enabled", "dtypes", "layout", "schedule", "max_prefetch"), self.caps[:1]
            names += () if self.enabled else ("max_memory_increase",)
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**found, "cap_mb": tuple(size / MB for size in caps), "cost": self.seconds}

    def seconds(self, node: fx.Node) -> float:
        """Of ``node``: any number, the same for its name."""
        return crc32(f"{self.costs} {node.name}".encode()) / (1 << 32)


small = st.integers(0, 11)
steps = st.lists(st.builds(Step, st.sampled_from(NAMES), small, small, small), min_size=12, max_size=44)
by_hand = st.builds(
    Chosen,
    plan=st.integers(0, len(PLANS) - 1),
    by=st.sampled_from(["plan", "plan", "plan", "size"]),
    caps=st.one_of(st.just((0,)), st.lists(st.sampled_from(BYTES), min_size=1, max_size=3).map(tuple)),
    dtypes=st.sampled_from(["separate", "mixed"]),
    enabled=st.sampled_from([True, True, True, True, False]),
    layout=st.sampled_from(["registration", "execution"]),
    prefetch=st.integers(0, 2),
    defer_reduce=st.booleans(),
)


automatic = st.builds(
    Chosen,
    plan=st.integers(0, len(PLANS) - 1),
    by=st.sampled_from(["plan", "overlap", "overlap", "size"]),
    caps=st.sampled_from(BYTES).map(lambda size: (size,)),
    dtypes=st.sampled_from(["separate", "mixed"]),
    enabled=st.sampled_from([True, True, True, False]),
    layout=st.sampled_from(["registration", "execution"]),
    schedule=st.just("auto"),
    max_prefetch=st.sampled_from([None, None, 1, 2]),
    in_flight=st.sampled_from([None, None, 1.0, 1.5, 3.0]),
    max_memory_increase=st.sampled_from([None, 0.0, 0.1]),
    costs=st.integers(0, 99),
)


@dataclass
class Hunt:
    """What a hunt came to."""

    world: int
    equal: int = 0
    """Graphs that were found equal, up to the first that was not."""
    merged: int = 0
    """Of them those that had fewer launches after the pass."""
    trouble: Exception | None = None
    """With the smallest program that shows it, as a note."""


def hunt(pools: Pools | None, world: int, count: int, number: int, plans: st.SearchStrategy[Chosen] = by_hand) -> Hunt:
    """Look at ``count`` graphs that the seed ``number`` gives, on ``world`` ranks; the first that is not well ends it.

    Without ``pools`` all ranks are in this process.
    """
    found = Hunt(world)

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(steps=steps, chosen=plans)
    def look(steps: list[Step], chosen: Chosen) -> None:
        try:
            merged = look_at(pools, world, steps, chosen)
        except Exception as error:
            found.trouble = error
            raise
        if found.trouble is None:
            found.equal += 1
            found.merged += merged

    try:
        look()
    except Exception as error:
        found.trouble = error
    return found


def look_at(pools: Pools | None, world: int, steps: Sequence[Step], chosen: Chosen) -> bool:
    """Take the program of ``steps`` through the pass; whether launches were merged.

    Raises AssertionError for what is not well.
    """
    drawing = drawn(world, steps)
    before = drawing.finish()
    program, entries = drawing.program, chosen.entries(drawing.modules)
    passed, options = through(program, before, entries, **chosen.options), chosen.options
    if chosen.in_flight is not None:
        options["max_in_flight_gb"] = chosen.in_flight * _largest(passed.after.graph) / (1 << 30)
        passed = through(program, before, entries, **options)
    after = passed.after
    after.graph.lint()
    if pools is None:
        differences = lockstep.compare(before, after, world, program.groups)
    else:
        differences = compare(pools, before, after, world, len(steps), program.groups)
    assert not differences, "\n".join([*differences, *_shown(before, after)])
    broken = list(_limits(before.graph, after.graph, options))
    assert not broken, "\n".join([*broken, *_shown(before, after)])
    alarms = [line for rank in (0, world - 1) for line in two_graphs.problems(before, after, _ranks_of(program, rank))]
    assert not alarms, "\n".join([*alarms, *_shown(before, after)])
    again = copied(after)
    with fake_groups(world, program.groups):
        run_pass(again.graph, entries, **options)
    same = str(again.graph) == str(after.graph)
    assert same or _gathers_anew(before.graph), "\n".join(["the pass changes its own output:", *_shown(after, again)])
    if not problems(program, before.graph):
        found = problems(program, after.graph)
        assert not found, "\n".join([*found, *_shown(before, after)])
    return passed.report.launches_after < passed.report.launches_before


def _largest(graph: fx.Graph) -> int:
    """Bytes of the larger side of the largest collective."""
    return max((launched_bytes(node) for node in graph.nodes if collectives.launch_kind(node)), default=1)


def _limits(before: fx.Graph, after: fx.Graph, options: Mapping[str, Any]) -> Iterator[str]:
    """What ``after`` does not keep of the limits of a schedule."""
    rules = Overlap(**{name: value for name, value in options.items() if name in ("schedule", *_LIMITS)})
    yield from in_flight_problems(rules, after)
    if rules.max_memory_increase is not None:
        was, now = (liveness_of(graph, *_values(graph)).peak for graph in (before, after))
        if now > was * (1 + rules.max_memory_increase):
            yield f"{now} bytes live at once, {was} before, and max_memory_increase = {rules.max_memory_increase}"


_LIMITS = ("max_prefetch", "max_in_flight_gb", "max_memory_increase")


def _gathers_anew(graph: fx.Graph) -> bool:
    """Whether a parameter is gathered more than once: rounds of what is merged are counted anew, and may go further ahead."""
    counts = Counter(name for node, one in carried(graph).items() if collectives.is_all_gather(node) for name in one.fqns)
    return max(counts.values(), default=0) > 1


def problems(program: Program, graph: fx.Graph) -> list[str]:
    """What checks/collectives says of ``graph`` when every rank runs it."""
    reading = read_graph(graph, *_values(graph))
    calls: dict[int, list[Call]] = {}
    found: dict[str, None] = {}
    for rank in range(program.world):
        calls[rank], own = calls_of(graph, reading, _ranks_of(program, rank))
        found.update(dict.fromkeys(own))
    return [*found, *joint_problems(calls)]


def _values(graph: fx.Graph) -> tuple[list[Value], list[Value]]:
    """Inputs and outputs."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    return [_value(node) for node in graph.find_nodes(op="placeholder")], [_value(node) for node in outputs]


def _value(node: fx.Node) -> Value:
    value = node.meta["val"]
    return Value("value", "", tuple(value.shape), value.dtype)


def _ranks_of(program: Program, rank: int) -> Mapping[str, tuple[int, ...]]:
    lists = {"0": [list(range(program.world))], **program.groups}
    return {name: next(tuple(ranks) for ranks in parts if rank in ranks) for name, parts in lists.items()}


def _shown(before: fx.GraphModule, after: fx.GraphModule) -> list[str]:
    return ["before:", str(before.graph), "after:", str(after.graph)]
