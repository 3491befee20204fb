"""Set-up, steady and clean-up graphs: do they do together what the bucketed graph did, and is what moved hidden by forward?

The block is the part that moved into the next call: reductions and updates of some entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.checks.promises.updates import made_of_text
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph.update_provenance import reductions_of
from pytest_fxbucket.graph.updates import UPDATED
from pytest_fxbucket.graph.walks import ancestors
from pytest_fxbucket.words import some, times

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
    from pytest_fxbucket.step.roles import Phase, Value


@dataclass(frozen=True)
class ReadPhase:
    """One graph of a step, read, with its inputs and outputs."""

    reading: GraphAnalysis
    inputs: Sequence[Value]
    outputs: Sequence[Value]

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """All nodes, in order."""
        assert self.reading.order is not None
        return self.reading.order.nodes

    @cached_property
    def input_values(self) -> dict[fx.Node, Value]:
        """Input nodes, with the value that each is."""
        return dict(zip((node for node in self.nodes if node.op == "placeholder"), self.inputs, strict=True))

    def role(self, node: fx.Node) -> str:
        """Role of an input; empty for other nodes."""
        return self.input_values[node].role if node in self.input_values else ""

    @cached_property
    def results(self) -> dict[tuple[str, str], Any]:
        """By role and name, the node or constant that is returned."""
        return {v.key: node for node, v in zip(returned(self.nodes[-1]), self.outputs, strict=True)}


def is_moved(entry_of: Mapping[str, str], bucket: Bucket) -> bool:
    """Whether ``bucket`` reduces a gradient of a parameter that moves, that is one in ``entry_of``."""
    return bucket.kind in REDUCTIONS and not entry_of.keys().isdisjoint(bucket.fqns)


# Does the block hide behind the forward of the next call? It is launched first, and waited for right before somebody needs it.


def hidden_by_nothing(entry_of: Mapping[str, str], steady: ReadPhase) -> list[str]:
    """Entries whose parameters are needed before any forward compute: they move, but nothing hides their reduction."""
    computes = _forward(steady.reading)
    return [
        entry
        for entry in dict.fromkeys(entry_of.values())
        if not computes or _needed(entry_of, entry, steady.reading) <= computes[0][0]
    ]


def hiding_problems(entry_of: Mapping[str, str], steady: ReadPhase) -> Iterator[str]:
    """Sentences on reductions launched behind forward compute or waited for too early, and on parameters read too early."""
    # Only compute in front of the first reader of the new parameters can hide a reduction. Of reductions that follow each
    # other, only the first can be launched at the top, and only the last can be waited for right before the reader.
    reading, computes = steady.reading, _forward(steady.reading)
    joined = _joined(entry_of, steady)
    for entry in dict.fromkeys(entry_of.values()):
        own = [b for b in reading.buckets if is_moved(entry_of, b) and entry in {entry_of.get(fqn) for fqn in b.fqns}]
        needed = min(_needed(entry_of, other, reading) for other in joined[entry])
        last = max((bucket.level for bucket in own), default=0)
        for bucket in own:
            before = [fqn for place, fqn in computes if place < min(bucket.launch, needed)]
            if bucket.level == 0 and before:
                yield f"the {bucket.kind} of {entry} is launched behind the compute of {before[0]}, which could hide it"
            behind = [fqn for place, fqn in computes if bucket.wait is not None and bucket.wait < place < needed]
            if bucket.level == last and behind:
                yield f"the {bucket.kind} of {entry} is waited for before the compute of {behind[-1]}, which could hide it"
        yield from _stale(entry_of, entry, steady)


def _joined(entry_of: Mapping[str, str], steady: ReadPhase) -> dict[str, set[str]]:
    """By entry, the entries with which it shares nodes of the update, and itself: it must be done before any is needed."""
    # One walk over the work for the call before, which carries along from which entries' reductions each node is made.
    joined = {entry: {entry} for entry in entry_of.values()}
    made_of: dict[fx.Node, set[str]] = {}
    for bucket in steady.reading.buckets:
        for wait in bucket.waits if is_moved(entry_of, bucket) else ():
            made_of[steady.nodes[wait]] = {entry_of[fqn] for fqn in bucket.fqns if fqn in entry_of}
    for place in sorted(steady.reading.late):
        node = steady.nodes[place]
        own = made_of.setdefault(node, set()).union(*(made_of.get(source, ()) for source in node.all_input_nodes))
        made_of[node] = own
        for entry in own:
            joined[entry] |= own
    return joined


def _stale(entry_of: Mapping[str, str], entry: str, steady: ReadPhase) -> Iterator[str]:
    """A sentence for each parameter of ``entry`` that is read as it was before its update."""
    reading = steady.reading
    made = {fqn: node for (role, fqn), node in steady.results.items() if role == "param" and entry_of.get(fqn) == entry}
    new = set(made.values())
    old = {node: value.fqn for node, value in steady.input_values.items() if value.role == "param" and value.fqn in made}
    late = {steady.nodes[place] for place in reading.late} | {steady.nodes[place] for place in reading.updating}
    for node, fqn in old.items():
        reader = next((user for user in node.users if user not in late and user.op != "output"), None)
        if reader is not None and node not in new:
            yield f"{reader.name} reads {fqn} as the call before found it, not as it left it"


def _needed(entry_of: Mapping[str, str], entry: str, reading: GraphAnalysis) -> int:
    """Position at which the first of ``entry``'s parameters is gathered, or read if it needs no gather."""
    gathers = (
        bucket.launch
        for bucket in reading.buckets
        if bucket.kind == "all_gather" and any(entry_of.get(fqn) == entry for fqn in bucket.fqns)
    )
    reads = (place for place, fqn in _forward(reading) if entry_of.get(fqn) == entry)
    return min((*gathers, *reads), default=reading.last)


