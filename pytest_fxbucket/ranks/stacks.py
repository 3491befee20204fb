"""Python stacks as faulthandler writes them, made readable: from the job on, and equal ones once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pytest_fxbucket.ranks.ledger import ranks_text

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+( \[[^]]*\])?( \(most recent call first\))?:$")
# Below this frame is how the rank came to run the job; the file is the rank's own loop.
_JOB_BEGINS = re.compile(r'File ".*[/\\]pytest_fxbucket[/\\]ranks[/\\]worker\.py", line \d+ in _run$')
_RANK_LOOP = re.compile(r'File ".*[/\\]pytest_fxbucket[/\\]ranks[/\\]worker\.py", line \d+ in ')
_IDLE = "  has no job"
NO_STACK = "(no stack: the rank did not answer)"


def readable(stack: str) -> str:
    """The threads of a dump, each from its innermost frame to where the job began, without addresses."""
    lines: list[str] = []
    skipping = False
    for line in stack.splitlines():
        if _THREAD.match(line):
            skipping = False
            lines.append("thread, innermost frame first:")
        elif _JOB_BEGINS.search(line):
            skipping = True
        elif not skipping and _RANK_LOOP.search(line) and lines and lines[-1].startswith("thread"):
            lines.append(_IDLE)
            skipping = True
        elif line.strip() and not skipping:
            lines.append(line)
    return "\n".join(lines)


def folded(stacks: Mapping[int, str]) -> Iterator[str]:
    """All stacks, those of ranks that stand at the same place once; nothing if no rank is in its job any more."""
    same: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        same.setdefault(stack, []).append(rank)
    for stack, ranks in same.items() if any(not stack.endswith(_IDLE) for stack in same) else ():
        yield f"--- {ranks_text(tuple(ranks))}, Python stacks"
        yield from stack.splitlines()
