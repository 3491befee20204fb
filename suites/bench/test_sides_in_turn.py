"""Turns: one side at a time, and the end of either is seen at once."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from pytest_fxbucket.bench.sides_in_turn import MOST_STEPS, TurnClient, TurnServer
from pytest_fxbucket.errors import BenchmarkError


def nobody(descriptor: int) -> None:
    raise AssertionError(descriptor)


def connected(server: TurnServer) -> TurnClient:
    turn = TurnClient(server.address)
    server.accept()
    return turn


def test_a_turn_is_told_its_steps_and_gives_back_as_many_times() -> None:
    with TurnServer((), nobody) as server:
        turn = connected(server)
        asked: list[int] = []

        def side() -> None:
            while count := turn.wait():
                asked.append(count)
                turn.done([0.5 * step for step in range(count)])

        thread = threading.Thread(target=side)
        thread.start()
        assert server.turn(2) == [0.0, 0.5]
        assert len(server.turn(MOST_STEPS)) == MOST_STEPS
        server.close()
        thread.join()
        assert asked == [2, MOST_STEPS]
        turn.close()


def test_a_side_that_waits_learns_that_the_server_is_gone_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    turn = TurnClient.__new__(TurnClient)
    turn._connection = theirs
    ours.close()
    assert turn.wait() == 0
    turn.close()


def test_a_side_that_leaves_in_its_turn_is_told_in_the_words_of_its_process() -> None:
    """The answer comes later than the end of the connection."""
    reading, writing = os.pipe()

    class Sentence(Exception):
        pass

    sentences = [Sentence()]

    def on_other(descriptor: int) -> None:
        assert descriptor == reading
        if sentences:
            raise sentences.pop()

    with TurnServer((reading,), on_other) as server:
        connected(server).close()
        timer = threading.Timer(0.05, os.write, (writing, b"x"))
        timer.start()
        with pytest.raises(Sentence):
            server.turn(1)
        timer.join()
        with pytest.raises(BenchmarkError, match="left in the middle of its turn"):
            server.turn(1)


def test_a_side_that_fails_before_it_connects_is_told() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x")
    with TurnServer((reading,), nobody) as server, pytest.raises(AssertionError, match=str(reading)):
        server.accept()
    os.close(reading)
    os.close(writing)


def test_nothing_is_left_of_a_server_and_no_other_user_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    with TurnServer((), nobody) as server:
        stranger = TurnClient(server.address)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        thread = threading.Thread(target=lambda: (stranger.wait(), monkeypatch.undo(), TurnClient(server.address)))
        thread.start()
        server.accept()
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        TurnClient(server.address)
    stranger.close()
