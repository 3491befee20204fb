"""What went wrong on which rank, first cause first."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_fxbucket.errors import RankError

# What gloo says on a rank whose peer is gone: an effect, never the cause.
_PEER_GONE = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|gloo/transport|read error|write error", re.I)
_TAIL_LINES = 20


@dataclass(slots=True)
class RankState:
    """How far one rank came. `outcome`: running, returned, raised, unpicklable, died."""

    rank: int
    outcome: str = "running"
    at: float = 0.0
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    status: int | None = None
    mark: str = ""
    process: str = ""  # the kernel's letter: R runs, S sleeps, T is stopped
    stack: str = ""
    output: str = ""

    @property
    def is_effect(self) -> bool:
        """Whether it failed only because a peer had."""
        return self.outcome == "raised" and bool(_PEER_GONE.search(self.error))

    def line(self) -> str:
        """One line: what it did, and where it was."""
        where = f', at "{self.mark}"' if self.mark and self.outcome != "returned" else ""
        return f"rank {self.rank}: {self.what()}{where}"

    def what(self) -> str:
        """What it did, as the rest of a sentence whose subject is the rank."""
        match self.outcome:
            case "raised":
                return f"raised {self.error_type}: {self.error}" if self.error else f"raised {self.error_type}"
            case "unpicklable":
                return f"could not answer: {self.error}"
            case "died":
                return _how_it_died(self.status)
            case "running":
                return {"T": "is stopped", "R": "is still running"}.get(self.process, "is still waiting")
        return self.outcome


@dataclass(eq=False)
class RankFailure(RankError):
    """A job that did not return on every rank.

    `kind`: raised, died, timeout, or unpicklable. `rank`: the first to fail. `traceback`: that rank's, "" when it left none.
    `others`: a line for each other rank. `stacks`: Python stacks by rank, of all on a timeout, of the rank itself on a crash.
    `output`: the end of what each rank printed. `error`, `error_type`: the exception's first line and class name.
    """

    sentence: str
    kind: str
    rank: int
    traceback: str = ""
    others: tuple[str, ...] = ()
    stacks: Mapping[int, str] = field(default_factory=dict)
    output: Mapping[int, str] = field(default_factory=dict)
    error: str = ""
    error_type: str = ""

    def __str__(self) -> str:
        return self.sentence

    def lines(self) -> Iterator[str]:
        """What a person needs, in order: the sentence, the rank's traceback, the other ranks, stacks, output."""
        yield self.sentence
        if self.traceback:
            yield f"--- rank {self.rank}, traceback"
            yield from self.traceback.rstrip().splitlines()
        if self.others:
            yield "--- the other ranks"
            yield from self.others
        for rank, stack in sorted(self.stacks.items()):
            yield f"--- rank {rank}, Python stacks"
            yield from stack.rstrip().splitlines()
        tail = self.output.get(self.rank, "").rstrip().splitlines()[-_TAIL_LINES:]
        if tail:
            yield f"--- rank {self.rank}, end of its output"
            yield from tail


def failure_of(states: Sequence[RankState], *, task: str, timed_out_s: float | None) -> RankFailure:
    """The failure behind `states`, of which some failed or, when `timed_out_s` is given, did not end within that time."""
    if timed_out_s is not None:
        return _timeout(states, task, timed_out_s)
    first = _first_to_fail(states)
    subject = f"rank {first.rank} of {len(states)}"
    where = f', at "{first.mark}"' if first.mark else ""
    return RankFailure(
        sentence=f"{subject} {first.what()}{where} ({task})",
        kind=first.outcome,
        rank=first.rank,
        traceback=first.traceback,
        others=_others(states, first),
        stacks={s.rank: s.stack for s in states if s.stack},
        output={s.rank: s.output for s in states if s.output},
        error=first.error,
        error_type=first.error_type,
    )


def _timeout(states: Sequence[RankState], task: str, limit_s: float) -> RankFailure:
    late = [state for state in states if state.outcome == "running"]
    # A stopped or busy rank holds up those that wait in a collective, not the other way round.
    first = min(late, key=lambda state: ("TRS".find(state.process) % 4, state.rank))
    who = f"{len(late)} of {len(states)} ranks" if len(late) > 1 else f"rank {first.rank} of {len(states)}"
    return RankFailure(
        sentence=f"{who} did not answer within {limit_s:g} s; {first.line()} ({task})",
        kind="timeout",
        rank=first.rank,
        others=_others(states, first),
        stacks={state.rank: state.stack or "(no stack: the rank did not answer)" for state in states},
        output={s.rank: s.output for s in states if s.output},
    )


def _first_to_fail(states: Sequence[RankState]) -> RankState:
    failed = [state for state in states if state.outcome not in ("running", "returned")]
    return min(failed, key=lambda state: (state.is_effect, state.at, state.rank))


def _others(states: Sequence[RankState], first: RankState) -> tuple[str, ...]:
    return tuple(state.line() for state in states if state is not first)


def _how_it_died(status: int | None) -> str:
    if status is None:
        return "died"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
