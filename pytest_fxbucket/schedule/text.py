"""A schedule as text that a person can review and a machine can read back (:mod:`pytest_fxbucket.schedule.read_back`).

First one line an event, in order, of each direction, and of each microbatch; then what each entry's launches carry, in byte
order. What a launch carries is said once, below, and not with each event: so a change of it is a change in one place. No name
of a node or process group, no rank, path or address; layers that are alike are folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_fxbucket.schedule.alike import fold_alike
from pytest_fxbucket.schedule.events import PADDING, NamedBucket, Schedule
from pytest_fxbucket.schedule.folding import fold
from pytest_fxbucket.schedule.sections import in_order


def schedule_lines(schedule: Schedule, *, folded: bool = True) -> list[str]:
    """Lines of the whole schedule; equal layers folded unless asked otherwise."""
    lines: list[str] = []
    for section in in_order(event.section for event in schedule.events):
        events = [f"  {event.what:7} {event.label}" for event in schedule.events if event.section == section]
        lines += [section, *(fold(events) if folded else events), ""]
    by_entry: dict[str, list[NamedBucket]] = {}
    for bucket in schedule.buckets:
        by_entry.setdefault(bucket.entry, []).append(bucket)
    blocks = [(entry, *_entry_lines(buckets, folded)) for entry, buckets in by_entry.items()]
    return [*lines, "buckets", *(f"  {line}" for block in (fold_alike(blocks) if folded else blocks) for line in block)]


def _entry_lines(buckets: Sequence[NamedBucket], folded: bool) -> Iterator[str]:
    """A line for each bucket; under the last of those in a row that carry the same, what they carry."""
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        yield f"  {_bucket_line(bucket)}"
        if following is None or following.members != bucket.members:
            members = [f"    {fqn} {size}" for fqn, size in bucket.members]
            yield from fold(members, "j") if folded else members


def _bucket_line(bucket: NamedBucket) -> str:
    number = f" #{bucket.number}" if bucket.number > 1 else ""
    op = f"{bucket.op} over " if bucket.op else ""
    count = sum(fqn != PADDING for fqn, _ in bucket.members)
    return (
        f"{bucket.direction} {bucket.kind}{number}: {count} member{'s' * (count != 1)}, {bucket.dtype}, "
        f"{bucket.bytes} bytes, {op}{bucket.dims}"
    )
