"""What a cluster can do, as a few figures. Plain data; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """How one device reaches others."""

    bandwidth: float
    """Bytes a second that a device sends, and receives at the same time."""
    latency: float
    """Seconds of one hop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Figures of one kind of cluster, as its makers print them; :attr:`efficiency` says what of them is had."""

    name: str
    flops: Mapping[str, float]
    """Dense floating point operations a second, by dtype: ``bfloat16``. A dtype that is not there counts as ``float32``."""
    memory_bandwidth: float
    """Bytes a second between a device and its own memory."""
    memory: float
    """Bytes of a device."""
    devices_per_node: int
    within: Link
    """Between devices of a node."""
    between: Link
    """Between nodes, for each device."""
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    network_efficiency: float = 1.0
    launch: float = 0.0
    """Seconds that the host takes to call an operator."""
    view: float = 0.0
    """Seconds that the host takes to call one that runs no kernel, a view."""
    enqueue: float = 0.0
    """Seconds that the host takes to launch a collective, beyond :attr:`launch`."""
    enqueue_per_byte: float = 0.0
    """Seconds more for each byte of its larger side, as where the host copies what it hands over."""
    waiting: float = 0.0
    """Seconds that the host takes to call a wait, even for what is there."""
    least: float = 0.0
    """Seconds that any kernel takes."""
    collective: float = 0.0
    """Seconds that any collective takes, whatever it carries."""
    blocking: bool = False
    """Whether the host itself computes, as on a CPU: no operator is called before the one before it is done."""
    rounding: int = 1
    """Bytes that an allocation is a multiple of."""

    def nodes_of(self, ranks: Sequence[int]) -> int:
        """How many nodes ``ranks`` are on, which fill nodes in order."""
        return len({rank // self.devices_per_node for rank in ranks})
