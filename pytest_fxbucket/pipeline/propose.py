"""Cuts that balance stages: a contiguous partition whose largest part is as small as can be, by dynamic programming.

The cost of a part is its parameters, its FLOPs, or its seconds, which are measured here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from pytest_fxbucket.compat import pytree, tracing
from pytest_fxbucket.errors import StageError
from pytest_fxbucket.graph.flops import flops_of
from pytest_fxbucket.pipeline.cut import modules_to_cut_behind
from pytest_fxbucket.pipeline.split import forward_of, split_forward, work_of
from pytest_fxbucket.pipeline.stages import Stage, Stages
from pytest_fxbucket.pipeline.trace import PLACE, Forward
from pytest_fxbucket.pipeline.values import called_with
from pytest_fxbucket.words import counted, show

Balance = Literal["parameters", "flops", "seconds"]


def proposed_cuts(model_or_graph: nn.Module, count: int, example_inputs: Any, by: Balance = "parameters") -> list[str]:
    """Cuts for ``count`` stages that make the largest one as small as can be.

    Size is elements of parameters, FLOPs of forward, or seconds of forward and backward. Seconds are measured here and now on
    ``example_inputs``, each the median of several runs. Cuts are behind the outermost numbered modules (those of a
    ``ModuleList`` or ``Sequential``), or, where these are too few, behind modules of any kind. A parameter that several stages
    read counts in each. The same model gives the same cuts, except by seconds.
    """
    if by not in get_args(Balance):
        raise StageError(f'by is {show(by)}, expected "parameters", "flops" or "seconds"')
    if not isinstance(count, int) or count < 2:
        raise StageError(f"count is {show(count)}, expected a number of stages, 2 or more")
    trace = partial(forward_of, model_or_graph, example_inputs)
    forward, called = trace(), called_with(example_inputs)
    return cuts_of_forward(forward, count, by, partial(seconds_of_parts, trace, *called))


def cuts_of_forward(forward: Forward, count: int, by: str, seconds_of: Callable[[Sequence[str]], Sequence[float]]) -> list[str]:
    """Like :func:`proposed_cuts`, for a traced forward; ``seconds_of`` gives the seconds of each stage that given cuts make."""
    ends = _ends(forward, outermost=True)
    if len(ends) < count - 1:
        ends = _ends(forward, outermost=False)
    if len(ends) < count - 1:
        most = f"; {len(ends) + 1} is the most" if ends else ""
        raise StageError(f"the model has {counted(len(ends), 'module')} to cut behind, too few for {count} stages{most}")
    places = sorted(ends)
    # Parts lie between all places where a cut may be, and a stage is a run of parts. Parameters and FLOPs are counted for each
    # run as a whole, since its parts may read the same parameter. Seconds are measured for each part and added up.
    if by == "seconds":
        parts = seconds_of([ends[place] for place in places])
        costs: list[list[Any]] = [list(accumulate(parts[first:])) for first in range(len(parts))]
    else:
        costs = _parameters(forward, places) if by == "parameters" else _flops(forward, places)
    return [ends[places[part]] for part in smallest_largest(costs, count)]


def smallest_largest(costs: Sequence[Sequence[float]], count: int) -> list[int]:
    """Indices of the parts to cut behind, so that of ``count`` runs of parts the costliest costs least; earlier cuts win ties.

    ``costs[i][j]`` is what the parts from ``i`` to ``i + j`` cost together, no less than a run within them.
    """
    # best[end]: for the parts from 0 to end in so many runs the cost of the costliest, and the cuts. A round adds one run: its
    # begin is tried behind each part, beside the best of the round before. Tuples compare cuts too, which settles ties.
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
            found.setdefault(work[before], fqn)  # of several modules that end there the outermost, which comes first
    return found


def _by_part(forward: Forward, places: Sequence[int]) -> list[list[fx.Node]]:
    parts: list[list[fx.Node]] = [[] for _ in range(len(places) + 1)]
    for node in forward.graph_module.graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            parts[bisect_right(places, node.meta[PLACE])].append(node)
    return parts


def _parameters(forward: Forward, places: Sequence[int]) -> list[list[int]]:
    sizes = {fqn: parameter.numel() for fqn, parameter in forward.parameters.items()}
    read = [
        {forward.parameter_nodes.get(s, "") for node in part for s in node.all_input_nodes}
        for part in _by_part(forward, places)
    ]
    # Buffers, and the "" of all that is no parameter, have no size here.
    return _of_runs(read, lambda fqns: sum(sizes.get(fqn, 0) for fqn in fqns))


def _flops(forward: Forward, places: Sequence[int]) -> list[list[int]]:
    parts = [set(part) for part in _by_part(forward, places)]
    flops = {node: flops_of(node) for part in parts for node in part}
    return _of_runs(parts, lambda nodes: sum(map(flops.__getitem__, nodes)))


def _of_runs(parts: Sequence[set[Any]], cost: Callable[[set[Any]], int]) -> list[list[int]]:
    """For each part the costs of the runs that begin there, shortest first; what several parts of a run have counts once."""
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


# What parts of a model take on this machine, forward and backward, measured on real tensors.


RUNS = 5
"""Runs that are measured, behind a first one that is not."""


def seconds_of_parts(
    trace: Callable[[], Forward],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cuts: Sequence[str],
    clock: Callable[[], float] = perf_counter,
) -> list[float]:
    """Seconds of forward and backward of each part between ``cuts``, the median of :data:`RUNS` runs.

    ``trace`` gives the forward anew, of a call with ``args`` and ``kwargs``. Buffers and random numbers are afterwards as they
    were, and no parameter gets a gradient. ``clock`` gives seconds. Raises :class:`StageError` for a model without values, or
    that cannot be cut at all of ``cuts``.
    """
    forward = trace()
    if bare := [fqn for fqn, one in (forward.parameters | forward.buffers).items() if one.is_meta or tracing.is_fake(one)]:
        raise StageError(f"seconds cannot be measured: {bare[0]} has no values; balance by flops, or measure a smaller model")
    try:
        stages = split_forward(forward, cuts)
    except StageError as error:
        raise StageError(f"seconds of modules cannot be measured one by one: {error}; balance by flops") from error
    with _left_as_it_is(forward):
        runs = [_run(stages, stages.batch(*args, **kwargs), clock) for _ in range(RUNS + 1)][1:]
    return [median(one) for one in zip(*runs, strict=True)]


def _run(stages: Stages, batch: tuple[torch.Tensor, ...], clock: Callable[[], float]) -> list[float]:
    """One run: seconds of each stage, forward and backward; its backward starts from the gradients that the next one gives."""
    # Each stage receives detached leaves, so that its backward ends at its own inputs and can be timed by itself.
    taken, values = [0.0] * len(stages), batch
    ran: list[tuple[Stage, tuple[torch.Tensor, ...], list[torch.Tensor]]] = []
    for number, stage in enumerate(stages):
        received = tuple(one.detach().requires_grad_(one.requires_grad) for one in values)
        with torch.enable_grad():
            begin = _now(clock, received)
            given = stage(*received)
            taken[number] = _now(clock, received) - begin
        values = tuple(pytree.tensors_in(given))
        ran.append((stage, received, list(values)))
    # Backward starts from ones, whatever the model gives: the values do not matter for the time.
    back: list[torch.Tensor | None] = [torch.ones_like(one) if one.requires_grad else None for one in values]
    for number, (stage, received, made) in reversed(list(enumerate(ran))):
        wanted = [one for one in (*received, *stage.parameters()) if one.requires_grad]
        pairs = [(one, grad) for one, grad in zip(made, back, strict=True) if one.requires_grad and grad is not None]
        back = [None] * len(received)
        if not pairs or not wanted:
            continue
        begin = _now(clock, received)
        grads = torch.autograd.grad([one for one, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
        taken[number] += _now(clock, received) - begin
        by_input = {id(one): grad for one, grad in zip(wanted, grads, strict=True)}
        back = [by_input.get(id(one)) for one in received]
    return taken


def _now(clock: Callable[[], float], tensors: Sequence[torch.Tensor]) -> float:
    """The time at which all that was launched on the devices of ``tensors`` is done."""
    for device in sorted({one.device for one in tensors if one.device.type == "cuda"}, key=str):
        torch.cuda.synchronize(device)
    return clock()


@contextmanager
def _left_as_it_is(forward: Forward) -> Iterator[None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in forward.buffers.values()]
    devices = sorted({one.device.index or 0 for one in forward.parameters.values() if one.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, was in kept:
                buffer.copy_(was)
