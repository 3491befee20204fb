"""Our pass on a drawn program, with plans as the drop-in function takes them, and seconds that need no cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pytest_fxbucket.cost.cluster import Cluster, Link
from pytest_fxbucket.cost.costs import Roofline
from pytest_fxbucket.passes.auto.estimates import Estimates
from pytest_fxbucket.passes.keep_order import forget_order
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import by_module, by_size
from pytest_fxbucket.plan.entries import parse_entries

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
    forget_order(graph)
    if options.get("by") in ("size", "overlap"):
        targets = by_size(graph)
    else:
        targets = by_module(graph, [(one.name, one.selectors) for one in parse_entries(entries, "plan")], None)
    cost = options.pop("cost", Roofline(CLUSTER, lambda _, count: range(count)))
    cost = any_seconds(options.pop("costs")) if "costs" in options else cost
    return ManualPass.of(**options).run(graph, targets, Estimates(cost, CLUSTER))


def any_seconds(number: int) -> Callable[[fx.Node], float]:
    """Seconds of nodes: anything, the same for a name."""
    return lambda node: crc32(f"{number} {node.name}".encode()) / (1 << 32)
