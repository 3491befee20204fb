"""Turns: one side at a time, and the end of either is seen at once."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from pytest_fxbucket.bench.turns import MOST_STEPS, Seat, Turn
from pytest_fxbucket.errors import BenchmarkError


def nobody(descriptor: int) -> None:
    raise AssertionError(descriptor)


def seated(seat: Seat) -> Turn:
    turn = Turn(seat.address)
    seat.take((), nobody)
    return turn


def test_a_turn_is_told_its_steps_and_gives_back_as_many_times() -> None:
    with Seat() as seat:
        turn = seated(seat)
        asked: list[int] = []

        def side() -> None:
            while count := turn.wait():
                asked.append(count)
                turn.done([0.5 * step for step in range(count)])

        thread = threading.Thread(target=side)
        thread.start()
        assert seat.turn(2, (), nobody) == [0.0, 0.5]
        assert len(seat.turn(MOST_STEPS, (), nobody)) == MOST_STEPS
        seat.close()
        thread.join()
        assert asked == [2, MOST_STEPS]
        turn.close()


def test_a_side_that_waits_learns_that_the_table_is_gone_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    turn = Turn.__new__(Turn)
    turn._connection = theirs
    ours.close()
    assert turn.wait() == 0
    turn.close()


def test_a_side_that_leaves_in_its_turn_is_told_in_the_words_of_its_process() -> None:
    """The answer comes later than the end of the connection."""
    reading, writing = os.pipe()

    class Sentence(Exception):
        pass

    def on_other(descriptor: int) -> None:
        assert descriptor == reading
        raise Sentence

    with Seat() as seat:
        seated(seat).close()
        timer = threading.Timer(0.05, os.write, (writing, b"x"))
        timer.start()
        with pytest.raises(Sentence):
            seat.turn(1, (reading,), on_other)
        timer.join()
        with pytest.raises(BenchmarkError, match="left in the middle of its turn"):
            seat.turn(1, (reading,), lambda _: None)


def test_a_side_that_fails_before_it_sits_down_is_told() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x")
    with Seat() as seat, pytest.raises(AssertionError, match=str(reading)):
        seat.take((reading,), nobody)
    os.close(reading)
    os.close(writing)


def test_nothing_is_left_of_a_seat_and_no_other_user_sits_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with Seat() as seat:
        stranger = Turn(seat.address)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        thread = threading.Thread(target=lambda: (stranger.wait(), monkeypatch.undo(), Turn(seat.address)))
        thread.start()
        seat.take((), nobody)
        thread.join()
    with pytest.raises(ConnectionRefusedError):
        Turn(seat.address)
    stranger.close()
