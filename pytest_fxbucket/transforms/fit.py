"""Checks on a step that a transformation gave back: graph, roles and state fit each other, and no collective is broken."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.errors import CaptureError, PassError, text_of
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.calls import Call, calls_of
from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.graph.preserved import carried, lost, other_bytes, other_readers
from pytest_fxbucket.graph.reading import read_given, read_graph
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.step.roles import Phase, StepGraph, Value

_WRITTEN = ("param", "buffer", "state")
"""Roles of outputs that are the new value of an input."""
_CROSSING = {"setup", "steady", "cleanup"}


def refuse_unpaired(where: str, before: StepGraph, after: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Check what a transformation made of ``before``, with the ``state`` it left.

    Raises :class:`CaptureError`: one sentence that begins with ``where`` and names the input, output or state.
    """
    if not isinstance(after, StepGraph):
        raise CaptureError(f"{where} gave a value of type {type(after).__name__}; it is to give the StepGraph")
    if set(after.graphs) not in (set(before.graphs), _CROSSING):
        raise CaptureError(
            f"{where} gave a step with graphs {', '.join(after.graphs) or 'of no name'}; expected {', '.join(before.graphs)}, "
            "or setup, steady and cleanup"
        )
    _refuse_no_step(where, after)
    for phase, graph_module in after.graphs.items():
        _refuse_other_ends(where, graph_module.graph, after.inputs[phase], after.outputs[phase])
    _refuse_other_roles(where, before, after)
    for phase in after.graphs:
        _refuse_unpaired_outputs(where, after.inputs[phase], after.outputs[phase])
    _refuse_lost_on_the_way(where, after)
    _refuse_other_state(where, [value for values in after.inputs.values() for value in values], state)


def _refuse_no_step(where: str, after: StepGraph) -> None:
    """Each graph must be a graph module that gives a list, with a tuple of values for its inputs and one for its outputs."""
    for phase, graph_module in after.graphs.items():
        if not isinstance(graph_module, fx.GraphModule):
            what = type(graph_module).__name__
            raise CaptureError(f"{where} gave a value of type {what} for the {phase} graph; it is to be an fx.GraphModule")
        outputs = graph_module.graph.find_nodes(op="output")
        if not outputs or not isinstance(outputs[0].args[0], (list, tuple)):
            raise CaptureError(f"{where} left the {phase} graph without an output that is a list of its results")
        for side, values in (("inputs", after.inputs), ("outputs", after.outputs)):
            if not isinstance(values.get(phase), (list, tuple)):
                raise CaptureError(f"{where} left no {side} for the {phase} graph; the StepGraph has a tuple of Value for each")


