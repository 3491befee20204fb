"""What our pass says of a graph: looked at before anything moves, and again when all is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.displaced import displaced
from pytest_fxbucket.graph.live import Lives, peak_bytes
from pytest_fxbucket.passes.compute import gathered_lives
from pytest_fxbucket.passes.overlapped import Labels, Overlapped, labels_of, overlapped
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.targets import LeftAlone

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.passes.splits import Split
    from pytest_fxbucket.passes.targets import Targets


@dataclass(frozen=True, slots=True)
class Before:
    """What of a graph cannot be told any more when its launches are merged."""

    names: list[str]
    lives: Lives
    labels: Labels

    @classmethod
    def of(cls, graph: fx.Graph, targets: Targets) -> Before:
        """Look at ``graph`` before the pass."""
        gathers = ((t.launch, [part.waits[0] for part in t.parts], [t]) for t in targets.planned)
        return cls([node.name for node in graph.nodes], gathered_lives(graph, gathers), labels_of(targets.planned))


@dataclass(frozen=True, slots=True)
class Done:
    """What the pass did."""

    buckets: tuple[Merged, ...]
    splits: tuple[tuple[Split, ...], ...]
    """Of each bucket what parted it from others."""
    left: tuple[LeftAlone, ...]
    """What could not be moved."""
    updates: tuple[tuple[str, ...], ...]
    """Of each bucket other entries of which an update stands behind it."""


def report_of(graph: fx.Graph, targets: Targets, before: Before, done: Done) -> PassReport:
    """The report on ``graph`` as it is now."""
    launched = {node.name for bucket in done.buckets for node in (bucket.launch, *bucket.waits)}
    lives = gathered_lives(graph, ((bucket.launch, bucket.results, bucket.members) for bucket in done.buckets))
    return PassReport(
        targets.launches,
        targets.launches - len(targets.planned) + len(done.buckets),
        _reports(graph, done, before.labels),
        (*targets.left_alone, *done.left),
        *displaced(before.names, [node.name for node in graph.nodes if node.name not in launched]),
        peak_bytes(before.lives),
        peak_bytes(lives),
        targets.order.barriers,
    )


def _reports(graph: fx.Graph, done: Done, labels: Labels) -> tuple[BucketReport, ...]:
    """In order of launch."""
    behind = overlapped(graph, [(bucket.launch, bucket.waits) for bucket in done.buckets], labels)
    found = zip(done.buckets, done.splits, behind, done.updates, strict=True)
    return tuple(_report(*one) for one in sorted(found, key=lambda one: one[0].launch))


def _report(bucket: Merged, splits: tuple[Split, ...], behind: Overlapped, updates: tuple[str, ...]) -> BucketReport:
    first = bucket.first
    dtypes = dict.fromkeys(
        str(part.input.meta["val"].dtype).removeprefix("torch.") for member in bucket.members for part in member.parts
    )
    return BucketReport(
        entry=first.entry,
        direction=first.direction,
        kind=first.kind,
        group=str(collectives.argument(bucket.launch, "group_name")),
        op=first.op,
        dtype="+".join(sorted(dtypes)),
        members=tuple(fqn for member in bucket.members for fqn in member.fqns),
        bytes=sum(member.bytes for member in bucket.members),
        launch=bucket.launch.name,
        launches_before=len(bucket.members),
        splits=splits,
        overlap_nodes=behind.nodes,
        overlaps=behind.of,
        updates=updates if first.kind in REDUCTIONS else (),
    )
