"""Fits a cluster's figures to a step that was measured, and gives the error that the fit leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.cost.costs import (
    Roofline,
    collective_seconds,
    enqueue_seconds,
    groups_of,
    is_free,
    launched_bytes,
    rate_of,
)
from pytest_fxbucket.errors import SimulationError
from pytest_fxbucket.graph.collectives import is_wait, launch_kind, read_launch
from pytest_fxbucket.graph.flops import bytes_of, flops_of
from pytest_fxbucket.graph.ops import is_view

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.cost.cluster import Cluster, Link
    from pytest_fxbucket.step.roles import Phase, StepGraph


Where = Literal["host", "device", "network"]
Work = Literal["compute", "launches", "collectives"]
_ROUNDS = 6
"""How often the fit is repeated, each time with a new decision whether operations or bytes bound each operator."""
_WAITED = 2.0
"""A wait that took more than this many times as long as the quick waits held up its rank."""
_LITTLE, _LITTLE_BYTE = 1e-7, 1e-12
"""Seconds of a call and of a byte to begin the fit with where the cluster has 0, since a figure that begins at 0 stays 0."""


@dataclass(frozen=True, slots=True)
class MeasuredStretch:
    """A part of a step that was measured."""

    phase: Phase
    nodes: tuple[str, ...]
    """Names of what ran, in graph order."""
    seconds: float
    where: Where = "host"
    """Whose seconds these are. host: those of the thread that calls operators, which went on to the next stretch right after;
    device: those of kernels; network: those in which the collective that the only node launches was in flight, with its stream
    to itself."""


@dataclass(frozen=True, slots=True)
class Error:
    """The error of the fitted model over all measurements of one kind of work."""

    count: int
    middle: float
    """Median of |predicted - measured| / measured."""
    most: float
    """Its 90th percentile."""

    def __str__(self) -> str:
        return f"{self.middle:.0%} (90 % of {self.count} within {self.most:.0%})"


@dataclass(frozen=True, slots=True)
class CalibratedCluster:
    """A cluster with measured figures."""

    cluster: Cluster
    errors: Mapping[Work, Error]
    """The error of each kind of work that was measured."""
    unmatched: tuple[str, ...] = ()
    """One clause for the nodes that the trace lacks, and one for the calls in the trace that the graph lacks."""

    def __str__(self) -> str:
        left = ", ".join(f"{work} {error}" for work, error in self.errors.items())
        return "; ".join([f"error left: {left or 'nothing was measured'}", *self.unmatched])


def calibrate(step: StepGraph, measured: Sequence[MeasuredStretch], cluster: Cluster) -> CalibratedCluster:
    """``cluster`` with its figures fitted to ``measured``, stretches in the order in which they ran.

    Fitted are the host's time for a call, the achieved shares of compute and memory bandwidth, and latency and bandwidth of the
    links. A figure that no measurement depends on stays as it is. Raises :class:`SimulationError` for a stretch that is not of
    ``step``, and for seconds that are negative or infinite.
    """
    # Cheap figures first: the least kernel and the quick wait are quantiles. Calls, rates and links are then fitted as factors
    # of sums. Which bound an operator, operations or bytes, depends on the rates, so that the fit is repeated.
    reader = _Reader(step, cluster.blocking)
    stretches = [reader.with_nodes(one) for one in measured]
    # Where the host computes, an operator's fixed time cannot be told from the cost of its call, and is taken as that.
    cluster = replace(cluster, least=0.0 if cluster.blocking else _least_kernel(stretches, cluster))
    cluster = replace(cluster, waiting=_quick_wait(stretches, cluster))
    flights = list(reader.flights(stretches, cluster.waiting))
    for _ in range(_ROUNDS):
        cluster = _with_links(_with_calls(cluster, stretches), flights)
    cluster = _as_much_as_is_had(cluster)
    return CalibratedCluster(
        cluster, {work: error for work, error in _errors(step, cluster, stretches, flights) if error is not None}
    )


def _as_much_as_is_had(cluster: Cluster) -> Cluster:
    """``cluster`` without efficiencies above 1: the peak rate that they are a share of is raised instead."""
    more, wider = max(1.0, cluster.compute_efficiency), max(1.0, cluster.memory_efficiency)
    return replace(
        cluster,
        flops={dtype: rate * more for dtype, rate in cluster.flops.items()},
        memory_bandwidth=cluster.memory_bandwidth * wider,
        compute_efficiency=cluster.compute_efficiency / more,
        memory_efficiency=cluster.memory_efficiency / wider,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """A stretch with its nodes, found by name."""

    phase: Phase
    nodes: tuple[fx.Node, ...]
    seconds: float
    where: Where

    @property
    def kind(self) -> Literal["launch", "wait", "compute"]:
        if launch_kind(self.nodes[0]) is not None:
            return "launch"
        return "wait" if is_wait(self.nodes[0]) else "compute"


@dataclass(frozen=True, slots=True)
class _Flight:
    kind: str
    bytes: int
    ranks: tuple[int, ...]
    seconds: float
    is_bound: bool


class _Reader:
    """Finds the nodes and collectives of a step that measurements are of."""

    def __init__(self, step: StepGraph, blocking: bool) -> None:
        self._nodes = {phase: {node.name: node for node in module.graph.nodes} for phase, module in step.graphs.items()}
        self._groups, self._blocking = groups_of(step), blocking

    def with_nodes(self, one: MeasuredStretch) -> _Found:
        """``one`` with its nodes."""
        if one.phase not in self._nodes:
            raise SimulationError(f"the timeline has a graph {one.phase}, the step has {', '.join(self._nodes)}")
        known = self._nodes[one.phase]
        if (other := next((name for name in one.nodes if name not in known), None)) is not None or not one.nodes:
            raise SimulationError(
                f"the timeline is of another graph: {other or 'a stretch without nodes'} is not in the {one.phase} graph"
            )
        if not 0 <= one.seconds < float("inf"):
            raise SimulationError(f"{one.nodes[0]} of the {one.phase} graph took {one.seconds!r} seconds, expected 0 or more")
        return _Found(one.phase, tuple(known[name] for name in one.nodes), one.seconds, one.where)

    def flights(self, stretches: Sequence[_Found], quick: float) -> Iterator[_Flight]:
        """The time in flight of each collective: as measured, or on a host that blocks worked out from when its wait ended.

        ``quick`` are the seconds of a wait that finds its collective done. If a wait took no longer than those, the collective
        had ended before it: its time is then only an upper bound.
        """
        # The clock adds up the host's stretches. A collective starts at the end of its launch, or when the one before it in its
        # process group ends. It is known to end with its wait only if that was held up.
        is_told = any(one.where == "network" for one in stretches)
        clock, busy = 0.0, dict[str, float]()
        launched: dict[fx.Node, float] = {}
        for one in stretches:
            if one.where == "network":
                yield self._flight(one.nodes[0], one.seconds, False)
            if one.where != "host":
                continue
            begin, clock = clock, clock + one.seconds
            if one.kind == "launch":
                launched[one.nodes[0]] = clock
            source = next(iter(one.nodes[0].all_input_nodes), None) if one.kind == "wait" else None
            launch = next((each for each in _above(source) if each in launched), None)
            if is_told or not self._blocking or launch is None:
                continue
            # Popped, since only the first wait for a collective says when it ended.
            start = max(launched.pop(launch), busy.get(_group(launch), 0.0))
            # A wait that begins before its collective can start, behind another one, ends with it, however short it is.
            is_known = one.seconds > _WAITED * quick or begin <= start
            end = max(start, clock - quick) if is_known else begin
            busy[_group(launch)] = end
            yield self._flight(launch, end - start, not is_known)

    def _flight(self, launch: fx.Node, seconds: float, is_bound: bool) -> _Flight:
        said = read_launch(launch)
        assert said is not None
        ranks = tuple(self._groups(said.group, said.ranks if isinstance(said.ranks, int) else 0))
        return _Flight(said.kind, launched_bytes(launch), ranks, seconds, is_bound)


def _group(launch: fx.Node) -> str:
    said = read_launch(launch)
    return said.group if said is not None else ""


def _above(source: fx.Node | None) -> Iterator[fx.Node]:
    """The input of a wait, and then the node that each is a part or a view of, up to the launch."""
    while source is not None:
        yield source
        source = next(iter(source.all_input_nodes), None) if is_free(source) else None


def _quick_wait(stretches: Sequence[_Found], cluster: Cluster) -> float:
    """Seconds of a wait for a collective that has ended: the first decile of all waits."""
    waits = [one.seconds for one in stretches if one.where == "host" and one.kind == "wait"]
    return quantiles(waits, n=10, method="inclusive")[0] if len(waits) > 1 else cluster.waiting


def _least_kernel(stretches: Sequence[_Found], cluster: Cluster) -> float:
    """Seconds of the quickest kernels: the first of twenty quantiles."""
    alone = [one.seconds for one in stretches if one.where == "device" and len(one.nodes) == 1]
    return quantiles(alone, n=20, method="inclusive")[0] if len(alone) > 1 else cluster.least


def _with_calls(cluster: Cluster, stretches: Sequence[_Found]) -> Cluster:
    """Fit the host's time for calls and views, the least kernel, and the efficiencies of compute and memory."""
    # The last two figures are factors of the times by the present efficiencies: 2 means that an operator takes twice as long.
    computes = [one for one in stretches if one.where != "network" and one.kind == "compute"]
    begin = [max(cluster.launch, _LITTLE), max(cluster.view, _LITTLE), cluster.least, 1.0, 1.0]
    sums = [Measurement(_parts(one, cluster), one.seconds) for one in computes]
    # A figure that is in no sum comes back as it began, which may be _LITTLE where the cluster has 0.
    seen = [any(one.parts[i] for one in sums) for i in range(len(begin))]
    launch, view, least, slower, narrower = fitted(sums, begin)
    cluster = _with_launches(replace(cluster, launch=launch if seen[0] else cluster.launch), stretches)
    return replace(
        cluster,
        view=view if seen[1] else cluster.view,
        least=least,
        compute_efficiency=cluster.compute_efficiency / slower if slower else cluster.compute_efficiency,
        memory_efficiency=cluster.memory_efficiency / narrower if narrower else cluster.memory_efficiency,
    )


