"""What a pass says it did. Checks never believe it; people read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pytest_fxbucket.passes.splits import Split, remedy, sentence
from pytest_fxbucket.passes.targets import LeftAlone


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
    splits: tuple[Split, ...] = ()
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

    def with_one(self, bucket: BucketReport) -> Totals:
        """These and ``bucket``."""
        return Totals(
            self.buckets + 1,
            self.members + len(bucket.members),
            self.bytes + bucket.bytes,
            self.launches_before + bucket.launches_before,
            self.launches_after + bucket.launches_after,
            self.hidden + (bucket.overlap_nodes > 0),
        )


@dataclass(frozen=True, slots=True)
class PassReport:
    """All that a pass did to one graph."""

    launches_before: int
    """Of the whole graph, those left alone among them."""
    launches_after: int
    buckets: tuple[BucketReport, ...] = ()
    """In order of their launches."""
    left_alone: tuple[LeftAlone, ...] = ()
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

    @property
    def totals(self) -> Totals:
        """Of all buckets."""
        return sum_of(self.buckets)

    @property
    def totals_by_kind(self) -> dict[tuple[str, str], Totals]:
        """Of the buckets of each (direction, kind), in order of their first launch."""
        found: dict[tuple[str, str], list[BucketReport]] = {}
        for bucket in self.buckets:
            found.setdefault((bucket.direction, bucket.kind), []).append(bucket)
        return {key: sum_of(buckets) for key, buckets in found.items()}

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


def sum_of(buckets: tuple[BucketReport, ...] | list[BucketReport]) -> Totals:
    """The sums of ``buckets``."""
    totals = Totals()
    for bucket in buckets:
        totals = totals.with_one(bucket)
    return totals
