"""What a pass says it did. Checks never believe it; people read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BucketReport:
    """One merged launch."""

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


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A launch that was not merged or not moved, and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class PassReport:
    """All that a pass did to one graph."""

    launches_before: int
    launches_after: int
    buckets: tuple[BucketReport, ...] = ()
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)
