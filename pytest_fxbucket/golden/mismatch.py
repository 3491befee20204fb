"""The text of a golden, and what a mismatch says: words, a diff that is capped, the command that accepts it."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fxbucket.golden.changes import changes

if TYPE_CHECKING:
    pass

_MOST_WORDS = 40
_MOST_DIFF = 60


def change_lines(old: str, new: str, names: tuple[str, str] = ("golden", "found"), rest: Path | None = None) -> list[str]:
    """What changed from body ``old`` to body ``new`` in words, then the diff; all of a long one goes to the file ``rest``."""
    words = changes(old, new) or [_header_words(old, new)]
    diff = list(unified_diff(_lines(old), _lines(new), *names, lineterm="", n=2))
    return [
        "what changed:",
        *(f"  {word}" for word in words[:_MOST_WORDS]),
        *([f"  ... and {len(words) - _MOST_WORDS} more changes"] if len(words) > _MOST_WORDS else []),
        "",
        *capped(diff, [f"# {word}" for word in words], rest),
    ]


def mismatch_lines(accepted: str, found: str, command: str, rest: Path | None = None) -> list[str]:
    """What changed, in words and as a diff, then the command that accepts it."""
    return [*change_lines(accepted, found, rest=rest), "", f"to accept: {command}"]


def _lines(text: str) -> list[str]:
    """Lines as line feeds part them, and nothing else: names may hold other breaks."""
    return text.removesuffix("\n").split("\n")


def _header_words(old: str, new: str) -> str:
    """Of texts whose schedules are the same."""
    plans = [text.partition("\n")[0].removeprefix("plan ") for text in (old, new)]
    if plans[0] != plans[1]:
        return f"the text is of {plans[0]}, and this is {plans[1]}"
    return "the text changed, but no bucket, launch, wait or compute did"


def capped(diff: Sequence[str], head: Sequence[str] = (), rest: Path | None = None) -> list[str]:
    """The first 60 lines of ``diff``; all of a longer one, under ``head``, goes to ``rest``, which the last line names."""
    more = len(diff) - _MOST_DIFF
    if more <= 0:
        return list(diff)
    if rest is not None:
        rest.parent.mkdir(parents=True, exist_ok=True)
        rest.write_text("\n".join([*head, *diff]) + "\n", encoding="utf-8")
    return [*diff[:_MOST_DIFF], f"... and {more} more lines of diff" + (f", all in {rest}" if rest else "")]
