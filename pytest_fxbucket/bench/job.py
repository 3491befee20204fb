"""Runs in the ranks: steps of several variants in turn, or of one variant when it is its side's turn, timed on every rank.

A sample is the slowest rank's time. Ranks that are timed run before everything else on the machine, and their communication
before their compute (``come_first``). Otherwise a thread that gloo wakes when a message comes runs only at the kernel's next
tick, up to 4 ms later, behind the rank's own compute or another process. That delay is several times what a small collective
takes, and differs from step to step. With real-time priority (sched(7)) a collective of two ranks on two cores took 0.15 ms
with 0.33 ms at the 95th percentile, and 0.55 ms with 3.7 ms without. The kernel leaves 5 % of the time to all others.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import fx

from pytest_fxbucket.bench.sides_in_turn import REST_STEPS, TurnClient
from pytest_fxbucket.bench.staged import StagedTask, StagedVariant
from pytest_fxbucket.bench.stats import Pacing, has_settled, is_enough, is_warm
from pytest_fxbucket.bench.timed_graphs import TimingPhase, timed_graph
from pytest_fxbucket.bench.timeline.marks import Span
from pytest_fxbucket.bench.timeline.traced_steps import traced_steps
from pytest_fxbucket.process import collector
from pytest_fxbucket.ranks import device, mark

_COMPUTE, _COMMUNICATION = 1, 2  # priorities
_RESET_PEAK = "5"
"""Written to /proc/self/clear_refs, it resets VmHWM, the peak resident size: https://docs.kernel.org/filesystems/proc.html"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingTask:
    """The work of one rank: steps of variants, which take turns."""

    variants: tuple[str, ...]
    phases: tuple[TimingPhase, ...]
    pacing: Pacing
    staged: StagedTask | None = None
    """The step in pipeline stages, instead of phases."""
    traced_steps: int = 0
    """How many steps of each variant are traced for a timeline, after all samples are taken."""


@dataclass(slots=True)
class RankTimes:
    """The results of one rank."""

    digests: dict[str, tuple[str, ...]]
    """By variant the digests of the graphs that ran, in the order of the phases."""
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of the slowest rank, one a round; the same on every rank."""
    warmup_rounds: int = 0
    is_stable: bool = False
    has_priority: bool = False
    """Whether it ran before everything else on the machine."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Largest resident size of this rank's process during one step; on a GPU, the most GPU memory that its tensors took."""
    spans: dict[str, tuple[tuple[tuple[Span, ...], ...], ...]] = field(default_factory=dict)
    """By variant this rank's spans, for each phase and in it for each traced step."""


def run(rank: int, world: int, task: TimingTask) -> RankTimes:
    """Warm up, take samples until there are enough, then a step of each variant for its memory, and some for its timeline."""
    with collector.paused():
        steps = {name: step_of(name, rank, task.phases, task.staged) for name in task.variants}
        # Behind the steps, which make the process groups whose threads are to come first.
        timed = RankTimes({name: step.digests for name, step in steps.items()}, has_priority=_priority(task.staged))
        take_samples(Rounds(steps, world), task.pacing, timed)
        timed.peak_bytes = {name: peak_bytes_of(step.run, device()) for name, step in steps.items()}
        if task.traced_steps:
            timed.spans = {name: step.traced(task.traced_steps) for name, step in steps.items()}
        for step in steps.values():
            step.finish()
    return timed


def take_samples(rounds: Rounds, pacing: Pacing, timed: RankTimes) -> None:
    """Warm up, and take samples until there are enough; both go to ``timed``. All ranks call this alike."""
    # One clock for both loops: samples get what warm-up leaves of the budget.
    begin, warm = time.monotonic(), rounds.fresh()
    while not is_warm(warm, rounds.shared_s(begin), pacing):
        rounds.add_one(warm)
    timed.warmup_rounds, timed.is_stable = len(next(iter(warm.values()))), has_settled(warm)
    timed.samples = rounds.fresh()
    while not is_enough(timed.samples, rounds.shared_s(begin), pacing):
        rounds.add_one(timed.samples)


