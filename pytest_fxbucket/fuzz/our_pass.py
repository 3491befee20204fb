"""Our pass on a drawn program, behind transformations of it, with plans as the drop-in function takes them, and seconds that
need no cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.cost.costs import Roofline
from pytest_fxbucket.fuzz.program import copied, step_of
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.keep_order import forget_order
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import by_module, by_size
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.transforms.registry import BUILT_IN

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.report import PassReport

CLUSTER = Cluster(
    name="handmade",
    flops={"float32": 1e12},
    memory_bandwidth=1e12,
    memory=1e9,
    devices_per_node=8,
    within=Link(1e11, 1e-6),
    between=Link(1e10, 1e-5),
)


def run_pass(graph: fx.Graph, entries: object, **options: Any) -> PassReport:
    """Our pass on ``graph`` in place; ``options`` are ManualPass's, with ``cost``, or ``costs`` as of :func:`any_seconds`."""
    forget_order(graph)  # a graph that the pass has made already has nodes that keep its order; they are no part of a step
    if options.get("by") in ("size", "overlap"):
        targets = by_size(graph)
    else:
        targets = by_module(graph, [(one.name, one.selectors) for one in parse_entries(entries, "plan")], None)
    cost = options.pop("cost", Roofline(CLUSTER, lambda _, count: range(count)))
    cost = any_seconds(options.pop("costs")) if "costs" in options else cost
    return ManualPass.of(**options).run(graph, targets, Estimates(cost, CLUSTER))


def any_seconds(number: int) -> Callable[[fx.Node], float]:
    """Seconds of nodes, from 0 to 1: arbitrary, but fixed by ``number`` and the name of the node."""
    # Not ``hash``, which differs from process to process for strings.
    return lambda node: crc32(f"{number} {node.name}".encode()) / (1 << 32)


# Transformations of a step, before our pass sees it.


SAME_BITS = ("merge_duplicates",)
"""Those that a program without roles can have, and that leave all bits as they are."""
ROUNDS = "add_before_reducing"
"""A transformation that leaves all bits as they are only where sums are exact."""


def fit(names: Sequence[str], graph: fx.Graph, world: int) -> bool:
    """Whether the transformations ``names`` leave all bits of ``graph`` as they are."""
    return ROUNDS not in names or _sums_exactly(graph, world)


def _sums_exactly(graph: fx.Graph, world: int) -> bool:
    """Whether reductions give the same in any order: of integers, and of halves and quarters of them, in more than 16 bits."""
    for node in graph.nodes:
        said = collectives.read_launch(node)
        if said is None or said.kind not in collectives.REDUCTIONS:
            continue
        values = collectives.tensors(node.meta["val"])
        # Only a division by a power of two is exact.
        if any(value.dtype.itemsize < 4 for value in values) or (said.op == "avg" and world & (world - 1)):
            return False
    return True


def before_the_pass(graph_module: fx.GraphModule, names: Iterable[str]) -> fx.GraphModule:
    """The graph whose expressions those after the pass are held against: a copy, after those of ``names`` that round."""
    return transformed(copied(graph_module), [name for name in names if name == ROUNDS])


def transformed(graph_module: fx.GraphModule, names: Iterable[str]) -> fx.GraphModule:
    """``graph_module`` after the transformations called ``names``, which change it in place."""
    step = step_of(graph_module)
    for name in names:
        step = import_callable(BUILT_IN[name], name)(step, {})
    return step.graphs["joint"]