def _with_launches(cluster: Cluster, stretches: Sequence[_Found]) -> Cluster:
    """Fit the host's time for launches of collectives: a constant, and seconds for each byte."""
    launches = [one for one in stretches if one.where == "host" and one.kind == "launch"]
    sums = [Measurement((1.0, launched_bytes(one.nodes[0])), one.seconds) for one in launches]
    if not sums:
        return cluster
    each, byte = fitted(sums, [cluster.launch + max(cluster.enqueue, _LITTLE), max(cluster.enqueue_per_byte, _LITTLE_BYTE)])
    return replace(cluster, enqueue=max(0.0, each - cluster.launch), enqueue_per_byte=byte)


def _parts(one: _Found, cluster: Cluster) -> tuple[float, ...]:
    """How often each fitted figure is in the stretch: calls, views, least kernels, and seconds of operations and of bytes.

    The seconds are those by the present figures of ``cluster``. Each kernel counts in one of the last three.
    """
    kernels = [node for node in one.nodes if not is_free(node)]
    views = sum(is_view(node) for node in one.nodes) if one.where == "host" else 0
    least = slower = narrower = 0.0
    for node in kernels if one.where == "device" or cluster.blocking else ():
        by_bytes = sum(map(bytes_of, (node, *node.all_input_nodes))) / (cluster.memory_bandwidth * cluster.memory_efficiency)
        by_flops = flops_of(node) / (rate_of(node, cluster) * cluster.compute_efficiency)
        if max(by_bytes, by_flops) < cluster.least:
            least += 1
        elif by_bytes < by_flops:
            slower += by_flops
        else:
            narrower += by_bytes
    return float(len(kernels) if one.where == "host" else 0), float(views), least, slower, narrower


