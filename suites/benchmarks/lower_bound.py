"""Seconds of exposed communication that no schedule can save which keeps compute in its order.

Launches may go anywhere. Each stream runs one collective at a time, and compute one kernel at a time. A task has a head, what
must have run before it can start; its own seconds; and a tail, what can run only behind it. The schedule that always runs what
is there and has the longest tail, and may interrupt it (J. R. Jackson, 1955), ends as early as any schedule of one stream
(J. Carlier, 1982). No step ends before the slowest stream does so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Literal

COMPUTE = "compute"
Order = Literal["kept", "earlier", "free"]
"""Of compute: behind all that is kept before it; that or earlier, so all that is kept behind it stays behind it; anywhere."""
Job = tuple[float, float, float]
"""Head, seconds and tail."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel or a collective of a step."""

    seconds: float
    needs: tuple[int, ...] = ()
    """Numbers of tasks, all before it, whose end it waits for."""
    stream: str = COMPUTE
    order: Order = "kept"
    """Of a collective nothing."""


def least_exposed(tasks: Sequence[Task]) -> float:
    """Seconds in which compute must stand still in any schedule of ``tasks``, which come in an order that could be run."""
    jobs: dict[str, list[Job]] = {}
    for task, head, tail in zip(tasks, _heads(tasks), _tails(tasks), strict=True):
        jobs.setdefault(task.stream, []).append((head, task.seconds, tail))
    compute = sum(task.seconds for task in tasks if task.stream == COMPUTE)
    return max(0.0, max(map(least_makespan, jobs.values()), default=0.0) - compute)


def least_makespan(jobs: Iterable[Job]) -> float:
    """When the last tail of ``jobs`` ends in Jackson's preemptive schedule: the least for one machine."""
    coming = sorted(jobs, reverse=True)
    there: list[tuple[float, float]] = []
    now = end = 0.0
    while coming or there:
        if not there:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, seconds, tail = coming.pop()
            heappush(there, (-tail, seconds))
        tail, left = there[0]
        pause = coming[-1][0] if coming else float("inf")
        if now + left > pause:
            heapreplace(there, (tail, left - (pause - now)))
            now = pause
        else:
            heappop(there)
            now += left
            end = max(end, now - tail)
    return end


class _Machine:
    """Compute, as early as it can be: what is kept goes in order, what may be earlier fills the time that it stood still."""

    def __init__(self) -> None:
        self.now = 0.0
        self._begins, self._ends = list[float](), list[float]()
        """Of each time that nothing ran in."""

    def run(self, release: float, seconds: float) -> float:
        """Run what is kept; gives when it starts."""
        if release > self.now:
            self._begins.append(self.now)
            self._ends.append(release)
            self.now = release
        begin = self.now
        self.now += seconds
        return begin

    def fill(self, release: float, seconds: float) -> None:
        """Run what may be anywhere from ``release`` to now, in the first gaps, since later ones are there for more."""
        at = bisect_right(self._ends, release)
        while seconds > 0 and at < len(self._ends):
            begin, end = max(self._begins[at], release), self._ends[at]
            taken = min(seconds, end - begin)
            seconds -= taken
            left = [(self._begins[at], begin), (begin + taken, end)]
            left = [gap for gap in left if gap[0] < gap[1]]
            self._begins[at : at + 1] = [gap[0] for gap in left]
            self._ends[at : at + 1] = [gap[1] for gap in left]
            at = bisect_right(self._ends, begin + taken)
        if seconds > 0:
            self.run(release, seconds)


def _heads(tasks: Sequence[Task]) -> list[float]:
    """Of each task the longest way to its start."""
    ends, heads, machine = list[float](), list[float](), _Machine()
    for task in tasks:
        head = max((ends[number] for number in task.needs), default=0.0)
        if task.stream == COMPUTE and task.order == "kept":
            head = machine.run(head, task.seconds)
        elif task.stream == COMPUTE and task.order == "earlier":
            machine.fill(head, task.seconds)
        heads.append(head)
        ends.append(head + task.seconds)
    return heads


def _tails(tasks: Sequence[Task]) -> list[float]:
    """Of each task the longest way from its end to that of the step: :func:`_heads`, backwards.

    What may be earlier stands behind the last kept compute that it needs, and before the next one behind its place.
    """
    tails, machine, following = [0.0] * len(tasks), _Machine(), 0.0
    anchored: dict[int, list[int]] = {}
    for number, anchor in enumerate(_anchors(tasks)):
        if tasks[number].stream == COMPUTE and tasks[number].order == "earlier":
            anchored.setdefault(anchor, []).append(number)
    for number in range(len(tasks) - 1, -1, -1):
        task = tasks[number]
        if task.stream == COMPUTE and task.order == "kept":
            for other in sorted(anchored.get(number, ()), key=tails.__getitem__):
                machine.fill(tails[other], tasks[other].seconds)
            tails[number] = machine.run(tails[number], task.seconds)
            following = tails[number] + task.seconds
        elif task.stream == COMPUTE and task.order == "earlier":
            tails[number] = max(tails[number], following)
        whole = tails[number] + task.seconds
        for needed in task.needs:
            tails[needed] = max(tails[needed], whole)
    return tails


def _anchors(tasks: Sequence[Task]) -> list[int]:
    """Of each task the last kept compute that it is or needs; -1 without."""
    found = list[int]()
    for number, task in enumerate(tasks):
        kept = task.stream == COMPUTE and task.order == "kept"
        found.append(number if kept else max((found[one] for one in task.needs), default=-1))
    return found
