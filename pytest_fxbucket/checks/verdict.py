"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.failure import RankFailure


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one check of one plan; true in a boolean context exactly if it passed."""

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    summary: str
    """One line for people."""
    lines: tuple[str, ...] = ()
    """What a person needs when it failed; the last lines say what to do."""
    folder: Path | None = None
    """Where graphs, report and rank logs lie."""
    is_only_late: bool = False
    """Whether it failed of ranks that took too long, which may have been slow."""

    def __bool__(self) -> bool:
        return self.outcome == "passed"

    def __repr__(self) -> str:
        return "\n".join([f"<{self.check} {self.outcome}: {self.summary}>", *self.lines])


def passed(check: str, summary: str) -> Verdict:
    """A check that ran and found nothing."""
    return Verdict(check, "passed", summary)


def failed(check: str, summary: str, lines: list[str]) -> Verdict:
    """A check that found something."""
    return Verdict(check, "failed", summary, tuple(lines))


def failed_on_ranks(check: str, failure: RankFailure) -> Verdict:
    """A check whose ranks did not all answer."""
    return Verdict(check, "failed", str(failure), tuple(failure.lines()), is_only_late=failure.is_only_late)


def skipped(check: str, reason: str) -> Verdict:
    """A check that could not run here; counted and named, never passed."""
    return Verdict(check, "skipped", reason)