def _forward(reading: GraphAnalysis) -> list[tuple[int, str]]:
    """Forward compute, in order."""
    return [(place, fqn) for place, direction, fqn in reading.computes if direction == "forward" and place not in reading.late]


# Do set-up, steady and clean-up graphs do together what the bucketed graph did, and does the block hide behind the forward?
#
# Read off the four graphs alone. The block must be in steady and clean-up once, and not in set-up. It must be launched before
# forward compute and waited for right before the forward needs its result. It must be made of values of the right call.


_HANDS_ON: tuple[Phase, ...] = ("setup", "steady")
_TAKES: tuple[Phase, ...] = ("steady", "cleanup")
_OF_OTHER_CALLS = ("hyper", "batch")


def iteration_problems(entry_of: Mapping[str, str], bucketed: ReadPhase, graphs: Mapping[Phase, ReadPhase]) -> list[str]:
    """How ``graphs`` (setup, steady, cleanup) together differ from ``bucketed``, one sentence each.

    ``entry_of`` has the parameters that are to be reduced and updated in the next call, with their entries.
    """
    found = [
        f"graph {phase} cannot be followed: {problem}" for phase, one in graphs.items() for problem in one.reading.problems
    ]
    if found:
        return found
    found += _launches(entry_of, bucketed, graphs)
    found += _updates(entry_of, bucketed, graphs)
    found += _handed_on(graphs)
    found += _own_values(entry_of, bucketed, graphs)
    found += _in_place_of(entry_of, graphs)
    found += _right_call(entry_of, graphs)
    found += hiding_problems(entry_of, graphs["steady"])
    return list(dict.fromkeys(found))


def _launches(entry_of: Mapping[str, str], bucketed: ReadPhase, graphs: Mapping[Phase, ReadPhase]) -> Iterator[str]:
    """Launches of the block must be in steady and cleanup, all others in setup and steady, each as often as before."""
    moved = [one for one in bucketed.reading.buckets if is_moved(entry_of, one)]
    rest = [one for one in bucketed.reading.buckets if not is_moved(entry_of, one)]
    expected = {"setup": rest, "steady": [*rest, *moved], "cleanup": moved}
    for phase, one in graphs.items():
        before, after = (Counter(map(_carries, buckets)) for buckets in (expected[phase], one.reading.buckets))
        for key in dict.fromkeys((*before, *after)):
            if before[key] != after[key]:
                yield f"graph {phase} launches the {_launch_text(key)} {times(after[key])}, expected {times(before[key])}"


def _updates(entry_of: Mapping[str, str], bucketed: ReadPhase, graphs: Mapping[Phase, ReadPhase]) -> Iterator[str]:
    """Each parameter and state must be updated in the right graphs, and be made of the same gradients and inputs as before."""
    before = {(one.role, one.fqn): one for one in bucketed.reading.updates}
    for phase, one in graphs.items():
        after = {(update.role, update.fqn): update for update in one.reading.updates}
        for (role, fqn), update in before.items():
            # State has the name of its parameter, and behind that its own.
            owner = fqn if role == "param" else fqn.rpartition(".")[0]
            # Steady updates everything, of this call or the one before; clean-up what moved, set-up all the rest.
            wanted = phase == "steady" or (owner in entry_of) == (phase == "cleanup")
            now = after.get((role, fqn))
            if (now is not None) != wanted:
                yield f"graph {phase} {'does not update' if wanted else 'updates'} {role} {fqn}"
            elif now is not None and now != update:
                of, before_of = some(made_of_text(now)), some(made_of_text(update))
                yield f"graph {phase} updates {role} {fqn} of {of}; before it was of {before_of}"


