"""Taking turns: two sides, each with ranks of its own, run one after the other, and never at once.

The process that compares them is the server of both: it tells rank 0 of one side to run, waits for the times, and then tells
rank 0 of the other side. They talk over a Unix socket with an abstract name (unix(7)), so that no file is left behind, however
they end, and each sees at once if the other has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from pytest_fxbucket.errors import BenchmarkError

MOST_STEPS = 255
"""The most steps of a turn, whose number is sent as one byte."""
_SECONDS = struct.Struct("=d")
_PEER = struct.Struct("=iII")  # struct ucred: pid, uid, gid


REST_STEPS = 1
"""Steps at the beginning of a turn that are not timed, since the other side has filled the caches."""


class TurnClient:
    """The end of the socket that rank 0 has. ``wait`` and ``done`` alternate until ``wait`` gives 0."""

    def __init__(self, address: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect("\0" + address)

    def wait(self) -> int:
        """Block until it is this side's turn; its number of timed steps, or 0 if all is over or the server has gone."""
        try:
            return int.from_bytes(self._connection.recv(1), "big")  # a closed stream gives b"", which is 0
        except ConnectionError:
            return 0

    def done(self, seconds: Sequence[float]) -> None:
        """Hand over the times of the steps of this turn."""
        self._connection.sendall(b"".join(map(_SECONDS.pack, seconds)))

    def close(self) -> None:
        """Leave."""
        self._connection.close()


class TurnServer:
    """The end of the socket that the comparing process has, for one side; as a context it ends the side's turns.

    While all is well, none of the descriptors ``others`` can be read. If one can, ``on_other`` is called with it, and is to
    raise.
    """

    def __init__(self, others: Sequence[int], on_other: Callable[[int], None]) -> None:
        self._others, self._on_other = others, on_other
        self.address = f"fxbucket-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen()
        self._connection: socket.socket | None = None

    def __enter__(self) -> TurnServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def accept(self) -> None:
        """Wait until rank 0 connects."""
        while self._connection is None:
            self._await(self._listener.fileno())
            connection, _ = self._listener.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(credentials)[1] == os.getuid():
                self._connection = connection
            else:
                connection.close()  # the name can be read by everybody on this machine

    def turn(self, steps: int) -> list[float]:
        """Have the side run so many timed steps, 1 to MOST_STEPS, and give their seconds.

        Raises BenchmarkError if the side is gone and ``on_other`` does not raise.
        """
        assert self._connection is not None
        data, size = b"", steps * _SECONDS.size
        try:
            self._connection.sendall(steps.to_bytes(1, "big"))
            while len(data) < size:  # a stream may hand over the times in pieces
                self._await(self._connection.fileno())
                part = self._connection.recv(size - len(data))
                if not part:
                    raise ConnectionResetError
                data += part
        except ConnectionError:
            self._await()  # raises in the words of the side's own process, if it left any
            raise BenchmarkError("the ranks of a side left in the middle of its turn") from None
        return [seconds for (seconds,) in _SECONDS.iter_unpack(data)]

    def close(self) -> None:
        """Tell the side that it is over; idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"\0")  # a turn of no steps
            connection.close()
        self._listener.close()

    def _await(self, *descriptor: int) -> None:
        """Return when ``descriptor`` can be read, or without one any of the others; first call ``on_other`` for these."""
        # A blocking read would hang if the side failed before it wrote: its last words come over one of the others.
        ready = wait([*self._others, *descriptor])
        for fd in self._others:
            if fd in ready:
                self._on_other(fd)
