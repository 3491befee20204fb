"""Calibrates a cluster by a trace of torch's profiler, whose operator calls are matched with the graph's nodes, in order.

Kernels and collectives in the trace are then attributed to the calls that launched them.

The format is Kineto's, in Chrome's JSON: complete events (``ph`` X) with ``ts`` and ``dur`` in microseconds, of category
``cpu_op`` (an operator's call), ``cuda_runtime`` and ``cuda_driver`` (what launches a kernel), ``kernel``, ``gpu_memcpy`` and
``gpu_memset`` (what ran, with the ``args.correlation`` of its launch), and ranges ``gloo:all_gather`` while a thread of gloo
communicates.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pytest_fxbucket.cost.costs import is_free
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.simulate.calibrate import CalibratedCluster, MeasuredStretch, calibrate
from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.step.roles import Phase, StepGraph

_NEAR = 64
"""How many other calls may stand before the call of a node's operator: the parts of an operator that a graph has as one node,
or calls of the code around the graph."""
_MOST_MISSING, _MOST_MORE = 0.1, 0.01
"""Shares of the graph's nodes that a run may lack, and may have too many, and still count as a run of this graph."""
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class _Event(NamedTuple):
    start: float
    end: float
    thread: object
    name: str


class _Wanted(NamedTuple):
    phase: Phase
    node: fx.Node


@dataclass(frozen=True, slots=True)
class _Step:
    """One run of the graphs in the trace."""

    events: tuple[tuple[_Wanted, _Event], ...]
    missing: tuple[_Wanted, ...]
    more: tuple[_Event, ...]
    """Calls between the found ones that match no node, of operators that the graphs use."""
    next: int
    """Number of the first call after this run."""


def cluster_from_trace(path: Path, step: StepGraph, cluster: Cluster) -> CalibratedCluster:
    """``cluster`` calibrated by the trace in ``path``, of one or more steps of the graphs of ``step`` on one rank.

    Raises :class:`SimulationError` for a file that is no trace, for a trace of another graph, and for one of a host where
    ``cluster`` has devices, or the other way round.
    """
    return cluster_from_events(path, read_trace(path), step, cluster)


def cluster_from_events(path: Path, trace: Mapping[str, Any], step: StepGraph, cluster: Cluster) -> CalibratedCluster:
    """Like :func:`cluster_from_trace`, but ``trace`` is the content of ``path``, already read."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    work = [event for event in events if event.get("cat") in _WORK]
    if bool(work) == cluster.blocking:
        says = "has kernels of a device, but" if work else "has no kernels of a device, but"
        where = "on the host" if cluster.blocking else "on devices"
        raise SimulationError(f"{path}: the trace {says} {cluster.name} computes {where}")
    steps = _steps(path, step, _calls(events))
    seconds: dict[tuple[str, Phase, str], list[float]] = {}
    for one in steps:
        own = [*_host(one), *(_device(one, events, work) if work else _gloo(one, events))]
        for where, wanted, took in own:
            seconds.setdefault((where, wanted.phase, wanted.node.name), []).append(took)
    stretches = [
        MeasuredStretch(phase, (name,), median(each), where)  # type: ignore[arg-type]  # one of the three words, as they were put in
        for (where, phase, name), each in seconds.items()
    ]
    found = calibrate(step, stretches, cluster)
    missing = steps[0].missing
    if missing:
        found = replace(found, unmatched=(f"{counted(len(missing), 'node')} not in the trace, first {missing[0].node.name}",))
    if more := steps[0].more:
        found = replace(
            found, unmatched=(*found.unmatched, f"{counted(len(more), 'call')} not of the graph, first {more[0].name}")
        )
    return found


def read_trace(path: Path) -> Mapping[str, Any]:
    """The content of the trace file ``path``. Raises :class:`SimulationError` for a file that is no trace."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        for event in trace["traceEvents"]:
            if event.get("ph") == "X":
                float(event["ts"]), float(event.get("dur", 0))
    except OSError as error:
        raise SimulationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SimulationError(
            f"{path} is no trace of a report, nor one that torch.profiler's export_chrome_trace wrote"
        ) from error
    return cast("Mapping[str, Any]", trace)


def _event(event: Mapping[str, Any]) -> _Event:
    start = float(event["ts"]) / 1e6
    return _Event(start, start + float(event.get("dur", 0)) / 1e6, event.get("tid"), str(event.get("name", "")))


def _annotations(events: Sequence[Mapping[str, Any]]) -> list[_Event]:
    """The ranges in which gloo's threads communicated, by start."""
    named = (_event(event) for event in events if event.get("cat") == "user_annotation")
    return sorted(one for one in named if one.name.startswith("gloo:"))


def _calls(events: Sequence[Mapping[str, Any]]) -> list[_Event]:
    """Calls of operators by start, each before the calls made within it; without calls made by gloo's own threads."""
    theirs: dict[object, list[_Event]] = {}
    for one in _annotations(events):
        theirs.setdefault(one.thread, []).append(one)
    calls = sorted((_event(e) for e in events if e.get("cat") == "cpu_op"), key=lambda one: (one.start, -one.end))
    return [one for one in calls if not _is_within(one, theirs.get(one.thread, ()))]