def _handed_on(graphs: Mapping[Phase, ReadPhase]) -> Iterator[str]:
    """All graphs must hand on, and be given, the same carried values."""
    given = {value for value in graphs["setup"].outputs if value.role == "carried"}
    steady, cleanup = graphs["steady"], graphs["cleanup"]
    for phase, what, values in (
        ("steady", "is given", steady.inputs),
        ("steady", "hands on", steady.outputs),
        ("cleanup", "is given", cleanup.inputs),
    ):
        if odd := given ^ {value for value in values if value.role == "carried"}:
            names = some(sorted(value.fqn for value in odd))
            yield f"graph {phase} {what} other values than setup hands on: {names}"


def _own_values(entry_of: Mapping[str, str], bucketed: ReadPhase, graphs: Mapping[Phase, ReadPhase]) -> Iterator[str]:
    """Values handed on must be of the call that hands them on, and each gradient that of the parameter that it is named by."""
    # An input may be handed on only as a copy: its memory may be written before the next call reads it.
    makers = _makers(bucketed)
    for phase in _HANDS_ON:
        late = {graphs[phase].nodes[place] for place in graphs[phase].reading.late}
        for (role, fqn), node in graphs[phase].results.items():
            if role != "carried":
                continue
            if node in late or graphs[phase].role(node) == "carried":
                yield f"graph {phase} hands on {fqn} of the call before, not its own"
            elif graphs[phase].role(node):
                yield f"graph {phase} hands on {fqn} as it is, where the next call may find it changed"
            elif fqn in entry_of and fqn in makers and _origin(node).name != makers[fqn].name:
                yield f"graph {phase} hands on {_origin(node).name} as the gradient of {fqn}, which {makers[fqn].name} makes"


def _in_place_of(entry_of: Mapping[str, str], graphs: Mapping[Phase, ReadPhase]) -> Iterator[str]:
    """Each gradient that was handed on must be reduced as that of its parameter."""
    for phase in _TAKES:
        for fqn, maker in _makers(graphs[phase]).items():
            value = graphs[phase].input_values.get(maker)
            if fqn in entry_of and (value is None or value.key != ("carried", fqn)):
                told = f"{value.role} {value.fqn}" if value is not None else maker.name
                yield f"graph {phase} reduces {told} as the gradient of {fqn}"


def _right_call(entry_of: Mapping[str, str], graphs: Mapping[Phase, ReadPhase]) -> Iterator[str]:
    """Work for the call before must read learning rates and data of that call, not of this one."""
    for phase in _TAKES:
        for (role, fqn), node in graphs[phase].results.items():
            owner = fqn.rpartition(".")[0] if role == "state" else fqn
            if owner not in entry_of or role not in (*UPDATED, "grad"):
                continue
            read = (graphs[phase].input_values[one] for one in ancestors([node]) if one in graphs[phase].input_values)
            if wrong := next((f"{value.role} {value.fqn}" for value in read if value.role in _OF_OTHER_CALLS), None):
                yield f"graph {phase} makes {role} {fqn} of the call before with {wrong} of this one"


_Key = tuple[str, str, str, str, tuple[tuple[str, int, int], ...]]


def _carries(bucket: Bucket) -> _Key:
    members = tuple((member.fqn, member.offset, member.numel) for member in bucket.members)
    return (bucket.direction, bucket.kind, f"{bucket.op} {bucket.dtype}", bucket.group, members)


def _launch_text(key: _Key) -> str:
    direction, kind, _, _, members = key
    return f"{direction} {kind} of {some([fqn or 'no parameter' for fqn, _, _ in members])}"


def _makers(one: ReadPhase) -> dict[str, fx.Node]:
    """By parameter, the node that made its gradient, before the gradient was reduced."""
    found = reductions_of(one.nodes[0].graph, one.inputs, one.outputs)
    # A reduction of a higher level is given what a lower one brought.
    return {fqn: maker for each in found if not each.level for fqn, maker in zip(each.fqns, each.makers, strict=True)}


def _origin(node: fx.Node) -> fx.Node:
    """The node that ``node`` is a copy of, or itself."""
    return node.all_input_nodes[0] if str(node.target).startswith("aten.clone") else node
