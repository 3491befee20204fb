"""Fills what an order leaves of compute's time where a wait blocks it.

Compute that only waits can as well pack what is launched later, and unpack what has come already. So an order is run once more,
by the exact clock; where a wait blocks, what may move, is ready and takes no longer than that is pulled up before it. Launches
keep their order, waits come no later, and compute that reads parameters stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pytest_fxbucket.passes.auto.latest_starts import SPARE
from pytest_fxbucket.passes.auto.machine import WAIT

if TYPE_CHECKING:
    from pytest_fxbucket.passes.auto.machine import NodeCosts
    from pytest_fxbucket.passes.auto.windows import Windows

_PASSED_OVER = 16
"""At most so many nodes that do not fit are looked at for one wait."""


def filled(windows: Windows, order: Sequence[int], sizes: Sequence[int], room: float) -> list[int]:
    """``order`` with the time of its waits filled.

    ``windows`` are of the way that fills waits. ``sizes``: bytes that each node makes, by its place in the graph; ``room``: how
    many more may live than do in ``order``.
    """
    return _Shadow(windows, windows.machine, order, sizes, room).run()


@dataclass(slots=True)
class _Shadow:
    """The state of one run."""

    windows: Windows
    machine: NodeCosts
    order: Sequence[int]
    sizes: Sequence[int]
    room: float
    place: dict[int, int] = field(default_factory=dict)
    """Of each node its place in the order."""
    missing: list[int] = field(default_factory=list)
    """By node how many of those that it must stand behind were not run."""
    worth: list[bool] = field(default_factory=list)
    """Whether a node may be pulled up, and it or a node behind it that may be, too, takes any time."""
    ready: list[tuple[int, int]] = field(default_factory=list)
    """What could be run and is worth it, a heap of (place, node)."""
    found: dict[int, None] = field(default_factory=dict)
    pulled: set[int] = field(default_factory=set)
    """What was run before its place."""
    host: float = 0.0
    compute: float = 0.0
    free: list[float] = field(default_factory=list)
    end: dict[int, float] = field(default_factory=dict)
    """Of what was launched."""

    def run(self) -> list[int]:
        """The new order."""
        self.place = {node: at for at, node in enumerate(self.order)}
        self.missing = [len(before) for before in self.windows.order.before]
        self.worth = self._worth()
        self.free = [0.0] * self.machine.streams
        for node, missing in enumerate(self.missing):
            if not missing:
                self._offer(node)
        for node in self.order:
            # ``room`` counts what lives beyond ``order``: from its own place on, a node that was pulled up lives there, too.
            if node in self.pulled:
                self.room += self.sizes[node]
                continue
            if self.machine.stream[node] == WAIT:
                self._fill(node, self.end.get(self.machine.launch[node], 0.0))
            self._run(node)
        return list(self.found)

    @property
    def _now(self) -> float:
        return max(self.host, self.compute)

    def _worth(self) -> list[bool]:
        after, found = self.windows.known.after, list(self.windows.loose)
        for node in range(len(found) - 1, -1, -1):
            if found[node]:
                found[node] = self.machine.seconds[node] > 0 or any(found[one] for one in after[node])
        return found

    def _offer(self, node: int) -> None:
        if self.worth[node]:
            heappush(self.ready, (self.place[node], node))

    def _fill(self, wait: int, until: float) -> None:
        """Run what fits before ``until``, when ``wait`` is over."""
        passed: list[tuple[int, int]] = []
        while self.ready and self._now < until and len(passed) < _PASSED_OVER:
            place, node = heappop(self.ready)
            if node in self.found:
                continue
            if node != wait and self._has_landed(node) and self._fits(node, until):
                self.pulled.add(node)
                self.room -= self.sizes[node]
                self._run(node)
            else:
                passed.append((place, node))
        for one in passed:
            heappush(self.ready, one)

    def _has_landed(self, node: int) -> bool:
        """Whether ``node`` is no wait, or its flight has ended, and :data:`SPARE` of its seconds have passed since."""
        if self.machine.stream[node] != WAIT:
            return True
        launch = self.machine.launch[node]
        return launch < 0 or self.end[launch] + SPARE * self.machine.seconds[launch] <= self._now

    def _fits(self, node: int, until: float) -> bool:
        """Whether at least half of ``node`` runs before ``until``, and there is room for what it makes."""
        return self._now + self.machine.seconds[node] / 2 <= until and self.sizes[node] <= self.room

    def _run(self, node: int) -> None:
        # The clock of :meth:`NodeCosts.run <pytest_fxbucket.passes.auto.machine.NodeCosts.run>`, one node at a time.
        self.found[node] = None
        stream, seconds, host = self.machine.stream[node], self.machine.seconds[node], self.machine.host[node]
        if stream == WAIT:
            self.compute = max(self.compute, self.end.get(self.machine.launch[node], 0.0))
            self.host = max(self.host, self.compute) + host if self.machine.blocking else self.host + host
        elif stream >= 0:
            self.host += host
            self.end[node] = self.free[stream] = max(self._now, self.free[stream]) + seconds
        else:
            self.host += host
            self.compute = self._now + seconds if seconds else self.compute
            self.host = max(self.host, self.compute) if self.machine.blocking else self.host
        for reader in self.windows.known.after[node]:
            self.missing[reader] -= 1
            if not self.missing[reader]:
                self._offer(reader)