def _with_links(cluster: Cluster, flights: Sequence[_Flight]) -> Cluster:
    """Fit latency and bandwidth within nodes and between them, and the time that any collective takes."""
    # Parts: any collective, then latency and bytes within a node, then both between nodes. The part of the bytes is the time of
    # the whole collective without that of an empty one.
    sums = []
    for one in flights:
        parts = [0.0] * 5
        fixed = collective_seconds(one.kind, 0, one.ranks, cluster)
        place = 1 if len(cluster.on_nodes(one.ranks)) == 1 else 3
        parts[0], parts[place] = 1.0, fixed - cluster.collective
        parts[place + 1] = collective_seconds(one.kind, one.bytes, one.ranks, cluster) - fixed
        sums.append(Measurement(tuple(parts), one.seconds, one.is_bound))
    if all(one.is_bound for one in flights):
        return cluster
    # A link that is in no sum stays as it is.
    within, between = (any(one.parts[at] or one.parts[at + 1] for one in sums) for at in (1, 3))
    collective, late, slow, far_late, far_slow = fitted(sums, [max(cluster.collective, _LITTLE), 1.0, 1.0, 1.0, 1.0])
    return replace(
        cluster,
        collective=collective,
        within=_with_factors(cluster.within, late, slow, cluster.memory_bandwidth) if within else cluster.within,
        between=_with_factors(cluster.between, far_late, far_slow, cluster.memory_bandwidth) if between else cluster.between,
    )


