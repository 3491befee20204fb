"""What became of mutants, and the score that a plan's checks have, in numbers and in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.mutate.mutant import Mutant

Fate = Literal["found", "equivalent", "survived", "undecided", "unmade"]
Harmless = Literal["", "same values, same schedule", "same values, no slower and no larger"]
"""Why nobody need find a mutant; empty if it is not known to be harmless. Another schedule is golden's to find."""
SAME_STEP: Harmless = "same values, same schedule"
OTHER_ORDER: Harmless = "same values, no slower and no larger"
_BESIDE_GOLDEN = ("audit", "collectives", "bitwise")


@dataclass(frozen=True, slots=True)
class Judged:
    """One mutant, and who found it."""

    mutant: Mutant
    found: Mapping[str, str] = field(default_factory=dict)
    """By check the first thing that it said."""
    undecided: Mapping[str, str] = field(default_factory=dict)
    """By check why it came to no verdict: ranks took too long and may have been slow, or it raised what no check should."""
    equal: bool | None = None
    """Whether ranks came to the same values with it, on all data tried; None where that was not asked, or cannot be told."""
    harmless: Harmless = ""
    diff: tuple[str, ...] = ()
    """Nodes before and after."""
    unmade: str = ""
    """Why there is no such mutant, as a sentence."""

    @property
    def fate(self) -> Fate:
        """What became of it."""
        if self.unmade:
            return "unmade"
        if self.harmless == SAME_STEP or (self.harmless and not self.found):
            return "equivalent"
        return "found" if self.found else "undecided" if self.undecided else "survived"

    @property
    def without_golden(self) -> bool:
        """Whether audit, collectives or bitwise find it: any change moves a golden."""
        return any(name in self.found for name in _BESIDE_GOLDEN)


@dataclass(frozen=True)
class Score:
    """Of all mutants that were judged."""

    judged: Sequence[Judged]
    places: int
    """Of mutants that there are."""

    @property
    def made(self) -> list[Judged]:
        """Mutants that are no equivalents, and of which the checks say something."""
        return [one for one in self.judged if one.fate in ("found", "survived")]

    @property
    def found(self) -> int:
        """How many a check found."""
        return sum(one.fate == "found" for one in self.judged)

    @property
    def share(self) -> float:
        """Found of found and survived; 1.0 of none."""
        return self.found / len(self.made) if self.made else 1.0

    @property
    def without_golden(self) -> tuple[int, int]:
        """How many audit, collectives and bitwise find, of how many that are not harmless."""
        asked = [one for one in self.made if not one.harmless and (one.without_golden or not one.undecided)]
        return sum(one.without_golden for one in asked), len(asked)

    def of(self, fate: Fate) -> list[Judged]:
        """Mutants of that fate."""
        return [one for one in self.judged if one.fate == fate]

    def by_check(self) -> dict[str, int]:
        """How many each check found."""
        return dict(Counter(name for one in self.judged for name in one.found))

    def by_operator(self) -> dict[str, Counter[Fate]]:
        """Fates by operator."""
        found: dict[str, Counter[Fate]] = {}
        for one in self.judged:
            found.setdefault(one.mutant.operator, Counter())[one.fate] += 1
        return dict(sorted(found.items()))


def sums(score: Score) -> str:
    """``found 97 of 98 mutants (98.9 %); audit, collectives and bitwise alone find 93 of 96; 12 equivalents beside them``."""
    alone, of = score.without_golden
    beside = f"; {counted(count, 'equivalent')} beside them" if (count := len(score.of("equivalent"))) else ""
    beside += f"; {count} undecided, not counted" if (count := len(score.of("undecided"))) else ""
    found = f"found {score.found} of {counted(len(score.made), 'mutant')} ({percent(score.share)})"
    return f"{found}; audit, collectives and bitwise alone find {alone} of {of}{beside}"


def percent(share: float) -> str:
    """``97.4 %``, never rounded to what is not reached."""
    return f"{int(share * 1000) / 10:.1f} %"


def survivor_lines(one: Judged) -> Iterator[str]:
    """Which mutant nobody found, and why that is not known to be right."""
    yield f"{one.mutant.name} survives: {one.mutant.site.node} {one.mutant.site.how}; {why(one)}"


def undecided_lines(one: Judged) -> Iterator[str]:
    """Which checks came to no verdict on a mutant, and why."""
    yield from (f"{one.mutant.name} is undecided by {check}: {sentence}" for check, sentence in one.undecided.items())


def why(one: Judged) -> str:
    """Why a mutant that nobody found is none that nobody need find."""
    if one.equal is None:
        return "no ranks could compare its values"
    if not one.equal:
        return "its values differ on ranks, and no check that the plan has on compares them"
    return "its values are the same, and it is slower or larger, which no check that the plan has on measures"
