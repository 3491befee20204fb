"""What a pass says it did, and why buckets are apart. Checks never believe it; people read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from pytest_fxbucket.passes.targets import UntouchedLaunch
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.targets import MergeTarget


@dataclass(frozen=True, slots=True)
class BucketReport:
    """One launch of the plan's, merged or as it was."""

    entry: str
    direction: str
    kind: str
    group: str
    op: str
    dtype: str
    """Of all members; several joined by ``+``."""
    members: tuple[str, ...]
    """FQNs in byte order."""
    bytes: int
    """Size of the larger side: the gathered result, or the input that is reduced."""
    launch: str = ""
    """Name of the launching node."""
    launches_before: int = 1
    """Launches that it took the place of."""
    launches_after: int = 1
    splits: tuple[SplitReason, ...] = ()
    """What parted it from others of the same entry, direction and kind, and from those of the other direction."""
    overlap_nodes: int = 0
    """Nodes that compute between its launch and its first wait; 0: it is exposed."""
    overlaps: tuple[str, ...] = ()
    """Entries (modules, where the plan names none) whose compute that is, in order. Of some nodes none is known."""
    updates: tuple[str, ...] = ()
    """Of a reduction: other entries of which an update stands between its launch and its first wait, in order."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of a report, of one kind and direction or of all."""

    buckets: int = 0
    members: int = 0
    bytes: int = 0
    launches_before: int = 0
    launches_after: int = 0
    hidden: int = 0
    """Buckets behind which some compute hides."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What ``schedule = "auto"`` came to, by its cost model: before, with merged buckets in their old places, and after."""

    exposed_before: float
    """Seconds that waits block compute."""
    exposed: float
    peak_before: int
    """Bytes that live at once at most."""
    peak: int
    hidden: int
    """Collectives that no wait is blocked by."""
    collectives: int
    pairs: tuple[tuple[str, str], ...]
    """(earlier, later) names of nodes whose order makes the overlap: a launch and compute, compute and a wait."""


@dataclass(frozen=True, slots=True)
class ReorderReport:
    """What moving launches and waits came to, by hand or found by itself."""

    left: tuple[UntouchedLaunch, ...]
    kept: tuple[tuple[fx.Node, fx.Node], ...]
    """Pairs (earlier, later) whose order makes the overlap; no edge carries it."""
    schedule: Schedule | None = None
    """What an order came to that was found by itself; None for one by hand."""


@dataclass(frozen=True, slots=True)
class PassReport:
    """All that a pass did to one graph."""

    launches_before: int
    """Of the whole graph, those left alone among them."""
    launches_after: int
    buckets: tuple[BucketReport, ...] = ()
    """In order of their launches."""
    left_alone: tuple[UntouchedLaunch, ...] = ()
    displaced: int = 0
    """Nodes that are no collectives, pack or unpack, and stand in another order among themselves than before."""
    compared: int = 0
    """Nodes among which ``displaced`` were counted."""
    gathered_before: int = 0
    """Most gathered bytes alive at once before, of the planned launches: from a launch to the last reader of each member."""
    gathered_after: int = 0
    """The same afterwards."""
    barriers: tuple[str, ...] = ()
    """Nodes that nothing was moved past, and why."""
    schedule: Schedule | None = None
    """What a schedule that was found by itself came to; None of one by hand."""
    kept_order: tuple[tuple[str, str], ...] = ()
    """Of `insert_overlap_deps`, nodes by name whose order the graph itself says: (earlier, later)."""

    @property
    def totals(self) -> Totals:
        """Of all buckets."""
        return _sum_of(self.buckets)

    @property
    def totals_by_kind(self) -> dict[tuple[str, str], Totals]:
        """Of the buckets of each (direction, kind), in order of their first launch."""
        found: dict[tuple[str, str], list[BucketReport]] = {}
        for bucket in self.buckets:
            found.setdefault((bucket.direction, bucket.kind), []).append(bucket)
        return {key: _sum_of(buckets) for key, buckets in found.items()}

    def to_dict(self, dims: Mapping[str, str] = {}) -> dict[str, Any]:
        """Plain data, for JSON; ``dims`` maps the names of process groups to mesh dimensions."""
        data = asdict(self)
        data["totals"] = asdict(self.totals)
        data["totals_by_kind"] = [
            {"direction": direction, "kind": kind, **asdict(totals)}
            for (direction, kind), totals in self.totals_by_kind.items()
        ]
        for plain, bucket in zip(data["buckets"], self.buckets, strict=True):
            plain["group"] = dims.get(bucket.group, bucket.group)
            plain["splits"] = [
                {
                    "reason": split.reason,
                    "why": sentence(split, bucket.kind, dims),
                    "change": remedy(split, bucket.kind),
                }
                for split in bucket.splits
            ]
        return data


def _sum_of(buckets: Sequence[BucketReport]) -> Totals:
    return Totals(
        buckets=len(buckets),
        members=sum(len(bucket.members) for bucket in buckets),
        bytes=sum(bucket.bytes for bucket in buckets),
        launches_before=sum(bucket.launches_before for bucket in buckets),
        launches_after=sum(bucket.launches_after for bucket in buckets),
        hidden=sum(bucket.overlap_nodes > 0 for bucket in buckets),
    )


