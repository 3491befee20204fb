"""What people call the buckets of a report."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fxbucket.passes.report import BucketReport


def labels(buckets: Sequence[BucketReport], registered: Sequence[str]) -> dict[str, str]:
    """Label of each bucket by its launch: its entry, numbered where that has several of one direction and kind.

    Numbers follow the first member's place among ``registered``, so that both directions have the same; by size, where there
    are no entries, the order of launch.
    """
    place = {fqn: i for i, fqn in enumerate(registered)}
    families: dict[tuple[str, str, str], list[BucketReport]] = {}
    for bucket in buckets:
        families.setdefault((bucket.entry, bucket.direction, bucket.kind), []).append(bucket)
    found: dict[str, str] = {}
    for (entry, _, _), own in families.items():
        ordered = sorted(own, key=lambda bucket: place.get(bucket.members[0], 0) if bucket.members else 0) if entry else own
        for number, bucket in enumerate(ordered, 1):
            numbered = f" #{number}" if len(own) > 1 or not entry else ""
            found[bucket.launch] = f"{entry}{numbered}".strip()
    return found


def counted(count: int, noun: str) -> str:
    """``1 launch``, ``2 launches``."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{ending}"
