"""Two sides, run in turns on this machine: round after round, in several sets of processes one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from pytest_fxbucket.bench.pace import WINDOW, Pacing, has_settled, is_warm
from pytest_fxbucket.bench.series import Series
from pytest_fxbucket.bench.side_process import SideProcess
from pytest_fxbucket.bench.turns import Seat
from pytest_fxbucket.errors import BenchmarkError

OLD, NEW = SIDES = ("old", "new")
_TURN_S = 0.08
_MOST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Length:
    """How long two sides are run."""

    budget_s: float
    """Seconds of steps of both sides, warm-up included."""
    sets: int = 12
    least_sets: int = 5
    """Before it may end early."""
    least_rounds: int = 10
    """Of a set, even if they take longer."""


@dataclass(slots=True)
class _Set:
    samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SIDES})
    warmup_rounds: int = 0
    is_stable: bool = False
    peak_bytes: dict[str, list[int]] = field(default_factory=dict)
    has_priority: bool = True


def run(
    sides: tuple[SideProcess, SideProcess],
    length: Length,
    is_enough: Callable[[Series], bool],
    say: Callable[[str], None] = lambda _: None,
) -> Series:
    """Run the variants ``old`` and ``new`` until there are all sets, or ``is_enough`` after one of them.

    Both sides have answered their first request. Raises BenchmarkError if one of them fails, in its words.
    """
    done: list[_Set] = []
    for number in range(length.sets):
        say(f"set {number + 1} of at most {length.sets}")
        done.append(_one_set(sides, length))
        series = _series(done)
        if len(done) >= length.least_sets and is_enough(series):
            break
    return series


def _one_set(sides: tuple[SideProcess, SideProcess], length: Length) -> _Set:
    """Fresh processes of both sides, warmed up, timed and ended."""
    budget_s = length.budget_s / length.sets
    watched = [side.descriptor for side in sides]

    def on_other(descriptor: int) -> None:
        side = next(side for side in sides if side.descriptor == descriptor)
        side.answer()  # raises, since none is due before its turns are over
        raise BenchmarkError(f"{side.label}: it ended its turns by itself")

    with ExitStack() as stack:
        seats = {name: stack.enter_context(Seat()) for name in SIDES}
        for side, seat in zip(sides, seats.values(), strict=True):
            side.ask({"address": seat.address, "budget_s": budget_s})
        for seat in seats.values():
            seat.take(watched, on_other)
        found = _rounds(
            seats, Pacing(budget_s, 0.0), length.least_rounds, lambda seat, steps: seat.turn(steps, watched, on_other)
        )
    for name, side in zip(SIDES, sides, strict=True):
        answer = side.answer()
        found.peak_bytes[name] = answer["peak_bytes"]
        found.has_priority &= answer["has_priority"]
    return found


def _rounds(seats: Mapping[str, Seat], pacing: Pacing, least_rounds: int, turn: Callable[[Seat, int], list[float]]) -> _Set:
    """Warm-up, then samples till the time is over; which side is first changes from round to round.

    A sample is the fastest of a few steps of a turn: what else the machine does only ever makes a step slower (Chen & Revels,
    Robust benchmarking in noisy environments, arXiv 1608.04295).
    """
    found, begin, orders = _Set(), time.monotonic(), _orders()

    def add_one(samples: dict[str, list[float]], steps: int) -> None:
        for name in next(orders):
            samples[name].append(min(turn(seats[name], steps)))

    warm: dict[str, list[float]] = {name: [] for name in SIDES}
    while not is_warm(warm, time.monotonic() - begin, pacing):
        add_one(warm, 1)
    found.warmup_rounds, found.is_stable = len(warm[OLD]), has_settled(warm)
    steps = _steps_of_turn(warm)
    while len(found.samples[OLD]) < least_rounds or time.monotonic() - begin < pacing.budget_s:
        add_one(found.samples, steps)
    return found


def _steps_of_turn(warm: Mapping[str, Sequence[float]]) -> int:
    """The same for both sides: as many as are short beside what the machine does over time."""
    step_s = median(sample for samples in warm.values() for sample in samples[-WINDOW:])
    return max(1, min(_MOST_STEPS, round(_TURN_S / step_s)))


def _orders() -> Iterator[tuple[str, ...]]:
    while True:
        yield SIDES
        yield SIDES[::-1]


def _series(done: Sequence[_Set]) -> Series:
    return Series(
        samples={name: tuple(tuple(one.samples[name]) for one in done) for name in SIDES},
        warmup_rounds=tuple(one.warmup_rounds for one in done),
        is_stable=all(one.is_stable for one in done),
        has_priority=all(one.has_priority for one in done),
        peak_bytes={name: tuple(map(max, zip(*(one.peak_bytes[name] for one in done), strict=True))) for name in SIDES},
    )
