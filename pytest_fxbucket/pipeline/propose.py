"""Cuts that balance stages: a contiguous partition whose largest part is as small as can be, by dynamic programming."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, get_args

from torch import fx, nn

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.graph.flops import flops_of
from pytest_fxbucket.pipeline.cut import modules_to_cut_behind
from pytest_fxbucket.pipeline.seconds import seconds_of_parts
from pytest_fxbucket.pipeline.split import forward_of, work_of
from pytest_fxbucket.pipeline.trace import PLACE, Forward
from pytest_fxbucket.pipeline.values import called_with
from pytest_fxbucket.words import counted, show

Balance = Literal["parameters", "flops", "seconds"]


def proposed_cuts(model_or_graph: nn.Module, count: int, example_inputs: Any, by: Balance = "parameters") -> list[str]:
    """Cuts for ``count`` stages that make the largest one as small as can be.

    By elements of parameters, by FLOPs of forward, or by seconds of forward and backward, which are measured here and now on
    ``example_inputs``, each the median of several runs. They are behind the outermost numbered modules (those of a
    ``ModuleList`` or ``Sequential``), or, where these are too few, behind modules of any kind. A parameter that several stages
    read counts in each. The same model gives the same cuts, but for those by seconds.
    """
    if by not in get_args(Balance):
        raise StageError(f'by is {show(by)}, expected "parameters", "flops" or "seconds"')
    if not isinstance(count, int) or count < 2:
        raise StageError(f"count is {show(count)}, expected a number of stages, 2 or more")
    trace = partial(forward_of, model_or_graph, example_inputs)
    forward, called = trace(), called_with(example_inputs)
    return cuts_of_forward(forward, count, by, partial(seconds_of_parts, trace, *called))


def cuts_of_forward(forward: Forward, count: int, by: str, seconds_of: Callable[[Sequence[str]], Sequence[float]]) -> list[str]:
    """The same of a forward that is traced already; ``seconds_of`` gives what the stages of some cuts take."""
    ends = _ends(forward, outermost=True)
    if len(ends) < count - 1:
        ends = _ends(forward, outermost=False)
    if len(ends) < count - 1:
        most = f"; {len(ends) + 1} is the most" if ends else ""
        raise StageError(f"the model has {counted(len(ends), 'module')} to cut behind, too few for {count} stages{most}")
    places = sorted(ends)
    if by == "seconds":
        parts = seconds_of([ends[place] for place in places])
        costs: list[list[Any]] = [list(accumulate(parts[first:])) for first in range(len(parts))]
    else:
        costs = _parameters(forward, places) if by == "parameters" else _flops(forward, places)
    return [ends[places[part]] for part in smallest_largest(costs, count)]


def smallest_largest(costs: Sequence[Sequence[float]], count: int) -> list[int]:
    """Behind which parts to cut, for ``count`` runs of parts of which the costliest costs least; the earliest of equal ones.

    ``costs[i][j]`` is what the parts from ``i`` to ``i + j`` cost together, no less than a run within them.
    """
    size = len(costs)
    best: list[tuple[float, list[int]]] = [(costs[0][end], []) for end in range(size)]
    for cuts in range(count - 1):
        best = [
            min(
                ((max(best[cut][0], costs[cut + 1][end - cut - 1]), [*best[cut][1], cut]) for cut in range(cuts, end)),
                default=best[end],  # too few parts for so many runs; nobody reads it
            )
            for end in range(size)
        ]
    return best[-1][1]


def _ends(forward: Forward, outermost: bool) -> dict[int, str]:
    """Places behind modules that are called once, with something before and behind, each with the module's FQN."""
    work = work_of(forward)
    found: dict[int, str] = {}
    numbered = {fqn for fqn in forward.calls if fqn.rpartition(".")[2].isdigit()}
    for fqn, before in modules_to_cut_behind(forward.calls, work).items():
        around = fqn.split(".")
        is_inner = any(".".join(around[:depth]) in numbered for depth in range(1, len(around)))
        if not outermost or (fqn in numbered and not is_inner):
            found.setdefault(work[before], fqn)  # of several that end there the outermost
    return found


def _by_part(forward: Forward, places: Sequence[int]) -> list[list[fx.Node]]:
    parts: list[list[fx.Node]] = [[] for _ in range(len(places) + 1)]
    for node in forward.graph_module.graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            parts[bisect_right(places, node.meta[PLACE])].append(node)
    return parts


def _parameters(forward: Forward, places: Sequence[int]) -> list[list[int]]:
    sizes = {fqn: parameter.numel() for fqn, parameter in forward.parameters.items()}
    read = [{forward.held.get(s, "") for node in part for s in node.all_input_nodes} for part in _by_part(forward, places)]
    return _of_runs(read, lambda fqns: sum(sizes.get(fqn, 0) for fqn in fqns))


def _flops(forward: Forward, places: Sequence[int]) -> list[list[int]]:
    parts = [set(part) for part in _by_part(forward, places)]
    flops = {node: flops_of(node) for part in parts for node in part}
    return _of_runs(parts, lambda nodes: sum(map(flops.__getitem__, nodes)))


def _of_runs(parts: Sequence[set[Any]], cost: Callable[[set[Any]], int]) -> list[list[int]]:
    """For each part what it costs alone, with the next one, and so on: the cost of what they have together."""
    found = []
    for begin in range(len(parts)):
        together, costs = set[Any](), list[int]()
        total = 0
        for part in parts[begin:]:
            total += cost(part - together)
            together |= part
            costs.append(total)
        found.append(costs)
    return found