Reason = Literal[
    "disabled",
    "direction",
    "group",
    "op",
    "device",
    "dtype",
    "round",
    "together",
    "several_dtypes",
    "bucketed",
    "cap",
    "above_cap",
    "overlap",
    "dependence",
    "circle",
]

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class SplitReason:
    """One reason that parted a bucket from another one."""

    reason: Reason
    mine: str = ""
    """What this bucket has: its group, op, device, dtype or round. Of a cap the member that did not fit any more, of a
    dependence the member that needs another one's result."""
    others: tuple[str, ...] = ()
    """What the others have; of a dependence the member that is needed, of a circle the buckets that lie on it; sorted."""
    bytes: int = 0
    """Of a cap: what the bucket before the cut holds, or the member that is above the cap."""
    more: int = 0
    """Of a cap: what the next member would have added."""
    cap_mb: float = 0.0
    """In 2**20 bytes."""


def called(target: MergeTarget) -> str:
    """What people call a launch: the parameter that it carries, or its node where it carries none."""
    more = f" and {len(target.fqns) - 1} more" if len(target.fqns) > 1 else ""
    return target.fqns[0] + more if target.fqns else target.launch.name


_CAP = "cap_mb = {cap_mb:g} ({cap:,} bytes)"
_SENTENCES: Mapping[Reason, str] = {
    "disabled": "merging is off (bucket.enabled = false)",
    "direction": "in {others} it is gathered anew: one launch for both would keep it gathered in between",
    "group": "it runs on process group {mine}, others of its entry on {others}, and a launch has one",
    "op": "it reduces by {mine}, others of its entry by {others}, and a launch has one reduction",
    "device": "it is on {mine}, others of its entry on {others}",
    "dtype": "its dtype is {mine}, that of others of its entry {others}",
    "round": "it is gathered in {mine}, others of its entry in {others}: one launch for all would keep it gathered in between",
    "together": "the bucketer in use calls it {mine}, others of its entry {others}",
    "several_dtypes": "its launch carries several dtypes already, and stays as it was",
    "bucketed": "what an earlier run made a bucket stays as it is",
    "cap": _CAP + " is reached: {bytes:,} bytes, and {mine} would add {more:,}",
    "above_cap": "{mine} alone has {bytes:,} bytes, above " + _CAP,
    "overlap": "as one launch with its neighbours it would not stay hidden, or has nothing to win",
    "dependence": "{mine} needs the result of {others}, so that one launch cannot have both",
    "circle": "as one launch it and {others} would wait for each other in a circle",
}
_REDUCED_TWICE = "in {others} there are reductions too: one launch for both would hold back the earlier"
_MODEL = "nothing in the plan can change that: it follows from the model"
_REMEDIES: Mapping[Reason, str] = {
    "disabled": "set bucket.enabled = true",
    "direction": "parallel.reshard_after_forward = false gathers once, and keeps it gathered",
    "group": "shard both over the same mesh dimension",
    "op": "reduce both by the same operation",
    "device": "put both on one device",
    "dtype": 'set bucket.dtypes = "mixed", or parallel.param_dtype for all',
    "round": "gather once for all its readers: each microbatch, and each gather anew of the same parameter, is a round",
    "together": "let the bucketer's together() give both one name",
    "several_dtypes": "give the pass the graph as it was before anything was merged",
    "bucketed": "give the pass the graph as it was before anything was merged",
    "cap": "set bucket.cap_mb to at least {needed:.10g} for that one, or to 0 for no cap",
    "above_cap": "set bucket.cap_mb to 0 for no cap, or above {needed:.10g}",
    "overlap": 'by = "size" or "plan" merges whatever it exposes',
    "circle": "write entries that do not need each other in both orders",
    "dependence": _MODEL,
}
_OF_REDUCTIONS: Mapping[Reason, str] = {"direction": _MODEL, "dtype": "set parallel.reduce_dtype: a sum has one dtype"}


def sentence(split: SplitReason, kind: str, dims: Mapping[str, str] = {}) -> str:
    """``split`` for people, of a bucket of ``kind``; ``dims`` maps the names of process groups to mesh dimensions."""
    twice = split.reason == "direction" and kind != "all_gather"
    return (_REDUCED_TWICE if twice else _SENTENCES[split.reason]).format(
        mine=dims.get(split.mine, split.mine),
        others=some([dims.get(other, other) for other in split.others]),
        bytes=split.bytes,
        more=split.more,
        cap_mb=split.cap_mb,
        cap=round(split.cap_mb * _MB),
    )


def remedy(split: SplitReason, kind: str) -> str:
    """What to change in the plan or the model so that ``split`` does not part a bucket of ``kind``."""
    text = _REMEDIES[split.reason] if kind == "all_gather" else _OF_REDUCTIONS.get(split.reason, _REMEDIES[split.reason])
    return text.format(needed=math.ceil((split.bytes + split.more) / _MB * 1000) / 1000)
