"""The verdict of a check; and joining the lines of several ranks to one list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_fxbucket.ranks.failure import RankFailure

_MOST_LINES = 30


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
    """Whether it failed only since ranks took too long, which may mean that they were slow and not that they hung."""
    by_design: tuple[str, ...] = ()
    """Words of ``[eager] rounds_otherwise`` that may be all that is wrong."""

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


def said_once(problems: Iterable[tuple[Sequence[int], Sequence[str]]]) -> list[str]:
    """Problems of sets of ranks that share a graph, each once; a problem that not all ranks have names its ranks."""
    found: dict[str, list[int]] = {}
    graphs = 0
    for ranks, sentences in problems:
        graphs += len(ranks)
        for sentence in dict.fromkeys(sentences):
            found.setdefault(sentence, []).extend(ranks)
    return [
        sentence if len(ranks) == graphs else f"rank {', '.join(map(str, sorted(ranks)))}: {sentence}"
        for sentence, ranks in found.items()
    ]


def said_in_blocks(problems: Iterable[tuple[Sequence[int], Sequence[str]]]) -> list[str]:
    """Lines of sets of ranks, equal blocks once; blocks name their ranks unless all ranks have the same.

    An indented line belongs to the line above it, so blocks stay whole and indented lines name no rank.
    """
    ranks: dict[tuple[str, ...], list[int]] = {}
    for its, lines in problems:
        ranks.setdefault(tuple(lines), []).extend(its)
    found: list[str] = []
    for block, its in ranks.items():
        of = "" if len(ranks) == 1 else f"rank {', '.join(map(str, sorted(its)))}: "
        found += [line if line.startswith(" ") else of + line for line in block]
    return found


def capped(lines: list[str], most: int = _MOST_LINES) -> list[str]:
    """At most as many lines as a person reads; the count says the rest."""
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most} more"]
