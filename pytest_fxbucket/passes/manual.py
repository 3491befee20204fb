"""Our pass: merges the collectives of each entry of a module plan, and reorders launches and waits.

The same job as torch's ``torch._inductor.fx_passes.overlap_manual_scheduling``; written anew, and an error where that one does
nothing. The way of a graph through it: which launches (targets) share a bucket (grouping), merged (merge, pack), and moved
(overlap). What cannot be done safely is left alone, and the report says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pytest_fxbucket.compat.c10d import twin_name
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.buckets import Lives, peak_bytes
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.graph.order import displaced
from pytest_fxbucket.graph.updates import update_nodes
from pytest_fxbucket.graph_view.bare import bare_values
from pytest_fxbucket.passes.compute import Labels, Overlapped, gathered_lives, labels_of, overlapped
from pytest_fxbucket.passes.grouping import BUCKETED, Rules, grouping_of
from pytest_fxbucket.passes.keep_order import Pair, keep_order
from pytest_fxbucket.passes.merge import merge
from pytest_fxbucket.passes.new_nodes import shared_meta
from pytest_fxbucket.passes.overlap import Overlap, Places, reorder
from pytest_fxbucket.passes.pack import Merged
from pytest_fxbucket.passes.ready import updates_behind
from pytest_fxbucket.passes.report import BucketReport, PassReport
from pytest_fxbucket.passes.targets import LeftAlone

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.report import SplitReason
    from pytest_fxbucket.passes.targets import Targets


@dataclass(frozen=True, slots=True)
class ManualPass:
    """Merge and reorder the launches that a plan names. The defaults are those of a plan file."""

    merging: bool = True
    """Merge an entry's launches; otherwise they are only reordered."""
    by: Literal["plan", "size"] = "plan"
    """What shares a bucket: launches of an entry, or neighbours up to a cap."""
    layout: Literal["registration", "execution"] = "registration"
    """Byte order of a bucket's members: of the parameters' registration, or of the launches."""
    mixed: bool = False
    """One all-gather may carry several dtypes."""
    caps_mb: tuple[float, ...] = (0.0,)
    """Largest bucket of each entry in turn (by size: of each bucket) in 2**20 bytes, the last for the rest; 0: no cap."""
    packer: str = "default"
    """How members become one tensor: a name that :mod:`pytest_fxbucket.passes.packers` knows, or ``module:callable``."""
    prefetch: int = 1
    """How many stages ahead an all-gather is launched; 0 leaves it where it was."""
    defer_reduce: bool = True
    """Wait for reductions behind the next stage's launches."""
    launch_at: Places = field(default_factory=dict)
    """By direction: launch the key's all-gather when the value's compute starts."""
    wait_before: Places = field(default_factory=dict)
    """By direction: wait for the key's reduction before the value's compute starts."""
    updates: Literal["last", "ready"] = "last"
    """Leave the optimizer's updates where they were, or let each start when the last reduction that it needs has ended."""
    insert_overlap_deps: bool = False
    """Keep the order through later compilers."""
    own_gather_group: bool = False
    """Run the planned all-gathers on a process group of their own."""

    def run(self, graph: fx.Graph, targets: Targets) -> PassReport:
        """Change ``graph`` in place as :meth:`apply` does, and say what was done."""
        before = Before.of(graph, targets)
        return report_of(graph, targets, before, self.apply(graph, targets))

    def apply(self, graph: fx.Graph, targets: Targets) -> Done:
        """Change ``graph`` in place.

        Raises :class:`PassError` for buckets that cannot be built; ``graph`` is as it was then. Raises :class:`PlanError` for
        places by hand that cannot be had, and :class:`PassError` for a graph that breaks; then throw ``graph`` away.
        """
        ends = targets.ends or (bare_values(graph) if self.updates == "ready" else None)
        grouping = grouping_of(targets.order, targets.planned, self._rules(), targets.entries)
        buckets = merge(graph, targets.order, grouping.groups, self.packer)
        if self.merging:
            for bucket in buckets:
                bucket.launch.meta[BUCKETED] = True
        updating = update_nodes(graph, *ends) if ends is not None else set()
        rules = Overlap(self.prefetch, self.defer_reduce, self.launch_at, self.wait_before, self.updates)
        moved = reorder(graph, buckets, rules, targets.computes, updating)
        left = moved.left
        behind = updates_behind(graph, updating, buckets)  # what keeps the order makes one update need another
        if self.own_gather_group:
            on_own_group(bucket.launch for bucket in buckets)
        if self.insert_overlap_deps:
            left += _not_kept(keep_order(graph, moved.kept, _meta_of(buckets)))
        _refuse_broken(graph)
        return Done(tuple(buckets), grouping.splits, left, tuple(behind))

    def _rules(self) -> Rules:
        return Rules(self.merging, self.by, self.layout, self.mixed, self.caps_mb)


def _not_kept(pairs: Sequence[Pair]) -> tuple[LeftAlone, ...]:
    return tuple(LeftAlone(f"order of {a.name} and {b.name}", "no input of the later one can carry it") for a, b in pairs)


def _refuse_broken(graph: fx.Graph) -> None:
    try:
        graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise PassError(f"the reordered graph is not in order: {' '.join(str(error).split())[:200]}") from error


def _meta_of(buckets: Iterable[Merged]) -> dict[fx.Node, dict[str, Any]]:
    """What a node says that is made for a launch or a wait."""
    return {node: shared_meta(bucket.members) for bucket in buckets for node in (bucket.launch, *bucket.waits)}


# What our pass says of a graph: looked at before anything moves, and again when all is done.


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
    splits: tuple[tuple[SplitReason, ...], ...]
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


def _report(bucket: Merged, splits: tuple[SplitReason, ...], behind: Overlapped, updates: tuple[str, ...]) -> BucketReport:
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


# All-gathers on a process group of their own, so that they do not queue behind the reductions of their group.
#
# The graph names the twin of the group: the same ranks under another name. Ranks make it before they run the graph.


def on_own_group(launches: Iterable[fx.Node]) -> None:
    """Let all-gathers among ``launches`` run on the twin of the group that they name, if they do not yet."""
    for launch in launches:
        said = collectives.read_launch(launch)
        if said is not None and said.kind == "all_gather":
            _rename(launch, twin_name(said.group))


def _rename(launch: fx.Node, name: str) -> None:
    operator = overload(launch)
    assert operator is not None
    place = [argument.name for argument in operator._schema.arguments].index("group_name")
    if place < len(launch.args):
        launch.update_arg(place, name)
    else:
        launch.update_kwarg("group_name", name)
