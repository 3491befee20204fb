"""What went wrong on which rank, first cause first: stacks made readable, and what to try."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.ranks.desync import agree, desyncs, wait_for_ever
from pytest_fxbucket.ranks.flight_recorder import RankPosition
from pytest_fxbucket.ranks.stacks import folded, readable

# What gloo says on a rank whose peer is gone: an effect, never the cause.
_PEER_GONE = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|gloo/transport|read error|write error", re.I)
_TAIL_LINES = 20
_CELL = 60


@dataclass(slots=True)
class RankState:
    """How far one rank came.

    ``outcome``: running, returned, raised, unpicklable, garbled (something else came through its connection), died, gone (its
    machine does not answer). ``lost``: what its job took away, so that the process is of no use to other jobs.
    """

    rank: int
    outcome: str = "running"
    at: float = 0.0
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    status: int | None = None
    is_out_of_memory: bool = False
    """Whether the kernel ended a process for lack of memory meanwhile."""
    where: RankPosition = field(default_factory=RankPosition)
    process: str = ""  # the kernel's letter: R runs, S sleeps, T is stopped
    stack: str = ""
    output: str = ""
    lost: str = ""
    classes: tuple[str, ...] = ()
    """Of a rank that raised the class of that and all that it is derived from, each as "module.name"."""
    text: str = ""
    """Of a rank that raised all that its exception says, of which ``error`` is the first line."""

    @property
    def is_effect(self) -> bool:
        """Whether it failed only because a peer had, or launched something else: then gloo raises, or aborts the process."""
        if self.outcome == "died":
            return self.status == -signal.SIGABRT and "gloo::" in self.output
        return self.outcome == "raised" and bool(_PEER_GONE.search(self.error))

    @property
    def raised_at(self) -> tuple[str, ...]:
        """What it raised, and the lines that led there."""
        return (self.error_type, *(line for line in self.traceback.splitlines() if line.startswith("  File ")))

    def place(self) -> str:
        """Its mark, as a part of a sentence."""
        return f', at "{self.where.mark}"' if self.where.mark and self.outcome != "returned" else ""

    def what(self) -> str:
        """What it did, as the rest of a sentence whose subject is the rank."""
        match self.outcome:
            case "raised":
                return f"raised {self.error_type}: {self.error}" if self.error else f"raised {self.error_type}"
            case "unpicklable":
                return f"could not answer: {self.error}"
            case "garbled":
                return "sent what is no answer: something else wrote to its connection with pytest"
            case "died":
                return _how_it_died(self.status, self.is_out_of_memory)
            case "running":
                return {"T": "is stopped", "R": "is still running"}.get(self.process, "is still waiting")
            case "gone":
                return f"is gone: {self.error or 'its machine does not answer'}"
        return self.outcome


@dataclass(eq=False)
class RankFailure(RankError):
    """A job that did not return on every rank, or in which the ranks launched different collectives.

    ``kind``: raised, died, timeout, mismatch, unpicklable, garbled, deadlock. ``rank``: the first to fail. ``states``: of all
    ranks; of that rank alone if its payload or result cannot be pickled. ``parted``: sentences that say where the ranks'
    collectives part. ``buckets``: rank -> the bucket of the collective at hand, filled in by the check that knows the buckets.
    """

    sentence: str
    kind: str
    rank: int
    states: tuple[RankState, ...] = ()
    parted: tuple[str, ...] = ()
    buckets: Mapping[int, str] = field(default_factory=dict)
    has_processes: bool = True
    """Whether each rank was a process, and not all of them one."""
    is_only_late: bool = False
    """Whether the time was over, and no record shows that the ranks would have waited for ever: they may have been slow."""

    def __str__(self) -> str:
        return self.sentence

    @property
    def error(self) -> str:
        """The first line of what the first to fail raised, or why it could not answer."""
        return self._first.error if self._first is not None else ""

    @property
    def error_type(self) -> str:
        """The class of what it raised."""
        return self._first.error_type if self._first is not None else ""

    @property
    def traceback(self) -> str:
        """The traceback of the first to fail."""
        return self._first.traceback if self._first is not None else ""

    @property
    def stacks(self) -> dict[int, str]:
        """Python stacks by rank, where there are any, down to where the job began."""
        return {state.rank: readable(state.stack) for state in self.states if state.stack}

    @property
    def output(self) -> dict[int, str]:
        """The end of what each rank printed."""
        return {state.rank: state.output for state in self.states if state.output}

    @property
    def table(self) -> list[str]:
        """A line a rank, the first to fail on top: what it did, its mark, and its collective with the bucket."""
        ranks = sorted(self.states, key=lambda state: (state.rank != self.rank, state.rank))
        rows = [
            (
                f"rank {s.rank}",
                _briefly(s),
                f'"{s.where.mark}"' if s.where.mark else "",
                self._collective(s),
            )
            for s in ranks
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows]

    def lines(self, *, with_output: bool = True) -> Iterator[str]:
        """What a person reads: the sentence, all ranks, tracebacks, where the ranks part, what to try, stacks, output."""
        yield self.sentence
        raised = list(self._raised())
        for state in raised[:1]:
            yield from _traceback_of(state)
        if len(self.states) > 1:
            yield "--- the ranks"
            yield from self.table
        for state in raised[1:]:
            yield from _traceback_of(state)
        yield from (line for line in self.parted if line not in self.sentence)
        yield from (f"try: {line}" for line in what_to_try(self.kind, self._first, self.has_processes))
        yield from folded(self.stacks)
        tail = self.output.get(self.rank, "").rstrip().splitlines()[-_TAIL_LINES:]
        if tail and with_output:
            yield f"--- rank {self.rank}, end of its output"
            yield from tail

    @property
    def _first(self) -> RankState | None:
        return next((state for state in self.states if state.rank == self.rank), None)

    def _raised(self) -> Iterator[RankState]:
        """Ranks whose tracebacks are shown, the first to fail on top: one for each place, and none that only lost a peer."""
        seen = set()
        for state in sorted(self.states, key=lambda state: (state.rank != self.rank, state.at)):
            if state.traceback and state.raised_at not in seen and (state.rank == self.rank or not state.is_effect):
                yield state
            seen.add(state.raised_at)

    def _collective(self, state: RankState) -> str:
        bucket = self.buckets.get(state.rank, "")
        return f"{state.where.text} ({bucket})" if bucket and state.where.text else state.where.text


def _traceback_of(state: RankState) -> Iterator[str]:
    yield f"--- rank {state.rank}, traceback"
    yield from state.traceback.rstrip().splitlines()


def _briefly(state: RankState) -> str:
    text = "lost the connection to a peer" if state.is_effect and state.outcome == "raised" else state.what()
    return text if len(text) <= _CELL else text[: _CELL - 4] + " ..."


def has_failed(states: Sequence[RankState]) -> bool:
    """Whether some rank did not return, or the ranks launched different collectives, or left messages."""
    return any(s.outcome != "returned" for s in states) or not agree({s.rank: s.where for s in states})


def failure_of(states: Sequence[RankState], *, task: str, timed_out_s: float | None) -> RankFailure:
    """The failure behind ``states``, of which some failed or, when ``timed_out_s`` is given, did not end within that time."""
    # Who failed first, by outcomes; then where the flight records part. Records that part come before the outcomes where these
    # say only that ranks were late, or lost a peer: that is what becomes of ranks that wait in different collectives.
    places = {state.rank: state.where for state in states if state.outcome not in ("unpicklable", "garbled", "gone")}
    parted = desyncs(places)
    first = _first_to_fail(states)
    kind = _kind_of(first)
    if parted and (kind in ("timeout", "mismatch") or (first.is_effect and not parted[0].is_missing)):
        # Who launched something else comes before who only noticed.
        first, kind = next(state for state in states if state.rank == parted[0].rank), "mismatch"
    if timed_out_s is not None and kind in ("timeout", "mismatch"):
        kind = "timeout"
        sentence = f"{_late(states)} did not answer within {timed_out_s:g} s; rank {first.rank}: {first.what()}"
        sentence += first.place() + (f"; {parted[0].sentence}" if parted else "")
    elif kind == "mismatch":
        sentence = parted[0].sentence if parted else "the ranks part in collectives or messages that their records do not tell"
    else:
        sentence = f"rank {first.rank} of {len(states)} {first.what()}{first.place()}"
    return RankFailure(
        sentence=f"{sentence} ({task})",
        kind=kind,
        rank=first.rank,
        states=tuple(states),
        # That a rank which died or raised launched less than the others is no news.
        parted=tuple(one.sentence for one in parted if kind in ("timeout", "mismatch") or not one.is_missing),
        is_only_late=kind == "timeout"
        and all(one.is_missing for one in parted)
        and not wait_for_ever(places, [state.rank for state in states if state.outcome == "running"]),
    )


def _kind_of(first: RankState) -> str:
    return {"running": "timeout", "returned": "mismatch", "gone": "died"}.get(first.outcome, first.outcome)


def _late(states: Sequence[RankState]) -> str:
    late = [state.rank for state in states if state.outcome == "running"]
    return f"{len(late)} of {len(states)} ranks" if len(late) != 1 else f"rank {late[0]} of {len(states)}"


def _first_to_fail(states: Sequence[RankState]) -> RankState:
    """The rank that failed first: own failures before effects before late ranks; of the late a stopped or busy one first."""

    def order(state: RankState) -> tuple[int, float, int]:
        if state.outcome == "running":
            # A stopped or busy rank holds up those that wait for it, and not they it.
            return 2, {"T": 0, "R": 1, "S": 2}.get(state.process, 3), state.rank
        return (3 if state.outcome == "returned" else int(state.is_effect)), state.at, state.rank

    first = min(states, key=order)
    if first.outcome != "raised" or first.is_effect:
        return first
    # Of ranks that raised the same at the same place the lowest stands for all: which was quickest is chance.
    return next(s for s in states if s.outcome == "raised" and not s.is_effect and s.raised_at == first.raised_at)


def _how_it_died(status: int | None, is_out_of_memory: bool) -> str:
    if status is None:
        return "died"
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}" + (", by the kernel for lack of memory" if is_out_of_memory else "")


# What to try after a failure of ranks, a sentence each.


_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|MemoryError|cannot allocate", re.I)

_NO_GPU_MEMORY = re.compile(r"CUDA (error: )?out of memory")


def what_to_try(kind: str, first: RankState | None, has_processes: bool) -> Iterator[str]:
    """Sentences for a failure of ``kind`` whose first rank is ``first``; ``has_processes``: each rank was one."""
    if kind in ("mismatch", "deadlock"):
        yield (
            "make every rank launch the same collectives in the same order (in a plan's graphs the check `collectives` looks), "
            "and receive what another sends it"
        )
    elif kind == "timeout":
        yield from _advice_late(first)
    elif kind == "unpicklable":
        yield "give and return tensors, numbers, strings, and plain containers of them"
    elif kind == "garbled":
        yield "look for code that writes to descriptors that it did not open, or for a forked process that goes on as the rank"
    elif first is not None:
        yield from _ended(first, has_processes)


def _advice_late(first: RankState | None) -> Iterator[str]:
    if first is not None and first.process == "T":
        yield "continue or kill what stopped the rank (SIGSTOP, a debugger)"
    elif first is not None and first.outcome == "running" and first.process == "R":
        yield "see below where the rank is busy; if that is honest work on a slow machine, give it more time (timeout_s)"
    else:
        yield "see below where each rank stands; the one that is not in the others' collective is the one to look at"


def _ended(first: RankState, has_processes: bool) -> Iterator[str]:
    if _NO_GPU_MEMORY.search(first.error):
        yield (
            "let fewer ranks share a GPU (run.ranks_per_gpu of a plan: each has an equal part of its memory), "
            "or use fewer ranks or a smaller model here (run.world)"
        )
    elif first.is_out_of_memory or _NO_MEMORY.search(f"{first.error_type} {first.error}"):
        yield "use fewer ranks or a smaller model here (run.world of a plan), or a machine with more memory"
    elif first.outcome == "died" and first.status == -9:
        yield "look who sends SIGKILL: if nobody does, the kernel does when memory runs out (dmesg says so)"
    elif first.outcome == "died" and first.status is not None and first.status < 0:
        yield "see below the Python stack at the crash; a native debugger on the same job with one rank shows the rest"
    elif first.outcome == "died":
        yield "look for os._exit or a library that ends the process; what the rank printed last is below"
    elif first.outcome == "gone":
        yield "look at that machine: its pytest ended, was killed, or lost the network"
    elif has_processes and first.error_type != "AssertionError":
        yield "run the same with backend local: all ranks in one process, one at a time, and nothing that can hang"