def _with_factors(link: Link, late: float, slow: float, most: float) -> Link:
    """``link`` with its latency times ``late`` and its time for a byte times ``slow``; no faster than ``most``, memory's."""
    bandwidth = min(link.bandwidth / slow, most) if slow > 0 else most
    return replace(link, latency=link.latency * late, bandwidth=bandwidth)


def _errors(
    step: StepGraph, cluster: Cluster, stretches: Sequence[_Found], flights: Sequence[_Flight]
) -> Iterator[tuple[Work, Error | None]]:
    cost = Roofline(cluster, groups_of(step))
    compute = [
        (_predicted(one, cluster, cost), one.seconds) for one in stretches if one.where != "network" and one.kind == "compute"
    ]
    yield "compute", _error(compute)
    launches = [one for one in stretches if one.where == "host" and one.kind == "launch"]
    yield "launches", _error([(enqueue_seconds(launched_bytes(one.nodes[0]), cluster), one.seconds) for one in launches])
    told = [one for one in flights if not one.is_bound and one.seconds > cluster.waiting]  # a wait outlasts shorter ones
    flown = [(collective_seconds(one.kind, one.bytes, one.ranks, cluster), one.seconds) for one in told]
    yield "collectives", _error(flown)


def _predicted(one: _Found, cluster: Cluster, cost: Roofline) -> float:
    kernels = [node for node in one.nodes if not is_free(node)]
    runs = sum(map(cost, kernels)) if one.where == "device" or cluster.blocking else 0.0
    if one.where == "device":
        return runs
    return runs + len(kernels) * cluster.launch + sum(map(is_view, one.nodes)) * cluster.view


def _error(pairs: Sequence[tuple[float, float]]) -> Error | None:
    """The error over pairs of predicted and measured seconds."""
    shares = [abs(predicted - seconds) / seconds for predicted, seconds in pairs if seconds > 0]
    if not shares:
        return None
    most = quantiles(shares, n=10, method="inclusive")[-1] if len(shares) > 1 else shares[0]
    return Error(len(shares), median(shares), most)


# The fit itself, pure arithmetic: each measurement is a sum of a few unknown figures, each taken a known number of times.


_MOST_STEPS = 300
_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement."""

    parts: tuple[float, ...]
    """How often each figure is in it; equally many figures for all sums of a fit."""
    seconds: float
    is_bound: bool = False
    """Whether ``seconds`` is only an upper bound."""


def fitted(sums: Sequence[Measurement], begin: Sequence[float]) -> tuple[float, ...]:
    """Figures of 0 or more with which ``sums`` come out, on the whole, as measured; ``begin`` for a figure that is in no sum.

    Maximum likelihood of Poisson's distribution by its multiplicative steps (W. H. Richardson, 1972; L. B. Lucy, 1974). No
    figure gets below 0. The predicted sums add up to the measured total, so that time that the model does not know of is spread
    over all figures. A figure that begins at 0 stays there.
    """
    figures = list(begin)
    weight = [sum(one.parts[i] for one in sums) for i in range(len(figures))]
    for _ in range(_MOST_STEPS):
        gain = [0.0] * len(figures)
        for one in sums:
            predicted = sum(part * figure for part, figure in zip(one.parts, figures, strict=True))
            if predicted <= 0:
                continue
            ratio = one.seconds / predicted
            if one.is_bound:  # it may lower the figures, never raise them
                ratio = min(1.0, ratio)
            for i, part in enumerate(one.parts):
                if part:
                    gain[i] += part * ratio
        before = figures
        figures = [f * g / w if w else f for f, g, w in zip(figures, gain, weight, strict=True)]
        if all(abs(new - old) <= _CLOSE * old for new, old in zip(figures, before, strict=True)):
            break
    return tuple(figures)
