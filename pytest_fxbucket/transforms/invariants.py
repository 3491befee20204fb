"""What no transformation of a step may break: looked at after each, so that the first that breaks one can be named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.collectives import Call, calls_of
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.buckets import Reading
from pytest_fxbucket.graph.groups import members_of_groups
from pytest_fxbucket.graph.preserved import carried, lost, other_bytes, other_readers
from pytest_fxbucket.graph.reading import read_given, read_graph
from pytest_fxbucket.passes.keep_order import without_kept_order

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Phase, StepGraph


@dataclass(frozen=True, slots=True)
class Looked:
    """What one graph of a step does, as one rank has it."""

    graph: fx.Graph
    reading: Reading
    calls: list[Call]
    problems: tuple[str, ...]
    """Launches and waits that are not in order, and bytes that cannot be followed."""


def look(step: StepGraph, before: Mapping[Phase, Looked] | None = None) -> dict[Phase, Looked]:
    """Read every graph of ``step``, with its rank's process groups in place; ``before`` is what was read of an earlier one.

    Raises PassError for one that cannot be read.
    """
    known = {phase: one.reading for phase, one in (before or {}).items()}
    found: dict[Phase, Looked] = {}
    for phase, graph_module in step.graphs.items():
        graph = without_kept_order(graph_module.graph)
        values = step.inputs[phase], step.outputs[phase]
        reading = read_given(graph, *values) if before is None else read_graph(graph, *values, known.get(phase))
        calls, problems = calls_of(graph, reading, members_of_groups(graph))
        found[phase] = Looked(graph, reading, calls, (*problems, *reading.problems))
    return found


def refuse_broken(where: str, before: Mapping[Phase, Looked], after: Mapping[Phase, Looked], keeps_collectives: bool) -> None:
    """Raise PassError, beginning with ``where``, for the first invariant that the step has lost.

    No launch or wait out of order that was in order before; and every collective carries what it carried, or (without
    ``keeps_collectives``) what was gathered and reduced on a process group still is, in some graph of the step.
    """
    if problem := next(_broken(before, after, keeps_collectives), ""):
        raise PassError(f"{where} broke the step: {problem}")


def _broken(before: Mapping[Phase, Looked], after: Mapping[Phase, Looked], keeps_collectives: bool) -> Iterator[str]:
    known = Counter(_nameless(problem, one.graph) for one in before.values() for problem in one.problems)
    for phase, one in after.items():
        left = known.copy()
        for problem in one.problems:
            nameless = _nameless(problem, one.graph)
            if not left[nameless]:
                yield f"{problem}{_of(phase, after)}"
            left[nameless] -= 1
    if not keeps_collectives:
        yield from _no_longer_carried(before, after)
        return
    for phase, old in before.items():
        if (new := after.get(phase)) is None:
            yield f"there is no graph {phase} any more"
            return
        for problem in (*lost(old.reading, new.reading), *other_bytes(old.reading, new.reading)):
            yield f"{problem.replace('before the pass', 'before it')}{_of(phase, after)}"
        for problem in other_readers(old.reading, old.graph, new.reading, new.graph):
            yield f"{problem.replace('before the pass', 'before it')}{_of(phase, after)}"


def _nameless(problem: str, graph: fx.Graph) -> str:
    """``problem`` without the names of nodes, which a transformation may give anew."""
    names = {node.name for node in graph.nodes}
    return re.sub(r"\w+", lambda word: "" if word[0] in names else word[0], problem)


def _no_longer_carried(before: Mapping[Phase, Looked], after: Mapping[Phase, Looked]) -> Iterator[str]:
    kept = {_what(one) for looked in after.values() for one in carried(looked.reading)}
    for looked in before.values():
        for one in carried(looked.reading):
            if one.fqn and _what(one) not in kept:
                yield f"{one.kind}{' ' * bool(one.op)}{one.op} of {one.fqn} on group {one.group} is launched no more"


def _what(one: object) -> tuple[object, ...]:
    return tuple(getattr(one, name) for name in ("kind", "op", "group", "fqn"))


def _of(phase: Phase, graphs: Mapping[Phase, object]) -> str:
    return f" (graph {phase})" if len(graphs) > 1 else ""
