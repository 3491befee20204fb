"""Turns of several ranks in one process, one at a time, in rank order; and a store in which ranks wait by giving up the turn.

So a run is the same each time, and a deadlock is plain at once: nobody is left who could take the scheduler.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from pytest_fxbucket.compat import c10d

_Ready = Callable[[], bool]


class Deadlock(BaseException):
    """Raised in a rank that waits for what cannot come: every rank that has not ended waits."""


class TurnScheduler:
    """Gives one rank after the other its turn, with ``on_switch(old, new)`` between; ``stacks``: of ranks that were stuck."""

    def __init__(self, world: int, on_switch: Callable[[int, int], None]) -> None:
        self.holder = 0
        self.stacks: dict[int, str] = {}
        self._on_switch = on_switch
        # A lock for each rank, all locked but the holder's: a lock is the quickest way to wake one certain thread.
        self._turns = [threading.Lock() for _ in range(world)]
        self._waiting: dict[int, _Ready] = {}
        self._left = set(range(world))
        self._is_stuck = False

    def play(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run ``parts[rank]`` in a thread for each rank, rank 0 first; returns when all have ended. They must not raise."""
        for turn in self._turns:
            turn.acquire()
        threads = [threading.Thread(target=self._named(rank, part), daemon=True) for rank, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()

    def wait_until(self, rank: int, ready: _Ready) -> None:
        """Let the others go on until ``ready()``; called by ``rank``, whose turn it is. Raises Deadlock if none can go on."""
        while not ready():
            if self._is_stuck:
                self.stacks[rank] = _stack()
                raise Deadlock
            self._stand_back(rank, ready)

    def pause(self, rank: int) -> None:
        """Let the next that can go on have its turn, if there is one; for a rank that looks for something in a loop."""
        self._stand_back(rank, lambda: True)

    def _stand_back(self, rank: int, ready: _Ready) -> None:
        if rank != self.holder or rank in self._waiting:
            raise RuntimeError(f"rank {rank} waits in several threads; with all ranks in one process each may wait in one")
        self._waiting[rank] = ready
        self._pass_on(rank)
        self._turns[rank].acquire()
        del self._waiting[rank]

    def _named(self, rank: int, part: Callable[[], None]) -> Callable[[], None]:
        def play() -> None:
            self._turns[rank].acquire()
            part()
            self._left.discard(rank)
            self._pass_on(rank)

        # A dump of all threads has no names but those of functions.
        code = play.__code__.replace(co_name=f"rank_{rank}")
        return types.FunctionType(code, play.__globals__, code.co_name, closure=play.__closure__)

    def _pass_on(self, rank: int) -> None:
        # The turn goes round from ``rank`` to the next rank that has not begun or whose condition holds, ``rank`` itself the
        # last. If there is none, all that are left wait for each other: each gets a turn, only to raise Deadlock.
        world = len(self._turns)
        order = [(rank + step) % world for step in range(1, world + 1)]
        left = [one for one in order if one in self._left]
        if not left:
            return
        able = next((one for one in left if one not in self._waiting or self._waiting[one]()), None)
        if able is None:
            # The lowest raises first, and the next when that one has ended.
            self._is_stuck = True
            able = min(left)
        if able != self.holder:
            self._on_switch(self.holder, able)
            self.holder = able
        self._turns[able].release()


def _stack() -> str:
    """This thread's frames, the innermost first, as faulthandler writes them."""
    lines = ["Thread 0x0 (most recent call first):"]
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"


# The store of a process that plays several ranks: a rank that waits for a key lets the others go on.


class LocalStore(c10d.Store):
    """Keys and values in this process's memory. Waiting has no timeout: it raises Deadlock as soon as no rank can go on."""

    def __init__(self, scheduler: TurnScheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of ``key``."""
        self._values[key] = _as_bytes(value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once there is one."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to the number at ``key``, which begins with 0; the sum."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are there; who asks in a loop lets the others go on."""
        if not self._has(keys):
            self._scheduler.pause(self._scheduler.holder)
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Return once all ``keys`` are there."""
        self._scheduler.wait_until(self._scheduler.holder, lambda: self._has(keys))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set ``key`` if its value is the expected one, or if there is none and none is expected; its value then."""
        value = self._values.get(key, b"")
        if value == _as_bytes(expected_value):
            value = self._values[key] = _as_bytes(desired_value)
        return value or _as_bytes(expected_value)

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._values)

    # What PrefixStore calls them.
    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
