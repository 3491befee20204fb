"""Do set-up, steady and clean-up graphs do together what the bucketed graph did, and does what moved hide behind the forward?

Read off the four graphs alone. Of what moved: reduced in no set-up, once in steady and clean-up; launched before the forward
computes, waited for right before it needs the result, and not later; made of what was handed on, of the right call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.checks.phased import Phased, is_moved
from pytest_fxbucket.checks.promised_hiding import hiding_problems
from pytest_fxbucket.graph.reductions import reductions_of
from pytest_fxbucket.graph.updates import UPDATED, ancestors
from pytest_fxbucket.units import some, times

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Phase
    from pytest_fxbucket.graph.buckets import Bucket

_HANDS_ON: tuple[Phase, ...] = ("setup", "steady")
_TAKES: tuple[Phase, ...] = ("steady", "cleanup")
_OF_OTHER_CALLS = ("hyper", "batch")


def iteration_problems(entry_of: Mapping[str, str], bucketed: Phased, graphs: Mapping[Phase, Phased]) -> list[str]:
    """Everything that ``graphs`` (setup, steady, cleanup) do not keep of ``bucketed``, one sentence each.

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


def _launches(entry_of: Mapping[str, str], bucketed: Phased, graphs: Mapping[Phase, Phased]) -> Iterator[str]:
    """What moved is launched in steady and cleanup, everything else in setup and steady, each as often as it was."""
    moved = [one for one in bucketed.reading.buckets if is_moved(entry_of, one)]
    rest = [one for one in bucketed.reading.buckets if not is_moved(entry_of, one)]
    expected = {"setup": rest, "steady": [*rest, *moved], "cleanup": moved}
    for phase, one in graphs.items():
        before, after = (Counter(map(_carries, buckets)) for buckets in (expected[phase], one.reading.buckets))
        for key in dict.fromkeys((*before, *after)):
            if before[key] != after[key]:
                yield f"graph {phase} launches the {_launch_text(key)} {times(after[key])}, expected {times(before[key])}"


def _updates(entry_of: Mapping[str, str], bucketed: Phased, graphs: Mapping[Phase, Phased]) -> Iterator[str]:
    """Each parameter and state is updated in the call that it is to be, of what it was updated of."""
    before = {(one.role, one.fqn): one for one in bucketed.reading.updates}
    for phase, one in graphs.items():
        after = {(update.role, update.fqn): update for update in one.reading.updates}
        for (role, fqn), update in before.items():
            owner = fqn if role == "param" else fqn.rpartition(".")[0]
            wanted = phase == "steady" or (owner in entry_of) == (phase == "cleanup")
            now = after.get((role, fqn))
            if (now is not None) != wanted:
                yield f"graph {phase} {'does not update' if wanted else 'updates'} {role} {fqn}"
            elif now is not None and now != update:
                yield f"graph {phase} updates {role} {fqn} of {_made_of(now)}; before it was of {_made_of(update)}"


def _handed_on(graphs: Mapping[Phase, Phased]) -> Iterator[str]:
    """Calls hand on, and are given, the same."""
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


def _own_values(entry_of: Mapping[str, str], bucketed: Phased, graphs: Mapping[Phase, Phased]) -> Iterator[str]:
    """What a call hands on is its own, and each gradient that of its parameter."""
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


def _in_place_of(entry_of: Mapping[str, str], graphs: Mapping[Phase, Phased]) -> Iterator[str]:
    """Each gradient that was handed on is reduced as that of its parameter."""
    for phase in _TAKES:
        for fqn, maker in _makers(graphs[phase]).items():
            value = graphs[phase].given.get(maker)
            if fqn in entry_of and (value is None or (value.role, value.fqn) != ("carried", fqn)):
                told = f"{value.role} {value.fqn}" if value is not None else maker.name
                yield f"graph {phase} reduces {told} as the gradient of {fqn}"


def _right_call(entry_of: Mapping[str, str], graphs: Mapping[Phase, Phased]) -> Iterator[str]:
    """What is done for the call before reads its learning rates and its data."""
    for phase in _TAKES:
        for (role, fqn), node in graphs[phase].results.items():
            owner = fqn.rpartition(".")[0] if role == "state" else fqn
            if owner not in entry_of or role not in (*UPDATED, "grad"):
                continue
            read = (graphs[phase].given[one] for one in ancestors([node]) if one in graphs[phase].given)
            if wrong := next((f"{value.role} {value.fqn}" for value in read if value.role in _OF_OTHER_CALLS), None):
                yield f"graph {phase} makes {role} {fqn} of the call before with {wrong} of this one"


_Key = tuple[str, str, str, str, tuple[tuple[str, int, int], ...]]


def _carries(bucket: Bucket) -> _Key:
    members = tuple((member.fqn, member.offset, member.numel) for member in bucket.members)
    return (bucket.direction, bucket.kind, f"{bucket.op} {bucket.dtype}", bucket.group, members)


def _launch_text(key: _Key) -> str:
    direction, kind, _, _, members = key
    return f"{direction} {kind} of {some([fqn or 'no parameter' for fqn, _, _ in members])}"


def _made_of(update: Any) -> str:
    gradients = [f"the gradient of {fqn}" for fqn in sorted(update.gradients)]
    return some([*gradients, *(f"the norm of the gradient of {fqn}" for fqn in sorted(update.norms)), *sorted(update.inputs)])


def _makers(one: Phased) -> dict[str, fx.Node]:
    """By parameter what made its gradient, before it was reduced."""
    found = reductions_of(one.nodes[0].graph, one.inputs, one.outputs)
    return {fqn: maker for each in found if not each.level for fqn, maker in zip(each.fqns, each.makers, strict=True)}


def _origin(node: fx.Node) -> fx.Node:
    """What ``node`` is, or is a copy of."""
    return node.all_input_nodes[0] if str(node.target).startswith("aten.clone") else node