def _is_within(call: _Event, ranges: Sequence[_Event]) -> bool:
    number = bisect_right(ranges, call.start, key=lambda one: one.start) - 1
    return number >= 0 and call.start < ranges[number].end


def _steps(path: Path, step: StepGraph, calls: Sequence[_Event]) -> list[_Step]:
    # Runs follow one another in the trace. The first place that is no run of this graph ends the search.
    wanted = [
        _Wanted(phase, node) for phase, module in step.graphs.items() for node in module.graph.nodes if operator_name(node)
    ]
    steps: list[_Step] = []
    count = sum(not is_free(each.node) for each in wanted)
    begin = 0
    while begin < len(calls) and (one := _matched(wanted, calls, begin)).events:
        kernels = [each for each in one.missing if not is_free(each.node)]
        if len(kernels) > _MOST_MISSING * count or len(one.more) > _MOST_MORE * count:
            break
        steps.append(one)
        begin = one.next
    if not steps:
        raise SimulationError(f"{path}: {_difference(wanted, _matched(wanted, calls, 0))}")
    return steps


def _difference(wanted: Sequence[_Wanted], tried: _Step) -> str:
    if not tried.missing:
        return f"the trace is of another graph: it has {counted(len(tried.more), 'call')} more, first of {tried.more[0].name}"
    first = tried.missing[0]
    name, place = operator_name(first.node), wanted.index(first)
    before = f"behind {wanted[place - 1].node.name}" if place else "in it"
    return f"the trace is of another graph: {before} is no call of {name}, as {first.node.name} of the {first.phase} graph is"


def _matched(wanted: Sequence[_Wanted], calls: Sequence[_Event], begin: int) -> _Step:
    """Match each of ``wanted``, in order, with the next call of its operator that is not made within the call found last."""
    # The profiler also shows the calls that an operator makes inside, perhaps of the next node's own operator: these lie within
    # the found call's time on its thread, and are passed over. The first node may be any number of calls away, later ones only
    # _NEAR, so that a node that never ran does not use up the calls of all others.
    found: list[tuple[_Wanted, _Event]] = []
    missing: list[_Wanted] = []
    more: list[_Event] = []
    known = {operator_name(one.node) for one in wanted if not is_free(one.node)}
    place = begin
    for one in wanted:
        name = operator_name(one.node)
        behind = found[-1][1] if found else None
        seen, at, passed = 0, place, list[_Event]()
        while at < len(calls) and (behind is None or seen < _NEAR):
            call = calls[at]
            is_inside = behind is not None and call.thread == behind.thread and call.start < behind.end
            if call.name == name and not is_inside:
                break
            if not is_inside:
                seen += 1
                passed += [call] if call.name in known else []
            at += 1
        else:
            missing.append(one)
            continue
        found.append((one, calls[at]))
        more += passed if behind is not None else []
        place = at + 1
    return _Step(tuple(found), tuple(missing), tuple(more), place)


_Took = Iterator[tuple[str, _Wanted, float]]


def _host(step: _Step) -> _Took:
    """The host's seconds for each node: from the start of its call to that of the next."""
    for number, (wanted, call) in enumerate(step.events):
        behind = step.events[number + 1][1] if number + 1 < len(step.events) else None
        yield "host", wanted, (behind.start if behind is not None else call.end) - call.start


def _gloo(step: _Step, events: Sequence[Mapping[str, Any]]) -> _Took:
    """The seconds in flight for each launch: gloo's threads run them one after the other, in the order of the launches."""
    # One iterator for all launches, so that each range is taken by one launch at most.
    ranges = iter(_annotations(events))
    for wanted, call in step.events:
        if launch_kind(wanted.node) is not None:
            one = next((each for each in ranges if each.start >= call.start), None)
            if one is not None:
                yield "network", wanted, one.end - one.start


def _device(step: _Step, events: Sequence[Mapping[str, Any]], work: Sequence[Mapping[str, Any]]) -> _Took:
    """The seconds of the kernels that each node launched; for a collective only those of NCCL, for others only the rest."""
    starts = [call.start for _, call in step.events]
    caller: dict[object, _Wanted] = {}
    for event in events:
        if event.get("cat") in _LAUNCHES:
            launched = _event(event)
            number = bisect_right(starts, launched.start) - 1
            if number >= 0 and launched.start < step.events[number][1].end:
                caller[event.get("args", {}).get("correlation")] = step.events[number][0]
    # A launch may run other kernels, such as a copy of what NCCL is given: they are not its time in flight.
    took: dict[_Wanted, float] = {}
    for event in work:
        wanted, one = caller.get(event.get("args", {}).get("correlation")), _event(event)
        if wanted is None or (launch_kind(wanted.node) is not None) != one.name.lower().startswith("nccl"):
            continue
        took[wanted] = took.get(wanted, 0.0) + one.end - one.start
    for wanted, seconds in took.items():
        yield "network" if launch_kind(wanted.node) is not None else "device", wanted, seconds
