"""What one plan's page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record
    from pytest_fxbucket.bench.timeline.span import Span


@dataclass(frozen=True, slots=True)
class ReportInput:
    """One plan's measurement, and what is shown beside it."""

    record: Record
    """Of this run."""
    stored: Sequence[Record] = ()
    """Of earlier runs of the plan, oldest first."""
    spans: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    """By variant, one step of all ranks; without any, the page says that there is no timeline."""
