"""What a pass or a transformation must leave as it was: members of launches, bytes that travel, readers of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pytest_fxbucket.compat.c10d import untwinned
from pytest_fxbucket.graph.ops import dtype_name
from pytest_fxbucket.words import some, times

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis


def lost(before: GraphAnalysis, after: GraphAnalysis) -> Iterator[str]:
    """A sentence for each member that is launched less often than before."""
    old, new = Counter(carried(before)), Counter(carried(after))
    for one in old - new:
        what = f"{one.kind}{' ' * bool(one.op)}{one.op} of {one.what} on group {one.group}"
        yield f"{what} is launched {times(new[one])}, {times(old[one])} before the pass"


@dataclass(frozen=True, slots=True)
class CarriedMember:
    """A member of a launch, as far as a pass may not change it."""

    kind: str
    op: str
    group: str
    what: str
    """FQN, as far as one is known, and size."""
    fqn: str


def carried(reading: GraphAnalysis) -> Iterator[CarriedMember]:
    """Every member of every launch."""
    for bucket in reading.buckets:
        for member in bucket.members:
            size = f"{member.numel} elements of {dtype_name(member.dtype)}"
            what = f"{member.fqn} ({size})" if member.fqn else size
            yield CarriedMember(bucket.kind, bucket.op, untwinned(bucket.group), what, member.fqn)


def other_bytes(before: GraphAnalysis, after: GraphAnalysis) -> Iterator[str]:
    """Process groups on which more or fewer bytes travel than before, by kind."""
    old, new = _bytes(before), _bytes(after)
    for kind, group in sorted({*old, *new}):
        was, now = old.get((kind, group), 0), new.get((kind, group), 0)
        if was != now:
            yield f"{kind} on group {group} moves {now} bytes, {was} before the pass"


def _bytes(reading: GraphAnalysis) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for bucket in reading.buckets:
        key = (bucket.kind, untwinned(bucket.group))
        found[key] = found.get(key, 0) + bucket.bytes - _filling(bucket)
    return found


def _filling(bucket: Bucket) -> int:
    """Bytes of a bucket that only align members of several dtypes; 0 if it has more spare bytes than alignment explains."""
    # At most one gap for each member and rank, and each smaller than the alignment.
    spare = bucket.bytes - bucket.parts * sum(member.bytes for member in bucket.members)
    return spare if 0 <= spare <= (alignment(bucket) - 1) * bucket.parts * len(bucket.members) else 0


_Reader: TypeAlias = tuple[str, object]
"""Name and operator of a node. A pass may move compute, so a node is not known by its position."""


def _readers(reading: GraphAnalysis, graph: fx.Graph) -> dict[_Reader, set[str]]:
    """FQNs of gathered parameters that each compute node reads, and of reduced gradients that it makes."""
    nodes = list(graph.nodes)
    found: dict[_Reader, set[str]] = {}
    for place, _, fqn in reading.computes:
        found.setdefault((nodes[place].name, nodes[place].target), set()).add(fqn)
    return found


def other_readers(before: GraphAnalysis, old: fx.Graph, after: GraphAnalysis, new: fx.Graph) -> Iterator[str]:
    """A sentence for the first node whose parameters or gradients changed; a node that only one graph has is skipped."""
    found = _readers(after, new)
    for reader, was in _readers(before, old).items():
        now = found.get(reader, was)
        if was != now:
            # If nothing was gained (or lost), the whole set is shown instead of an empty one.
            gained, lost = now - was or now, was - now or was
            yield f"compute {reader[0]} reads or makes {some(sorted(gained))}, {some(sorted(lost))} before the pass"
            return


def alignment(bucket: Bucket) -> int:
    """Bytes that members are aligned to: of several dtypes, the largest element's size; of one dtype 1, which is no gap."""
    sizes = {member.dtype: member.dtype.itemsize for member in bucket.members}
    return max(sizes.values()) if len(sizes) > 1 else 1
