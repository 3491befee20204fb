"""Would the ranks' graphs hang, or read what has not arrived? Found before anything runs.

Within a graph (:func:`calls_of`): every launch is waited for exactly once, its result is read by nobody before, and its buffers
are left alone meanwhile. Across ranks (:func:`joint_problems`): on every process group the same collectives in the same order;
and no circle in "must be launched before", joined over all groups. A launch is taken to need all its members: that is the order
that NCCL asks for when several communicators are in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.graph import collectives, ops, storages
from pytest_fxbucket.graph.effects import written_arguments

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import GraphAnalysis

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One event of a rank: a launch, or the wait for one."""

    is_wait: bool
    number: int
    """Number of the launch in the graph, from 0 on."""
    name: str
    """Operator and node, for messages."""
    group: Ranks
    says: tuple[str, ...]
    """What all members must agree in: operator, reduction, dtype, elements, source of a broadcast, twin of the group."""
    received: tuple[int, ...] = ()
    """Of an all-to-all that gives its split sizes: rows that it receives of each member; else empty."""
    sent: tuple[int, ...] = ()
    """Likewise, rows that it sends to each member."""


def calls_of(graph: fx.Graph, reading: GraphAnalysis, ranks_of: Mapping[str, Ranks]) -> tuple[list[Call], list[str]]:
    """Launches and waits of one rank's graph in order, and what is wrong with them inside the graph.

    ``reading`` is of the same graph: sizes come from it, not from the nodes' metadata.
    """
    sizes = {bucket.node: (ops.dtype_name(bucket.dtype), str(bucket.numel)) for bucket in reading.buckets}
    launched: dict[fx.Node, Call] = {}
    calls: list[Call] = []
    problems: list[str] = []
    for node in graph.nodes:
        launch = collectives.read_launch(node)
        if launch is not None:
            name, ranks = f"{launch.operator} ({node.name})", ranks_of.get(launch.group, ())
            if launch.group not in ranks_of:
                problems.append(f"{name} runs on process group {launch.group!r}, which does not exist")
            if ranks and isinstance(launch.ranks, int) and launch.ranks != len(ranks):
                problems.append(f"{name} says that its group has {launch.ranks} ranks, but it has {len(ranks)}")
            source = collectives.argument(node, "src")  # of a broadcast, whose members must mean the same rank
            from_rank = () if source is None else (f"from {source}",)
            dtype, numel = sizes[node.name]
            received, sent = collectives.rows_exchanged(node)
            # A group and its twin have the same ranks and are two communicators: who launches on the one waits for ever for
            # who launches on the other.
            on_twin = ("on a process group of its own",) if launch.group != untwinned(launch.group) else ()
            # With split sizes ranks may send different amounts: those are compared pair by pair instead.
            says = (launch.operator, launch.op, dtype, *(() if sent else (numel,)), *from_rank, *on_twin)
            launched[node] = Call(False, len(launched), name, ranks, says, received, sent)
            calls.append(launched[node])
        elif collectives.is_wait(node):
            source = _launched(node)
            if source is not None and source in launched:
                of = launched[source]
                calls.append(Call(True, of.number, of.name, of.group, ()))
            else:
                problems.append(f"{node.name} waits for {source}, which no collective launched")
        elif (hidden := _hidden(node)) is not None:
            problems.append(f"{node.name} calls {hidden}, which communicates in a way that cannot be followed")
    return calls, [*problems, *_launch_problems(graph, list(launched))]


def joint_problems(calls: Mapping[int, list[Call]]) -> list[str]:
    """What is wrong across ranks; ``calls`` maps each rank that was looked at to its events."""
    groups = sorted({call.group for events in calls.values() for call in events})
    problems = [problem for group in groups for problem in _same_on_group(group, calls)]
    # A circle is looked for only if all groups agree: it matches launches by their number on the group.
    return problems or list(_circle(calls))


def _launch_problems(graph: fx.Graph, launches: list[fx.Node]) -> Iterator[str]:
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for launch in launches:
        name = f"{launch.target} ({launch.name})"
        results = [user for user in launch.users if _is_getitem(user)] or [launch]
        for result in results:
            yield from _result_problems(name, result)
        waits = [position[wait] for wait in collectives.waits_of(launch)]
        yield from _busy_storage(launch, name, nodes[position[launch] + 1 : min(waits, default=len(nodes))])


def _result_problems(name: str, result: fx.Node) -> Iterator[str]:
    waits = [user for user in result.users if collectives.is_wait(user)]
    if not waits:
        yield f"{name} is never waited for"
    elif len(waits) > 1:
        yield f"{name} is waited for {len(waits)} times, expected once"
    early = [user for user in result.users if not collectives.is_wait(user)]
    if early:
        yield f"{name} is read by {early[0].target} ({early[0].name}) without waiting for it"