def _refuse_other_ends(where: str, graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    try:
        graph.lint()
    except Exception as error:
        raise CaptureError(f"{where} left a graph that is not well formed: {text_of(error)[:300]}") from error
    ends = {"inputs": (inputs, graph.find_nodes(op="placeholder")), "outputs": (outputs, returned(graph.output_node()))}
    for side, (values, _) in ends.items():
        names = Counter(value.key for value in values)
        if repeated := next((name for name, count in names.items() if count > 1), None):
            raise CaptureError(f"{where} left {side} with two of {_named(*repeated)}; each has a name of its own")
    for side, (values, nodes) in ends.items():
        _refuse_other_values(where, side, values, nodes)


def _refuse_lost_on_the_way(where: str, after: StepGraph) -> None:
    """What one call hands to the next must be what that takes."""
    # Set-up runs first and clean-up last, with any number of steady calls between them, also none.
    ways: tuple[tuple[Phase, Phase], ...] = (("setup", "steady"), ("steady", "steady"), ("setup", "cleanup"))
    for giver, taker in ways:
        if giver not in after.graphs or taker not in after.graphs:
            continue
        given = {value for value in after.outputs[giver] if value.role == "carried"}
        taken = {value for value in after.inputs[taker] if value.role == "carried"}
        if odd := next(iter(sorted(given ^ taken, key=lambda value: value.fqn)), None):
            raise CaptureError(f"{where} left {_named('carried', odd.fqn)}, which {giver} gives and {taker} takes differently")


def _refuse_other_values(where: str, side: str, values: Sequence[Value], nodes: Sequence[Any]) -> None:
    if len(values) != len(nodes):
        raise CaptureError(f"{where} left a graph with {len(nodes)} {side}, but described {len(values)}")
    for value, node in zip(values, nodes, strict=True):
        found = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(found, torch.Tensor) and not _fits(value, found):
            raise CaptureError(
                f"{where} described {_named(value.role, value.fqn)} as {_kind(value.shape, value.dtype)}, but its node "
                f"among the {side} has {_kind(found.shape, found.dtype)}"
            )


def _refuse_other_roles(where: str, before: StepGraph, after: StepGraph) -> None:
    """Added inputs must be state or carried, added outputs new values of inputs or carried; only outputs of state may go."""
    had = _keys(before.inputs)
    if foreign := next((key for key in _keys(after.inputs) if key not in had and key[0] not in ("state", "carried")), None):
        raise CaptureError(f"{where} added the input {_named(*foreign)}; only state can be added")
    gave, gives = (_keys(step.outputs, state=False) for step in (before, after))
    if lost := next((key for key in gave if key not in gives), None):
        raise CaptureError(f"{where} left out the output {_named(*lost)}; only outputs of state can go")
    if new := next((key for key in gives if key not in gave and key[0] not in (*_WRITTEN, "carried")), None):
        raise CaptureError(f"{where} added the output {_named(*new)}; only new values of inputs can be added")


def _refuse_unpaired_outputs(where: str, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    given = {value.key: value for value in inputs}
    for value in outputs:
        if value.role not in _WRITTEN:
            continue
        of = given.get(value.key)
        if of is None:
            raise CaptureError(
                f"{where} left an output for {_named(value.role, value.fqn)}, which is no input; add or remove both"
            )
        if (of.shape, of.dtype) != (value.shape, value.dtype):
            raise CaptureError(
                f"{where} gives {_named(value.role, value.fqn)} a new value of {_kind(value.shape, value.dtype)}, but it is "
                f"{_kind(of.shape, of.dtype)}"
            )


def _refuse_other_state(where: str, inputs: Sequence[Value], state: Mapping[str, torch.Tensor]) -> None:
    wanted = {value.fqn: value for value in inputs if value.role == "state"}
    for fqn, value in wanted.items():
        found = state.get(fqn)
        if not isinstance(found, torch.Tensor):
            raise CaptureError(f"{where} left the input {_named('state', fqn)} without a tensor; put its first one into state")
        if not _fits(value, found):
            raise CaptureError(
                f"{where} put {_kind(found.shape, found.dtype)} into state for {fqn}, but its input is "
                f"{_kind(value.shape, value.dtype)}"
            )
    if idle := next((fqn for fqn in state if fqn not in wanted), None):
        raise CaptureError(f"{where} left {idle} in state, but no input has it; delete it from state, too")


def _fits(value: Value, tensor: torch.Tensor) -> bool:
    return value.shape == tuple(tensor.shape) and value.dtype in (None, tensor.dtype)


def _keys(values: Mapping[Any, Iterable[Value]], state: bool = True) -> list[tuple[str, str]]:
    return [value.key for several in values.values() for value in several if state or value.role != "state"]


def _named(role: str, fqn: str) -> str:
    return f"{role} {fqn}"


def _kind(shape: Any, dtype: Any) -> str:
    return f"shape {tuple(shape)} and dtype {dtype}"


# Invariants that no transformation of a step may break. They are checked after each, so that the one at fault can be named.


@dataclass(frozen=True, slots=True)
class ObservedGraph:
    """One graph of a step, read for one rank."""

    graph: fx.Graph
    reading: GraphAnalysis
    calls: list[Call]
    problems: tuple[str, ...]
    """Launches and waits that are not in order, and bytes that cannot be followed."""


def look(step: StepGraph, before: Mapping[Phase, ObservedGraph] | None = None) -> dict[Phase, ObservedGraph]:
    """Read every graph of ``step``, with its rank's process groups in place; ``before`` is what was read of an earlier one.

    Raises PassError for one that cannot be read.
    """
    known = {phase: one.reading for phase, one in (before or {}).items()}
    found: dict[Phase, ObservedGraph] = {}
    for phase, graph_module in step.graphs.items():
        graph = without_kept_order(graph_module.graph)
        values = step.inputs[phase], step.outputs[phase]
        reading = read_given(graph, *values) if before is None else read_graph(graph, *values, known.get(phase))
        calls, problems = calls_of(graph, reading, members_of_groups(graph))
        found[phase] = ObservedGraph(graph, reading, calls, (*problems, *reading.problems))
    return found


def refuse_broken(
    where: str, before: Mapping[Phase, ObservedGraph], after: Mapping[Phase, ObservedGraph], keeps_collectives: bool
) -> None:
    """Raise PassError, beginning with ``where``, for the first invariant that the step has lost.

    No launch or wait out of order that was in order before; and every collective carries what it carried, or (without
    ``keeps_collectives``) what was gathered and reduced on a process group still is, in some graph of the step.
    """
    if problem := next(_broken(before, after, keeps_collectives), ""):
        raise PassError(f"{where} broke the step: {problem}")


def _broken(
    before: Mapping[Phase, ObservedGraph], after: Mapping[Phase, ObservedGraph], keeps_collectives: bool
) -> Iterator[str]:
    # A problem counts against the transformation only if it is new. Problems are compared without the names of nodes, and each
    # old one excuses one in every graph of the new step, since one joint graph may have become three.
    known = Counter(_nameless(problem, one.graph) for one in before.values() for problem in one.problems)
    for phase, one in after.items():
        left = known.copy()
        for problem in one.problems:
            nameless = _nameless(problem, one.graph)
            if not left[nameless]:
                yield f"{problem}{_of(phase, after)}"
            left[nameless] -= 1
    if not keeps_collectives:
        # Without their places and counts: several launches of the same may have become one, in whatever graph.
        kept = {_what(one) for looked in after.values() for one in carried(looked.reading)}
        for member in (member for looked in before.values() for member in carried(looked.reading)):
            if member.fqn and _what(member) not in kept:
                what = f"{member.kind} {member.op}".rstrip()
                yield f"{what} of {member.fqn} on group {member.group} is launched no more"
        return
    for phase, old in before.items():
        if (new := after.get(phase)) is None:
            yield f"there is no graph {phase} any more"
            return
        # These sentences are written for the pass; here they are said of a transformation.
        problems = (*lost(old.reading, new.reading), *other_bytes(old.reading, new.reading))
        for problem in (*problems, *other_readers(old.reading, old.graph, new.reading, new.graph)):
            yield f"{problem.replace('before the pass', 'before it')}{_of(phase, after)}"


def _nameless(problem: str, graph: fx.Graph) -> str:
    """``problem`` without the names of nodes, which a transformation may give anew."""
    names = {node.name for node in graph.nodes}
    return re.sub(r"\w+", lambda word: "" if word[0] in names else word[0], problem)


def _what(one: object) -> tuple[object, ...]:
    return tuple(getattr(one, name) for name in ("kind", "op", "group", "fqn"))


def _of(phase: Phase, graphs: Mapping[Phase, object]) -> str:
    return f" (graph {phase})" if len(graphs) > 1 else ""
