"""What moving launches and waits came to, by hand or found by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.passes.report import Schedule
    from pytest_fxbucket.passes.targets import LeftAlone


@dataclass(frozen=True, slots=True)
class Reordered:
    """What moving came to."""

    left: tuple[LeftAlone, ...]
    kept: tuple[tuple[fx.Node, fx.Node], ...]
    """Pairs (earlier, later) whose order makes the overlap; no edge carries it."""
    schedule: Schedule | None = None
    """Of an order that was found by itself what it came to."""