def _busy_storage(launch: fx.Node, name: str, meanwhile: list[fx.Node]) -> Iterator[str]:
    """Until the wait the buffers belong to the collective: nobody writes its input, nobody touches its output buffer."""
    sent = [storages.place(node) for node in launch.all_input_nodes]
    received = [storages.place(node) for node in written_arguments(launch)]
    for node in meanwhile:
        if storages.is_part(node):  # reads nothing
            continue
        if any(storages.place(target).meets(place) for target in _written(node) for place in sent):
            yield f"{node.target} ({node.name}) writes to a buffer of {name} before its wait"
        elif any(storages.place(s).meets(place) for s in node.all_input_nodes if s is not launch for place in received):
            yield f"{node.target} ({node.name}) reads the buffer of {name} before its wait"


def _written(node: fx.Node) -> list[fx.Node]:
    """Nodes that ``node`` writes: by its operator's schema or, for a method, by its name (in-place methods end in ``_``)."""
    if node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__"):
        return node.all_input_nodes[:1]
    return written_arguments(node)


_HIDDEN = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")


def _hidden(node: fx.Node) -> str | None:
    """Name of what communicates at ``node`` without being a functional collective; None if nothing does.

    That is an operator of raw c10d, a packet without an overload, or a Python function of ``torch.distributed``.
    """
    if node.op != "call_function" or collectives.launch_kind(node) is not None:
        return None
    operator = ops.overload(node)
    name = operator._schema.name if operator else str(getattr(node.target, "_qualified_op_name", ""))
    if name.startswith(_HIDDEN) and not name.endswith("::_wrap_tensor_autograd"):
        return name if operator else f"{name} without naming an overload"
    module = str(getattr(node.target, "__module__", ""))
    if operator is None and not name and module.startswith("torch.distributed"):
        return f"{module}.{getattr(node.target, '__qualname__', node.target)}"
    return None


def _launched(wait: fx.Node) -> fx.Node | None:
    source = next(iter(wait.all_input_nodes), None)
    return source.all_input_nodes[0] if source is not None and _is_getitem(source) else source


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _same_on_group(group: Ranks, calls: Mapping[int, list[Call]]) -> Iterator[str]:
    """Do all members of ``group`` launch the same on it, in the same order? Says the first difference."""
    members = [rank for rank in group if rank in calls]
    launches = {rank: [c for c in calls[rank] if not c.is_wait and c.group == group] for rank in members}
    for rank in members[1:]:
        first, other = launches[members[0]], launches[rank]
        for index, (a, b) in enumerate(zip(first, other, strict=False)):
            if a.says != b.says:
                yield (
                    f"collective {index + 1} on ranks {_span(group)} differs: rank {members[0]} launches "
                    f"{a.name} {' '.join(a.says[1:])}, rank {rank} launches {b.name} {' '.join(b.says[1:])}"
                )
                return
        if len(first) != len(other):
            longer, shorter = (members[0], rank) if len(first) > len(other) else (rank, members[0])
            extra = max(first, other, key=len)[min(len(first), len(other))]
            yield f"rank {longer} launches {extra.name} on ranks {_span(group)}, which rank {shorter} never does"
            return
    yield from _exchanged(group, launches)


def _exchanged(group: Ranks, launches: Mapping[int, list[Call]]) -> Iterator[str]:
    """Does each member receive what the others send it? Says the first launch of ``group`` in which one does not."""
    for number, calls in enumerate(zip(*launches.values(), strict=True), 1):
        of = {group.index(rank): call for rank, call in zip(launches, calls, strict=True) if call.sent or call.received}
        for (here, one), (there, other) in product(of.items(), repeat=2):
            if len(one.sent) != len(group) or len(other.received) != len(group):
                continue
            if (sent := one.sent[there]) != (due := other.received[here]):
                yield (
                    f"collective {number} on ranks {_span(group)} differs: rank {group[here]} sends {sent} rows to rank "
                    f"{group[there]} by {one.name}, which expects {due} of it"
                )
                return


def _circle(calls: Mapping[int, list[Call]]) -> Iterator[str]:
    """A circle in "launched before" and "finished before", joined through the groups."""
    # A point is a launch on a group, the same for all members. On each rank it comes behind the launch before it and behind all
    # launches waited for since. If all ranks' chains together have no circle, there is an order in which all can run.
    order: TopologicalSorter[tuple[Ranks, int]] = TopologicalSorter()
    names: dict[tuple[Ranks, int], str] = {}
    for rank in sorted(calls):
        counts: dict[Ranks, int] = {}
        keys: dict[int, tuple[Ranks, int]] = {}
        needs: list[tuple[Ranks, int]] = []
        for call in calls[rank]:
            if call.is_wait:
                needs.append(keys[call.number])
                continue
            key = (call.group, counts.get(call.group, 0))
            counts[call.group] = key[1] + 1
            keys[call.number] = key
            names.setdefault(key, f"{call.name} on ranks {_span(call.group)}")
            order.add(key, *needs)
            needs = [key]
    try:
        order.prepare()
    except CycleError as error:
        circle = " -> ".join(names[key] for key in error.args[1])
        yield f"the ranks would wait for each other in a circle: {circle}"


def _span(ranks: Ranks) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(str(rank) for rank in ranks) or "of an unknown group"
