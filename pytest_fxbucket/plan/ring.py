"""``[run] ring``: the ring that sums go round with ``[run] reduce = "ring"``."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_fxbucket.plan.rules import whole


@dataclass(frozen=True, slots=True)
class Ring:
    """Its options; the chunks of NCCL's protocol Simple unless said otherwise."""

    channels: int = field(
        default=4, metadata=whole("parts that a message is split into, each summed round a ring order of its own", least=1)
    )
    chunk_bytes: int = field(
        default=2**21, metadata=whole("bytes of an all-reduce, at most, that one rank is the last to add to", least=16)
    )
    nodes: int = field(
        default=1, metadata=whole("nodes of equally many ranks each; a ring goes through one after the other", least=1)
    )
