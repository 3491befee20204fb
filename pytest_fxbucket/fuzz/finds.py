"""What was found against a pass: a kind, a sentence, and what tells it from other finds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

RAISED, HANG, VALUES, PLAN, TWICE = KINDS = (
    "exception",
    "would hang",
    "wrong values",
    "plan silently not kept",
    "not idempotent",
)
"""In the order in which they are looked for: who finds one looks no further."""

DIFFERS = " differs in "
"""In sentences that say that values are others."""


@dataclass(frozen=True)
class Find:
    """One thing that is not well."""

    kind: str
    says: str
    """A sentence."""
    lines: tuple[str, ...] = ()
    """What else there is to say."""
    features: frozenset[str] = field(default_factory=frozenset)
    """What the program, the plan and the options have, as of :mod:`pytest_fxbucket.fuzz.features`."""

    @property
    def signature(self) -> tuple[str, str]:
        """Kind and sentence, without names and numbers; of values that differ it does not matter which."""
        return self.kind, "" if DIFFERS in self.says else stripped(self.says)

    @property
    def text(self) -> str:
        """All of it, as a test shows it."""
        return "\n".join([f"{self.kind}: {self.says}", *self.lines])

    def is_of(self, known: Iterable[Find]) -> bool:
        """Whether one of ``known`` has the same signature, and needs no more than this one has."""
        return any(one.signature == self.signature and one.features <= self.features for one in known)


_SAID = re.compile(
    r"\{[^}]*\}|'[^']*'|\"[^\"]*\"|\[[^\]]*\]"  # what is quoted, and lists
    r"|\b\w+(?:\.\w+)+(?: \(\w+\))?"  # operators, with their nodes
    r"|%?\b\w*\d\w*\b|%\w+"
)


def stripped(text: str) -> str:
    """``text`` without what differs from graph to graph: names in quotes, lists, operators, and words with numbers."""
    return " ".join(_SAID.sub("...", text).split())[:160]


def up_to(kind: str) -> Iterator[str]:
    """``kind``, and those that are looked for before it."""
    return iter(KINDS[: KINDS.index(kind) + 1])
