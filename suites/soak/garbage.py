"""The part of the soak that feeds us garbage: mutated plans, goldens, stored runs and command lines; none is taken for well."""

from __future__ import annotations

import random
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from suites.soak.judges import Fault, a_command, a_golden, a_plan, a_run

Judge = Callable[[random.Random, Path], str]
KINDS: dict[str, Judge] = {"plans": a_plan, "goldens": a_golden, "stored runs": a_run, "command lines": a_command}
LIMIT_S = 60
_MOST_TOLD = 5


class _Hangs(BaseException):
    """No exception that anybody catches."""


def garbage(count: int, seed: int, say: Callable[[str], None], kinds: dict[str, Judge] = KINDS) -> Iterator[str]:
    """`count` mutants in equal parts of each kind, each of its number and `seed` alone; a sentence for each fault."""
    for kind, judge in kinds.items():
        part, outcomes, faults = count // len(kinds), Counter[str](), list[str]()
        for number in range(part):
            try:
                outcomes[_judged(judge, random.Random(f"{seed} {kind} {number}"))] += 1
            except (Exception, _Hangs, SystemExit) as error:
                faults.append(f"garbage: {kind} number {number}, seed {seed}: {_told(error)}")
        what = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        say(f"garbage: {part - len(faults)} of {part} {kind} as they should be ({what}); seed {seed}")
        yield from faults[:_MOST_TOLD]
        if len(faults) > _MOST_TOLD:
            yield f"garbage: and {len(faults) - _MOST_TOLD} more {kind}, seed {seed}"
        if part >= 20 and outcomes["refused"] < part // 4:
            yield f"garbage: {outcomes['refused']} of {part} {kind} were refused, so that they show little"


def _judged(judge: Judge, chance: random.Random) -> str:
    with tempfile.TemporaryDirectory() as folder:
        before = signal.signal(signal.SIGALRM, _hangs)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            return judge(chance, Path(folder))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _hangs(*_: object) -> None:
    raise _Hangs(f"not done in {LIMIT_S} s")


def _told(error: BaseException) -> str:
    if isinstance(error, Fault):
        return str(error)
    return "".join(traceback.format_exception(error))[-3000:]
