"""What a pass or a transformation must leave as it was: what is carried, how many bytes travel, who reads what."""

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
    """What is launched less often than before."""
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
    """Bytes that align members of several dtypes; more than that, or any among members of one dtype, is no alignment."""
    spare = bucket.bytes - bucket.parts * sum(member.bytes for member in bucket.members)
    return spare if 0 <= spare <= (alignment(bucket) - 1) * bucket.parts * len(bucket.members) else 0


_Reader: TypeAlias = tuple[str, object]
"""Name and operator of a node. A pass may move compute, so that its place is nothing to know it by."""


def _readers(reading: GraphAnalysis, graph: fx.Graph) -> dict[_Reader, set[str]]:
    """Parameters that each node of compute reads, and gradients that it makes, as far as they are gathered and reduced."""
    nodes = list(graph.nodes)
    found: dict[_Reader, set[str]] = {}
    for place, _, fqn in reading.computes:
        found.setdefault((nodes[place].name, nodes[place].target), set()).add(fqn)
    return found


def other_readers(before: GraphAnalysis, old: fx.Graph, after: GraphAnalysis, new: fx.Graph) -> Iterator[str]:
    """The first node that is given what another had; a node of a name that only one of the graphs has cannot be told."""
    found = _readers(after, new)
    for reader, was in _readers(before, old).items():
        now = found.get(reader, was)
        if was != now:
            gained, lost = now - was or now, was - now or was
            yield f"compute {reader[0]} reads or makes {some(sorted(gained))}, {some(sorted(lost))} before the pass"
            return


def alignment(bucket: Bucket) -> int:
    """Members of several dtypes each begin at a multiple of the largest element, others right behind each other."""
    sizes = {member.dtype: member.dtype.itemsize for member in bucket.members}
    return max(sizes.values()) if len(sizes) > 1 else 1
