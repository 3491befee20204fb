"""The report of a pass that gives none, read off its graph: everything but why."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.displaced import displaced
from pytest_fxbucket.graph.live import gathered_lives, peak_bytes
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.graph.readiness import readiness, updates_between
from pytest_fxbucket.passes.overlapped import overlapped
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.targets import LeftAlone

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Bucket, Reading


def report_of_reading(
    before: Reading, after: Reading, graphs: tuple[fx.Graph, fx.Graph], entry_of: Mapping[str, str]
) -> PassReport:
    """The report of a pass by the graphs that went in and came out, which ``before`` and ``after`` were read off.

    A launch is a bucket if an entry names one of its parameters (by size, where ``entry_of`` is empty, if it carries any).
    """
    planned = [bucket for bucket in after.buckets if bucket.wait is not None and _entries(bucket, entry_of)]
    left = [bucket for bucket in after.buckets if bucket not in planned]
    graph = graphs[1]
    nodes = list(graph.nodes)
    labels = [(nodes[at], entry_of.get(fqn) or fqn.rpartition(".")[0] or fqn) for at, _, fqn in after.computes]
    spans = [(nodes[bucket.launch], [nodes[bucket.wait or 0]]) for bucket in planned]
    behind = overlapped(graph, spans, labels)
    counts = _launches_before(before, planned)
    updates = _updates(after, planned, entry_of)
    return PassReport(
        len(before.buckets),
        len(after.buckets),
        tuple(
            BucketReport(
                entry=" & ".join(entry for entry in _entries(bucket, entry_of) if entry),
                direction=bucket.direction,
                kind=bucket.kind,
                group=bucket.group,
                op=bucket.op,
                dtype="+".join(sorted({str(member.dtype).removeprefix("torch.") for member in bucket.members})),
                members=bucket.fqns,
                bytes=bucket.bytes,
                launch=bucket.node,
                launches_before=count,
                overlap_nodes=hidden.nodes,
                overlaps=hidden.of,
                updates=between if bucket.kind in REDUCTIONS else (),
            )
            for bucket, count, hidden, between in zip(planned, counts, behind, updates, strict=True)
        ),
        tuple(_left_alone(bucket) for bucket in left),
        *displaced(*([node.name for node in one.nodes if not _communicates(node)] for one in graphs)),
        peak_bytes(gathered_lives(before)),
        peak_bytes(gathered_lives(after)),
        order_of(graph).barriers,
    )


def _updates(after: Reading, planned: Sequence[Bucket], entry_of: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Of each bucket the other entries of which an update stands between its launch and its wait."""
    names = [" & ".join(_entries(bucket, entry_of)) or bucket.node for bucket in planned]
    if after.order is None or not after.updating:
        return [() for _ in planned]
    waits = {
        where: name for bucket, name in zip(planned, names, strict=True) if bucket.kind in REDUCTIONS for where in bucket.waits
    }
    found = readiness(after.order, after.updating, waits)
    return updates_between(found, [(b.launch, b.wait or 0, name) for b, name in zip(planned, names, strict=True)])


def _communicates(node: fx.Node) -> bool:
    return collectives.is_wait(node) or collectives.launch_kind(node) is not None


def _entries(bucket: Bucket, entry_of: Mapping[str, str]) -> list[str]:
    """Entries of what ``bucket`` carries, each once; by size one that has no name."""
    if not entry_of:
        return [""] if any(bucket.fqns) else []
    return list(dict.fromkeys(entry_of[fqn] for fqn in bucket.fqns if fqn in entry_of))


def _launches_before(before: Reading, planned: list[Bucket]) -> Iterator[int]:
    """Of each bucket how many launches brought its members before, those of its own direction first."""
    found: dict[tuple[str, str, str], deque[str]] = {}
    for bucket in before.buckets:
        for fqn in bucket.fqns:
            found.setdefault((bucket.kind, bucket.direction, fqn), deque()).append(bucket.node)
    for bucket in planned:
        other = "backward" if bucket.direction == "forward" else "forward"
        taken = set()
        for fqn in bucket.fqns:
            left = found.get((bucket.kind, bucket.direction, fqn)) or found.get((bucket.kind, other, fqn))
            taken.add(left.popleft() if left else bucket.node)
        yield len(taken)


def _left_alone(bucket: Bucket) -> LeftAlone:
    fqns = tuple(fqn for fqn in bucket.fqns if fqn)
    what = f"{bucket.kind} of {', '.join(fqns) or bucket.node} ({bucket.direction})"
    unnamed = "no entry names its parameter" if fqns else "it carries no parameter and no parameter's gradient"
    return LeftAlone(what, bucket.apart or unnamed, bucket.direction, bucket.kind, fqns)
