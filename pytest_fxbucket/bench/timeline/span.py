"""What is known of one step on one rank's clock: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["launch", "wait", "compute", "flight"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one step on one rank."""

    rank: int
    stream: str
    """compute: what the rank's own thread does; communication: what is in flight; on a GPU "stream 7"."""
    kind: Kind
    """launch: the call that starts a collective; wait: the call that blocks until it has ended, which is exposed time;
    flight: from launch until the end of its wait; compute: everything between."""
    label: str
    """"all_gather layers.3"; of compute the FQN of its module."""
    direction: str
    """forward, backward or optimizer."""
    start_ns: int
    """Since the step began; on one clock for ranks of one machine."""
    end_ns: int
    bucket: int = -1
    """Index of its bucket in the graph's reading; -1: of none."""
