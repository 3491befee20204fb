"""One job's conversation with all ranks: sends, receives and listens at once, and never waits for one rank alone."""

from __future__ import annotations

import array
import contextlib
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.failure import RankState
from pytest_fxbucket.ranks.launch import PoolProcesses
from pytest_fxbucket.ranks.messages import Reply
from pytest_fxbucket.ranks.output import Output

# After a first failure, how long the others have to show that theirs was the cause.
GRACE_S = 0.25
_CHUNK = 1 << 20
_ASK_S = 0.1
_LONGEST_S = 3600.0  # epoll takes no more than some weeks at once


class _Reader:
    """Reads one frame piece by piece from a non-blocking socket."""

    def __init__(self) -> None:
        self.buffers: list[wire.Buffer] = []
        self._parts = wire.frame()
        self._part, self._filled = next(self._parts), 0

    def read(self, connection: socket.socket) -> bool:
        """Take what is there; True when the frame is complete.

        Raises ConnectionError when the rank hung up, GarbledFrameError for what is no frame.
        """
        while True:
            while self._filled < len(self._part):
                try:
                    received = connection.recv_into(memoryview(self._part)[self._filled :])
                except BlockingIOError:
                    return False
                if not received:
                    raise ConnectionResetError
                self._filled += received
            try:
                self._part, self._filled = next(self._parts), 0
            except StopIteration as end:
                self.buffers = end.value
                return True


class Conversation:
    """Sends each process its frames, then collects its reply to job number ``job``; ``index`` numbers the processes from 0.

    Replies to another job, and those of other processes that write to the same connection, are dropped.
    """

    def __init__(
        self,
        processes: PoolProcesses,
        job: int,
        frames: Sequence[Sequence[wire.Buffer]],
        output: Output | None,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self.states = [RankState(rank) for rank in processes.ranks]
        self.results: list[list[wire.Buffer]] = [[] for _ in processes.ranks]
        self._processes, self._job = processes, job
        self._readers = [_Reader() for _ in processes.ranks]
        self._unsent = [deque(memoryview(part).cast("B") for part in parts if len(part)) for parts in frames]
        self._output = output
        self._unsent_fds = [[*fds] for fds in output.targets] if output else [[] for _ in processes.ranks]
        self._is_over = is_over
        self._selector = selectors.DefaultSelector()

    def run(self, deadline: float) -> bool:
        """Run until every rank has answered, or one failed and the grace is over; False if ``deadline`` (monotonic) is first.

        ``is_over``, asked every 0.1 s, ends the waiting as a failure would.
        """
        with self._selector:
            self._watch()
            while not self._has_failed() and not (self._is_over and self._is_over()):
                if all(state.outcome != "running" for state in self.states):
                    return True
                if not self._listen(deadline):
                    return False
            # An effect may arrive before its cause: the peer of a rank that dies can report a lost connection first.
            grace = time.monotonic() + GRACE_S
            while any(state.outcome == "running" for state in self.states) and self._listen(grace):
                pass
        return True

    def _has_failed(self) -> bool:
        return any(state.outcome not in ("running", "returned", "ready") for state in self.states)

    def _listen(self, deadline: float) -> bool:
        """Act on what happens next; False at ``deadline``."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        ready = self._selector.select(min(left, _ASK_S if self._is_over else _LONGEST_S))
        for key, _ in sorted(ready, key=lambda event: event[0].data[0]):
            _, act, index = key.data
            act(index)
        return True

    def _watch(self) -> None:
        for index, source in enumerate(self._output.sources if self._output is not None else ()):
            self._selector.register(source, selectors.EVENT_READ, (0, cast("Output", self._output).take, index))
        for index, connection in enumerate(self._processes.connections):
            connection.setblocking(False)
            # Deaths are looked at last: a reply that was sent before counts.
            self._selector.register(self._processes.pidfds[index], selectors.EVENT_READ, (1, self._on_death, index))
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent[index] else 0)
            self._selector.register(connection, events, (0, self._on_socket, index))

    def _on_socket(self, index: int) -> None:
        connection = self._processes.connections[index]
        try:
            if self._unsent[index]:
                self._send(index, connection)
            # A frame that is not this job's answer is dropped, and the next one read.
            while self._readers[index].read(connection):
                frame, self._readers[index] = self._readers[index].buffers, _Reader()
                if self._take(index, frame):
                    self._selector.unregister(connection)
                    return
        except ConnectionError:
            # No outcome yet: the pidfd tells when the process has ended.
            self._selector.unregister(connection)
        except wire.GarbledFrameError:
            self._selector.unregister(connection)
            self.states[index].outcome, self.states[index].at = "garbled", time.monotonic()

    def _send(self, index: int, connection: socket.socket) -> None:
        queue = self._unsent[index]
        with contextlib.suppress(BlockingIOError):
            while queue:
                sent = self._send_some(index, connection, queue[0][:_CHUNK])
                queue[0] = queue[0][sent:]
                if not queue[0]:
                    queue.popleft()
        if not queue:
            self._selector.modify(connection, selectors.EVENT_READ, (0, self._on_socket, index))

    def _send_some(self, index: int, connection: socket.socket, data: memoryview) -> int:
        fds = self._unsent_fds[index]
        if not fds:
            return connection.send(data)
        # Once, with the first bytes: the kernel hands descriptors over with the bytes that they were sent with.
        sent = connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        self._unsent_fds[index] = []
        return sent

    def _take(self, index: int, buffers: list[wire.Buffer]) -> bool:
        """Take an answer. False if it is to another job or of another process; raises GarbledFrameError for what is none."""
        try:
            reply = wire.unpack(buffers[:1])
        except wire.Unpicklable as error:
            raise wire.GarbledFrameError from error
        if not isinstance(reply, Reply):
            raise wire.GarbledFrameError
        # A process that a job forked may come out of the job too, and answer a second time.
        if (reply.job, reply.pid) != (self._job, self._processes.pids[index]):
            return False
        self.states[index] = reply.state
        self.results[index] = buffers[1:]
        return True

    def _on_death(self, index: int) -> None:
        self._selector.unregister(self._processes.pidfds[index])
        state = self.states[index]
        if state.outcome == "running":
            state.outcome, state.at = "died", time.monotonic()
