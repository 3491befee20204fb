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
"""Why no check needs to find a mutant; empty if it is not known to be harmless. ``golden`` may find another schedule."""
SAME_STEP: Harmless = "same values, same schedule"
OTHER_ORDER: Harmless = "same values, no slower and no larger"
_BESIDE_GOLDEN = ("audit", "collectives", "bitwise")


@dataclass(frozen=True, slots=True)
class Judged:
    """One mutant, and which checks found it."""

    mutant: Mutant
    found: Mapping[str, str] = field(default_factory=dict)
    """By name of each check that found the mutant: the first line that it said."""
    undecided: Mapping[str, str] = field(default_factory=dict)
    """By name of each check without a verdict, why: its ranks took too long or failed, or it raised what no check should."""
    equal: bool | None = None
    """Whether ranks compute the same values with the mutant, on all data tried; None if that was not asked or is unknown."""
    harmless: Harmless = ""
    diff: tuple[str, ...] = ()
    """Nodes before and after."""
    unmade: str = ""
    """Why there is no such mutant, as a sentence."""

    @property
    def fate(self) -> Fate:
        """What became of it."""
        # With the schedule unchanged too there was nothing to find. With another order, golden may well have seen the change.
        if self.unmade:
            return "unmade"
        if self.harmless == SAME_STEP or (self.harmless and not self.found):
            return "equivalent"
        return "found" if self.found else "undecided" if self.undecided else "survived"

    @property
    def without_golden(self) -> bool:
        """Whether audit, collectives or bitwise found it. ``golden`` alone says little, since it sees any change."""
        return any(name in self.found for name in _BESIDE_GOLDEN)


@dataclass(frozen=True)
class MutationScore:
    """The score over all mutants that were judged."""

    judged: Sequence[Judged]
    possible: int
    """Number of all mutants of the plan, judged or not."""

    @property
    def counted_mutants(self) -> list[Judged]:
        """Mutants that count: found or survived, not equivalent, undecided or unmade."""
        return [one for one in self.judged if one.fate in ("found", "survived")]

    @property
    def found_count(self) -> int:
        """How many a check found."""
        return sum(one.fate == "found" for one in self.judged)

    @property
    def share(self) -> float:
        """Found of found and survived; 1.0 of none."""
        return self.found_count / len(self.counted_mutants) if self.counted_mutants else 1.0

    @property
    def without_golden(self) -> tuple[int, int]:
        """(found by audit, collectives or bitwise, of how many): of mutants that are not harmless and that are decided."""
        # Where bitwise, say, came to no verdict, a find of golden alone does not tell that the three miss the mutant.
        asked = [one for one in self.counted_mutants if not one.harmless and (one.without_golden or not one.undecided)]
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


def sums(score: MutationScore) -> str:
    """``found 97 of 98 mutants (98.9 %); audit, collectives and bitwise alone find 93 of 96; 12 equivalents beside them``."""
    alone, of = score.without_golden
    beside = f"; {counted(count, 'equivalent')} beside them" if (count := len(score.of("equivalent"))) else ""
    beside += f"; {count} undecided, not counted" if (count := len(score.of("undecided"))) else ""
    found = f"found {score.found_count} of {counted(len(score.counted_mutants), 'mutant')} ({percent(score.share)})"
    return f"{found}; audit, collectives and bitwise alone find {alone} of {of}{beside}"


def percent(share: float) -> str:
    """``97.4 %``, rounded down, so that only a full share is 100 %."""
    return f"{int(share * 1000) / 10:.1f} %"


def survivor_lines(one: Judged) -> Iterator[str]:
    """Which mutant no check found, and why it is not known to be harmless."""
    yield f"{one.mutant.name} survives: {one.mutant.site.node} {one.mutant.site.how}; {why(one)}"


def undecided_lines(one: Judged) -> Iterator[str]:
    """Which checks came to no verdict on a mutant, and why."""
    yield from (f"{one.mutant.name} is undecided by {check}: {sentence}" for check, sentence in one.undecided.items())


def why(one: Judged) -> str:
    """Why a mutant that no check found is not known to be harmless."""
    if one.equal is None:
        return "no ranks could compare its values"
    if not one.equal:
        return "its values differ on ranks, and no check that the plan has on compares them"
    return "its values are the same, and it is slower or larger, which no check that the plan has on measures"
