"""From module paths to places in a graph: a cut is behind the last node of the module's one call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from pytest_fxbucket.capture.names import Call
from pytest_fxbucket.errors import StageError
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.words import nearest, show, some, times


def cut_places(cuts: Any, calls: Mapping[str, Sequence[Call]], modules: Mapping[str, str], work: Sequence[int]) -> list[int]:
    """The place of each of ``cuts``, ascending: nodes from there on are of the next stage.

    ``modules`` gives the name in ``calls`` of each module path; ``work`` are the places of the nodes that compute. Raises
    :class:`StageError` for cuts that do not part the graph.
    """
    if isinstance(cuts, str) or not isinstance(cuts, Sequence) or not cuts or not all(isinstance(cut, str) for cut in cuts):
        raise StageError(f"cuts is {show(cuts)}, expected a list of module paths, such as {_example(modules)}")
    places = [_place(cut, calls, modules, work) for cut in cuts]
    # Cuts are compared by how much work is before them: two different places with nothing that computes between are one cut.
    ranks = [bisect_left(work, place) for place in places]
    in_order = [cut for _, cut in sorted(zip(ranks, cuts, strict=True), key=lambda pair: pair[0])]
    for (rank, cut), (next_rank, next_cut) in pairwise(zip(ranks, cuts, strict=True)):
        if next_rank < rank:
            raise StageError(
                f'cut "{next_cut}" stands behind "{cut}", but the forward ends it before; write the cuts as it runs them: '
                f"{some([show(one) for one in in_order], 10)}"
            )
        if next_rank == rank:
            raise StageError(
                f'cuts "{cut}" and "{next_cut}" are at one place: nothing runs between their ends, and the stage there '
                "would be empty; leave one of them out"
            )
    if ranks[0] == 0:
        raise StageError(f'nothing runs before the end of cut "{cuts[0]}", so the first stage would be empty; leave it out')
    if ranks[-1] == len(work):
        raise StageError(
            f'cut "{cuts[-1]}" cuts nothing off, since nothing of the model runs behind it; leave it out, or cut behind a '
            "module that ends before"
        )
    return places


def modules_to_cut_behind(calls: Mapping[str, Sequence[Call]], work: Sequence[int]) -> dict[str, int]:
    """FQNs of modules that are called once, with work before and behind their ends; each with how much of ``work`` is before.

    A module comes before the modules inside it.
    """
    ends = {fqn: bisect_left(work, calls[fqn][0][1]) for fqn in calls if fqn and len(calls[fqn]) == 1}
    return {fqn: ends[fqn] for fqn in sorted(ends, key=lambda fqn: (fqn.count("."), fqn)) if 0 < ends[fqn] < len(work)}


@contextmanager
def naming_plan(plan: Plan) -> Iterator[None]:
    """While inside, a :class:`StageError` names the plan's table."""
    try:
        yield
    except StageError as error:
        raise StageError(f"{plan.path}: [pipeline]: {error}") from error


def _place(cut: str, calls: Mapping[str, Sequence[Call]], modules: Mapping[str, str], work: Sequence[int]) -> int:
    if cut not in modules:
        raise StageError(f'cut "{cut}" is no module of the model{nearest(cut, [fqn for fqn in modules if fqn])}')
    found = calls.get(modules[cut], ())
    if len(found) == 1:
        return found[0][1]
    called = f"called {times(len(found))}" if found else "never called"
    raise StageError(
        f'cut "{cut}" is {called} in forward, expected once, since a stage ends behind its one call; '
        f"{_instead(modules[cut], calls, work)}"
    )


def _instead(fqn: str, calls: Mapping[str, Sequence[Call]], work: Sequence[int]) -> str:
    """What to cut behind instead: modules that end next to the first call of ``fqn``; without a call one in it or around it."""
    ends = modules_to_cut_behind(calls, work)
    if not ends:
        return "no module of the model is a place for a cut"
    if near := _next_to_call(calls[fqn][0], ends, work) if fqn in calls else []:
        return f"cut behind {', or '.join(near)}"
    if within := [other for other in ends if other.startswith(f"{fqn}.")]:
        return f'cut behind "{max(within, key=ends.__getitem__)}", which is part of it'
    # ``ends`` has a module before those inside it, so the last one around is the innermost.
    around = [other for other in ends if fqn.startswith(f"{other}.")]
    return (
        f'cut behind "{around[-1]}", which it is part of' if around else f'cut behind one that is, such as "{next(iter(ends))}"'
    )


def _next_to_call(call: Call, ends: Mapping[str, int], work: Sequence[int]) -> list[str]:
    """The module that ends last before ``call``, and the one that ends first behind it."""
    begin, end = (bisect_left(work, place) for place in call)
    before = [fqn for fqn in ends if ends[fqn] <= begin]
    # Around a call in which nothing computes a module that ends there would be on both sides.
    behind = [fqn for fqn in ends if ends[fqn] >= end and fqn not in before]
    said = [f'"{max(before, key=ends.__getitem__)}", which ends before its first call'] if before else []
    if behind:
        said.append(f'"{min(behind, key=ends.__getitem__)}", which ends behind {"it" if said else "its first call"}')
    return said


def _example(modules: Mapping[str, str]) -> str:
    return f"[{show(next((fqn for fqn in modules if fqn), 'layers.0'))}]"
