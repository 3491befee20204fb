"""A score in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_fxbucket.words import counted

if TYPE_CHECKING:
    from pytest_fxbucket.mutate.score import Judged, Score


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
