"""What the outcomes of one test on several processes come to, as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_fxbucket.ranks.words import cut


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one phase of a test ended in one process. `kind`: passed, failed, skipped, xfailed, xpassed."""

    kind: str
    text: str = ""
    """What is shown of a failure, or the reason of a skip."""
    is_effect: bool = False
    """Failed only because another process did not come."""
    stop: str = ""
    """Why this process will run no more tests, if so."""

    def cut(self) -> Outcome:
        """The same with no more text than is worth sending, which says what it leaves out."""
        return Outcome(self.kind, cut(self.text), self.is_effect, cut(self.stop))


@dataclass(frozen=True, slots=True)
class Agreed:
    """One outcome for all. `rank`: whose failure it is, if it is somebody's; `lines`: what to show where it is another's."""

    has_failed: bool
    rank: int | None = None
    lines: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """A line for each other process that failed in another way."""


def agree(outcomes: Mapping[int, Outcome], absent: Sequence[str], who: Callable[[int], str]) -> Agreed:
    """The outcome of one phase. A failure anywhere is everybody's; who failed on its own comes before who was left alone.

    `absent`: a sentence for each process that said nothing, which is a failure too.
    """
    failed = {rank: one for rank, one in sorted(outcomes.items()) if one.kind == "failed"}
    if failed:
        rank = min(failed, key=lambda rank: (failed[rank].is_effect, rank))
        first = failed[rank]
        brief = _brief(first.text)
        others = [f"{who(other)}: {_brief(one.text)}" for other, one in failed.items() if _brief(one.text) != brief]
        absent = [line for line in absent if line not in first.text]
        return Agreed(True, rank, (f"on {who(rank)}:", *first.text.splitlines(), *absent), (*others, *absent))
    if absent:
        return Agreed(True, None, tuple(absent))
    if len({one.kind for one in outcomes.values()}) > 1:
        each = ", ".join(f"{who(rank)} {_ended(one)}" for rank, one in sorted(outcomes.items()))
        return Agreed(True, None, (f"the processes disagree: {each}",))
    return Agreed(False)


def _ended(one: Outcome) -> str:
    return f"{one.kind} ({one.text})" if one.text else one.kind


def _brief(text: str) -> str:
    """The line of a failure that says most: pytest marks those of the error with an E."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[0] if lines else "failed")
