"""Invariants that no pass may break, whatever it is for: for tests of passes, on plain graphs, without a plan.

``assert_invariants(before, after)`` holds if after the pass

- every collective carries what it carried: nothing that was gathered or reduced before is lost;
- every launch is waited for exactly once;
- as many bytes as before travel on every process group, by kind;
- no wait stands before its launch, and nothing is read before its wait;
- compute that keeps its name reads the parameters, and makes the gradients, that it did;
- all ranks launch the same on each group, in the same order, so that none waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_fxbucket.checks.verdict import said_once
from pytest_fxbucket.compat.c10d import group_ranks
from pytest_fxbucket.errors import PassError, UsageError
from pytest_fxbucket.graph.calls import Call, calls_of, joint_problems
from pytest_fxbucket.graph.collectives import argument, read_launch
from pytest_fxbucket.graph.counted_anew import renamed, with_names_of_before
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph.pairing import mixed_launches
from pytest_fxbucket.graph.preserved import lost, other_bytes, other_readers
from pytest_fxbucket.graph.reading import read_given, read_graph
from pytest_fxbucket.graph_view.roles_by_tracer import bare_values
from pytest_fxbucket.passes.fake_values import fill_in
from pytest_fxbucket.passes.keep_order import without_kept_order

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis

Graph: TypeAlias = "fx.GraphModule | fx.Graph"
Graphs: TypeAlias = "Graph | Mapping[int, Graph]"
"""One graph, or the graph of each rank."""


def assert_invariants(before: Graphs, after: Graphs) -> None:
    """Raise AssertionError with a sentence for each invariant that ``after`` breaks; see :func:`broken_invariants`."""
    __tracebackhide__ = True
    broken = broken_invariants(before, after)
    if broken:
        raise AssertionError("\n".join([f"{len(broken)} broken after the pass:", *broken]))


def broken_invariants(before: Graphs, after: Graphs) -> list[str]:
    """A sentence for each thing that ``after``, made of ``before``, has lost, added, or would hang or race at; empty if none.

    Both are one graph, or the graphs of the same ranks; the results of fxbucket_graph and fxbucket_bucketed will do. A process
    group has the ranks that this process knows for its name, else the ranks whose graphs name it. Parameters have the names
    that the tracer gave them. In a graph that counts names anew nodes are called as in ``before``.

    Raises UsageError for other arguments, and for a graph that is both: nothing of it would be compared. Raises PassError if
    ``before`` itself is not in order.
    """
    given, made = _by_rank(before), _by_rank(after)
    if given.keys() != made.keys() or not given:
        raise UsageError(f"before has graphs of ranks {sorted(given)}, after of {sorted(made)}; give both of each")
    if any(made[rank] is graph for rank, graph in given.items()):
        raise UsageError("before is the very graph that the pass has changed; give it copy.deepcopy(before)")
    old, new = ({rank: without_kept_order(one) for rank, one in graphs.items()} for graphs in (given, made))
    names = _group_members([*old.values(), *new.values()], [*old, *new])
    seen = _Seen(names)
    problems = said_once(([rank], list(_one_rank(old[rank], graph, seen, rank))) for rank, graph in new.items())
    # Whose bytes are mixed up can only be asked of ranks that launch the same.
    return problems + (
        joint_problems(seen.calls) or list(mixed_launches({rank: (one, names) for rank, one in seen.readings.items()}))
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Calls and readings of the graphs after the pass, by rank."""

    members: Mapping[str, tuple[int, ...]]
    """Ranks of each process group."""
    calls: dict[int, list[Call]] = field(default_factory=dict)
    readings: dict[int, GraphAnalysis] = field(default_factory=dict)


def _one_rank(old: fx.Graph, new: fx.Graph, seen: _Seen, rank: int) -> Iterator[str]:
    """Problems of one rank's graph; its calls and its reading are put into ``seen``."""
    # What an input is called is read off the old graph: in the new one a launch may read parameters of many modules.
    inputs, outputs = bare_values(old)
    # For a pass an input without a name is still that input: two that look alike are not the same.
    inputs = [replace(one, role="param", fqn=f"input {at}") if one.role == "value" else one for at, one in enumerate(inputs)]
    outputs = [one if one.role == "grad" else replace(one, role="grad", fqn=f"output {at}") for at, one in enumerate(outputs)]
    before, new = read_given(old, inputs, outputs), _said(old, new)
    counts = (len(new.find_nodes(op="placeholder")), len(returned(new.output_node())))
    if counts != (len(inputs), len(outputs)):
        was = f"{len(inputs)} inputs and {len(outputs)} outputs"
        yield f"the graph has {counts[0]} inputs and {counts[1]} outputs, {was} before the pass"
        return
    try:
        after = read_graph(new, inputs, outputs, before)
    except PassError as error:
        yield str(error)
        return
    seen.readings[rank] = after
    seen.calls[rank], problems = calls_of(new, after, seen.members)
    broken = [*lost(before, after), *other_bytes(before, after), *problems]
    if len(after.problems) > len(before.problems):
        broken += [problem for problem in after.problems if problem not in before.problems]
    yield from broken
    if not broken:  # else readers may differ for what is reported already
        yield from other_readers(before, old, after, new)


def _said(old: fx.Graph, new: fx.Graph) -> fx.Graph:
    """``new`` with values where it says none, then with the names of ``old``: nodes are told by shapes, too."""
    if not all("val" in node.meta for node in new.nodes if node.op in ("placeholder", "call_function")):
        new = renamed(new, {})  # it is the caller's
        fill_in(new, old)
    return with_names_of_before(old, new)


def _by_rank(given: Any) -> dict[int, fx.Graph]:
    graphs = dict(given) if isinstance(given, Mapping) else {0: given}
    return {rank: _graph(graph) for rank, graph in graphs.items()}


def _graph(given: Any) -> fx.Graph:
    from torch import fx

    if len(phases := getattr(given, "graphs", {})) == 1:  # of what fxbucket_graph gives
        (given,) = phases.values()
    graph = getattr(given, "graph", given)  # of a GraphModule, and of what fxbucket_bucketed gives
    if not isinstance(graph, fx.Graph):
        raise UsageError(
            f"a value of type {type(given).__name__} is no graph; expected a GraphModule, a Graph, or a dict of them by rank"
        )
    return graph


def _group_members(graphs: Iterable[fx.Graph], ranks: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """Ranks of each group that a launch names: as this process knows them, else the ranks whose graphs name it.

    If a launch says that the group has more ranks than that, made-up ranks behind the largest known one fill it up.
    """
    naming: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for graph, rank in zip(graphs, ranks, strict=True):
        for node in graph.nodes:
            if (launch := read_launch(node)) is not None:
                naming.setdefault(launch.group, set()).add(rank)
                size = argument(node, "group_size")
                sizes.setdefault(launch.group, size if isinstance(size, int) else 0)
    return {group: _known(group) or _enough(members, sizes[group]) for group, members in naming.items()}


def _known(group: str) -> tuple[int, ...]:
    try:
        return group_ranks(group)
    except KeyError:
        return ()


def _enough(members: set[int], size: int) -> tuple[int, ...]:
    unseen = range(max(members) + 1, max(members) + 1 + size - len(members))
    return (*sorted(members), *unseen)