class Timeable(Protocol):
    """A step that can be timed: only ``call`` counts."""

    name: str

    def prepare(self) -> None:
        """Do everything before the step that is not timed."""

    def call(self) -> None:
        """Run the step."""

    def settle(self) -> None:
        """Do everything after the step that is not timed."""


class TimedStep:
    """One variant of the step with state of its own, which its steps update as training would."""

    def __init__(self, name: str, rank: int, phases: Sequence[TimingPhase]) -> None:
        self.name, self._phases, self._seed = name, phases, phases[0].seed
        self._parts = [timed_graph(rank, phase, name) for phase in phases]
        self.graphs, self.states = [part.graph for part in self._parts], [part.state for part in self._parts]
        self.digests = tuple(one for part in self._parts for one in part.digests)

    def run(self) -> None:
        """One step, and the update of its state."""
        self.prepare()
        self.call()
        self.settle()

    def traced(self, steps: int) -> tuple[tuple[tuple[Span, ...], ...], ...]:
        """Run some steps with clocks in their graphs; the spans, by phase and step."""
        mark(f"timeline of {self.name}")
        return tuple(
            traced_steps(graph, phase.marks[self.name], partial(self._run_with, number), steps)
            for number, (phase, graph) in enumerate(zip(self._phases, self.graphs, strict=True))
        )

    def _run_with(self, number: int, graph: fx.GraphModule) -> None:
        """One step with another graph as its phase ``number``; ranks begin together."""
        self.prepare()
        dist.barrier()
        self.call([graph if number == other else own for other, own in enumerate(self.graphs)])
        self.settle()

    def prepare(self) -> None:
        """Seed, and get the inputs of the step."""
        torch.manual_seed(self._seed)
        self._given = [part.arguments() for part in self._parts]

    def call(self, graphs: Sequence[fx.GraphModule] | None = None) -> None:
        """Run the step itself: every phase."""
        self.results = [graph(*given) for graph, given in zip(graphs or self.graphs, self._given, strict=True)]

    def settle(self) -> None:
        """Make the results of the step the new state. Not timed: it is needed only because a graph returns its new state."""
        for part, results in zip(self._parts, self.results, strict=True):
            part.take_results(list(results) if isinstance(results, list | tuple) else [results])
        self._given, self.results = [], []

    def finish(self) -> None:
        """Do the work that the last step left to the next one."""
        for part in self._parts:
            part.finish()


def step_of(name: str, rank: int, phases: Sequence[TimingPhase], staged: StagedTask | None) -> TimedStep | StagedVariant:
    """The variant ``name`` of the step."""
    return TimedStep(name, rank, phases) if staged is None else StagedVariant(name, rank, staged)


class Rounds:
    """Rounds of all variants, a step each; their order changes from round to round, so that none always follows another."""

    def __init__(self, steps: Mapping[str, Timeable], world: int) -> None:
        self._steps, self._world = steps, world
        self._number = count()

    def fresh(self) -> dict[str, list[float]]:
        """No samples yet."""
        return {name: [] for name in self._steps}

    def add_one(self, samples: dict[str, list[float]]) -> None:
        """Run a round and add each variant's sample."""
        number = next(self._number)
        own = {}
        for step in self._in_turn(number):
            mark(f"{step.name} round {number + 1}")
            own[step.name] = _timed(step)
        mark(f"sharing times of round {number + 1}")
        for name, seconds in zip(samples, _slowest([own[name] for name in samples]), strict=True):
            samples[name].append(seconds)

    def shared_s(self, begin: float) -> float:
        """Seconds since ``begin`` on rank 0's clock, on every rank."""
        # All ranks must stop after the same round: one that went on alone would wait for ever in its next collective.
        elapsed = torch.tensor([time.monotonic() - begin], dtype=torch.float64, device=device())
        dist.broadcast(elapsed, 0)
        return float(elapsed)

    def _in_turn(self, number: int) -> Iterator[Timeable]:
        # Every second round is the one before it in reverse, and every second round another variant is the first.
        steps = list(self._steps.values())
        first = number // 2 % len(steps)
        turned = steps[first:] + steps[:first]
        return iter(turned if number % 2 == 0 else turned[::-1])


