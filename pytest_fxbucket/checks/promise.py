"""What a plan promises of every graph, and the words in which audits speak of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pytest_fxbucket.graph.reading import Bucket, Direction, Reading

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Promise:
    """What a plan promises of every graph."""

    entry_of: Mapping[str, str]
    """FQN to entry, planned parameters only."""
    registration: tuple[str, ...]
    own_dtype: Mapping[str, torch.dtype]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    merged: bool
    layout: str
    prefetch: int
    defer_reduce: bool
    reshard_after_forward: bool


def of_kind(reading: Reading, direction: Direction, kind: str) -> list[Bucket]:
    """Buckets of one direction and kind, in order of their launches."""
    return [bucket for bucket in reading.buckets if bucket.direction == direction and bucket.kind == kind]


def dtype_name(dtype: torch.dtype | None) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def times(count: int) -> str:
    """never, once, 2 times."""
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def some(fqns: Sequence[str]) -> str:
    """The first three FQNs, and how many more."""
    shown = ", ".join(fqns[:3])
    return shown if len(fqns) <= 3 else f"{shown} and {len(fqns) - 3} more"