def _slowest(own: Sequence[float]) -> list[float]:
    """The largest value over all ranks, for each number."""
    mine = torch.tensor(own, dtype=torch.float64, device=device())
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.tolist()


@dataclass(frozen=True, slots=True)
class TurnTask:
    """The work of one rank of a side: steps of one variant."""

    variant: str
    phases: tuple[TimingPhase, ...]
    address: str
    """Address of the socket where rank 0 is told its turns."""
    staged: StagedTask | None = None
    """The step in pipeline stages, instead of phases."""


@dataclass(frozen=True, slots=True)
class TurnsTaken:
    """The results of one rank; the times were sent, turn by turn, to the process that compares."""

    digests: tuple[str, ...]
    peak_bytes: int
    """Largest resident size of its process during one step; on a GPU, the most GPU memory that its tensors took."""
    has_priority: bool
    """Whether it ran before everything else on the machine."""


def take_turns(rank: int, world: int, task: TurnTask) -> TurnsTaken:
    """Run steps whenever rank 0 is told to, until it is told to end."""
    with collector.paused(), contextlib.ExitStack() as stack:
        step = step_of(task.variant, rank, task.phases, task.staged)
        gc.collect()
        gc.freeze()
        has_priority = _priority(task.staged)
        _timed(step)  # what is only ever done once is done before anybody waits
        turn = TurnClient(task.address) if rank == 0 else None
        if turn is not None:
            stack.callback(turn.close)
        while steps := _steps_asked(turn):
            mark(f"turn of {task.variant}")
            seconds = _slowest([_timed(step) for _ in range(REST_STEPS + steps)][REST_STEPS:])
            if turn is not None:
                turn.done(seconds)
        peak_bytes = peak_bytes_of(step.run, device())
        step.finish()
        return TurnsTaken(step.digests, peak_bytes, has_priority)


def _steps_asked(turn: TurnClient | None) -> int:
    """How many steps rank 0 was told to time, told to every rank; 0: all is over."""
    mark("waiting for its turn")
    asked = torch.tensor([turn.wait() if turn is not None else 0], device=device())
    # The other ranks are held here while rank 0 waits for its turn.
    dist.broadcast(asked, 0)
    return int(asked.item())


def _timed(step: Timeable) -> float:
    """Seconds of one step on this rank; all ranks begin together, behind a barrier."""
    step.prepare()
    dist.barrier()
    seconds = seconds_of(step.call, device())
    step.settle()
    return seconds


def seconds_of(step: Callable[[], None], device: str) -> float:
    """Seconds of ``step`` on this rank: by the monotonic clock, or on a GPU between two events on the current stream."""
    if torch.device(device).type != "cuda":
        begin = time.perf_counter_ns()
        step()
        return (time.perf_counter_ns() - begin) / 1e9
    # An event is reached when its own stream gets to it, so all other streams must be empty on either side.
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    step()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / 1e3


def peak_bytes_of(step: Callable[[], None], device: str) -> int:
    """Largest resident size of this process during ``step``; on a GPU, the most GPU memory that tensors took.

    If the kernel cannot reset the peak, it is the largest size since the process began.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    step()
    return _high_water_bytes()


def _high_water_bytes() -> int:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux, as VmHWM is


def _priority(staged: StagedTask | None) -> bool:
    """Whether this rank now runs before everything else. One that sends from its main thread, as pipeline stages do, must not.

    gloo's thread polls for a message while the sender holds the pair's lock (``Pair::handleEvents`` only tries to take it).
    With a higher priority it would keep the sender from its core, so that the sender would never release the lock.
    """
    return staged is None and come_first()


def come_first() -> bool:
    """Give all threads of this process real-time priority; False if that is not allowed here (CAP_SYS_NICE, or ulimit -r).

    To be called after process groups are made, since all threads but the main one are taken for those of communication.
    """
    main = os.getpid()  # also the id of the main thread
    try:
        for thread in map(int, os.listdir("/proc/self/task")):
            priority = _COMPUTE if thread == main else _COMMUNICATION
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(priority))
    except ProcessLookupError:  # a thread that has just ended
        return come_first()
    except OSError:
        return False
    return True
