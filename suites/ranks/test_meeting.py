"""Processes that agree over a store: all read the same, nobody waits for one who will not come."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from pytest_fxbucket.errors import RankError, UsageError
from pytest_fxbucket.ranks import wire
from pytest_fxbucket.ranks.stacks import process_state
from pytest_fxbucket.ranks.torchrun.member import DIFFERENCES, END, HELLO, ITEMS, LEFT, ItemProgress, Member, member_of
from pytest_fxbucket.ranks.torchrun.rendezvous import Rendezvous, RendezvousLost, RendezvousRound
from pytest_fxbucket.ranks.torchrun.store import Store
from suites.warm.runs import WarmRuns

WORLD = 3
LONG_S = 100.0


def member(rank: int, port: int, run: str) -> Member:
    return Member(rank, WORLD, rank // 2, 2, rank % 2, 2, "127.0.0.1", port, False, run)


def serve() -> tuple[dist.TCPStore, int]:
    """A store as torchrun has one, and its port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    port = listener.getsockname()[1]
    fd = listener.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


@pytest.fixture(scope="module")
def port():
    store, number = serve()
    yield number
    del store


@pytest.fixture
def together():
    """together(function) -> results of function(rank), which all ranks run at once, in threads."""
    with ThreadPoolExecutor(WORLD) as threads:
        yield lambda function: [one.result(60) for one in [threads.submit(function, rank) for rank in range(WORLD)]]


@pytest.fixture
def meetings(port: int, together: Callable[..., list[Rendezvous]], request: pytest.FixtureRequest):
    made = together(lambda rank: Rendezvous(member(rank, port, f"{request.node.name}/0")))
    yield made
    for one in made:
        one.close()


def test_all_read_the_same_and_know_each_others_nodes(
    meetings: list[Rendezvous], together: Callable[..., list[RendezvousRound]]
) -> None:
    said = together(lambda rank: meetings[rank].exchange("1", {"rank": rank}, limit_s=LONG_S))
    assert said[0] == RendezvousRound({rank: {"rank": rank} for rank in range(WORLD)}, {})
    assert said[1:] == said[:1] * 2
    assert [meetings[0].who(rank) for rank in range(WORLD)] == ["rank 0 (node 0)", "rank 1 (node 0)", "rank 2 (node 1)"]


def test_a_value_larger_than_the_store_takes_travels_whole(
    meetings: list[Rendezvous], together: Callable[..., list[RendezvousRound]]
) -> None:
    size = (9 << 20) + 1
    said = together(lambda rank: meetings[rank].exchange("1", bytes([rank]) * size, limit_s=LONG_S))
    assert all(one.entries == {rank: bytes([rank]) * size for rank in range(WORLD)} for one in said)


def test_who_is_late_is_named_to_all_and_learns_what_was_said(
    meetings: list[Rendezvous], together: Callable[..., list[RendezvousRound]]
) -> None:
    over = threading.Event()

    def say(rank: int) -> RendezvousRound:
        if rank == 2:
            over.wait(60)
        told = meetings[rank].exchange("1", rank, limit_s=0.3 if rank == 0 else LONG_S)
        over.set()
        return told

    said = together(say)
    assert said == [RendezvousRound({0: 0, 1: 1}, {2: "did not come within 0.3 s"})] * WORLD


def test_nobody_waits_where_one_spoke_just_before_it_was_seen_to_be_gone(
    meetings: list[Rendezvous], together: Callable[..., list[RendezvousRound]], monkeypatch: pytest.MonkeyPatch
) -> None:
    speak = threading.Event()

    def excused(topic: str, silent: list[int]) -> dict[int, str]:
        speak.set()
        while meetings[0]._silent(topic):
            pass
        return {2: "is gone"}

    def say(rank: int) -> RendezvousRound:
        if rank:
            speak.wait(60)
        return meetings[rank].exchange("1", rank, limit_s=LONG_S)

    monkeypatch.setattr(meetings[0], "_excused", excused)
    assert together(say) == [RendezvousRound({0: 0, 1: 1, 2: 2}, {})] * WORLD


@pytest.mark.parametrize("ahead", [0, 2])
def test_nobody_waits_for_one_who_is_further_on(
    meetings: list[Rendezvous], together: Callable[..., list[RendezvousRound]], ahead: int
) -> None:
    """The one who went on is at a later topic, where it waits for the others."""

    def say(rank: int) -> list[RendezvousRound]:
        first = [] if rank == ahead else [meetings[rank].exchange("1", rank, limit_s=LONG_S)]
        return [*first, meetings[rank].exchange("2", rank, limit_s=LONG_S)]

    said = together(say)
    assert all(one[0].missing == {ahead: "went on without it"} for rank, one in enumerate(said) if rank != ahead)
    assert all(one[-1] == RendezvousRound({0: 0, 1: 1, 2: 2}, {}) for one in said)


def test_who_has_left_says_why(meetings: list[Rendezvous], together: Callable[..., list[RendezvousRound | None]]) -> None:
    def say(rank: int) -> RendezvousRound | None:
        return meetings[rank].leave("is tired") if rank == 1 else meetings[rank].exchange("1", rank, limit_s=LONG_S)

    assert together(say)[0] == RendezvousRound({0: 0, 2: 2}, {1: "is tired"})


def test_who_works_learns_that_another_has_failed(meetings: list[Rendezvous]) -> None:
    assert not meetings[0].is_alarmed("1")
    meetings[2].alarm("1")
    assert meetings[0].is_alarmed("1")
    assert not meetings[0].is_alarmed("2")


def test_what_must_end_waits_no_more(meetings: list[Rendezvous]) -> None:
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(meetings[0].exchange, "1", 0, limit_s=LONG_S)
        meetings[0].end("told to end")
        with pytest.raises(RendezvousLost, match="told to end"):
            waits.result(60)
    with pytest.raises(RendezvousLost, match="told to end"):
        meetings[0].exchange("2", 0, limit_s=LONG_S)


def test_old_words_are_forgotten(port: int, meetings: list[Rendezvous], together: Callable[..., None]) -> None:
    def say(rank: int) -> None:
        for topic in range(50):
            meetings[rank].exchange(f"{topic:03d}", rank, limit_s=LONG_S)

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    before = store.num_keys()
    together(say)
    assert store.num_keys() - before < 50


def test_a_killed_process_is_gone_for_all(
    port: int, together: Callable[..., list[Any]], warm_runs: WarmRuns, tmp_path: Path
) -> None:
    """Rank 2 is a process; the others are threads here."""
    words = [str(Path(__file__).with_name("meeting_rank.py")), "2", str(WORLD), str(port)]
    with (tmp_path / "out").open("w") as out:
        process = warm_runs.start(words, tmp_path, os.environ, out, out)

    def met(rank: int) -> Rendezvous | None:
        place = Member(rank, WORLD, 0, 1, rank, WORLD, "127.0.0.1", port, False, "suite/0")
        return Rendezvous(place) if rank < 2 else None

    here = together(met)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    told = together(lambda rank: here[rank].exchange("1", rank, limit_s=60) if rank < 2 else None)
    assert told[:2] == [RendezvousRound({0: 0, 1: 1}, {2: "is gone: its process has ended"})] * 2
    for one in here[:2]:
        one.close()


def test_a_store_that_is_gone_is_an_error_in_one_sentence() -> None:
    store, port = serve()
    ours = Store(member(0, port, "gone/0"))
    del store
    with pytest.raises(RankError, match=rf"torchrun's store at 127.0.0.1:{port} does not answer \(.*\): the node") as caught:
        # The first may still leave through a socket that is closing.
        any(ours.has("at/0") for _ in range(100))
    assert "\n" not in str(caught.value)


def test_moments_grow() -> None:
    progress, moments = ItemProgress(), [HELLO, ITEMS, DIFFERENCES]
    for _ in range(12):
        progress.next_item()
        for phase in (0, 1, 1, 2, 0, 1, 2):  # a plugin that runs an item again
            progress.enter(phase)
            moments += [progress.run(), f"{progress.run()}.done", progress.report(), progress.run(), progress.report()]
    moments += [END, LEFT]
    assert moments == sorted(set(moments))


def test_who_torchrun_started_reads_its_place() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    environ |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "there", "MASTER_PORT": "77", "TORCHELASTIC_RUN_ID": "x"}
    assert member_of({**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == Member(5, 8, 1, 2, 1, 4, "there", 77, False, "x/0")
    first = member_of({**environ, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert first is not None
    assert first.serves_store
    assert member_of({"RANK": "0"}) is None
    with pytest.raises(UsageError, match="LOCAL_RANK is 'x'"):
        member_of({**environ, "LOCAL_RANK": "x"})


class Harm:
    def __reduce__(self):
        return Path.touch, (Path("harmed"),)


def test_code_in_the_store_is_refused_and_does_not_run(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = Store(member(0, port, request.node.name))
    store = dist.PrefixStore(ours.prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    pickled = wire.pack(Harm())
    for data in (pickled[0], b"fxb1\0\0\0\0" + pickled[0], b"fxb1\0\0\0\0" + wire.head(pickled) + pickled[0]):
        store.set("word", data)
        with pytest.raises(RankError, match="is no plain data of ours, and was refused"):
            ours.get("word")
    assert not Path("harmed").exists()


def test_a_store_of_ours_listens_where_it_is_looked_for_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = Store(member(0, port, "own/0"), is_server=True)
    ours.note("word", "heard \udcff")
    assert Store(member(1, port, "own/0")).notes(["word"]) == ["heard \\udcff"]
    tables = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    assert [words[1] for words in tables if words[3] == "0A" and words[1].endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


SERVER = """
import signal
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


def test_a_store_that_stands_still_is_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch, warm_runs: WarmRuns, tmp_path: Path
) -> None:
    source, target = os.pipe()
    with os.fdopen(source) as told, os.fdopen(target, "w") as out:
        server = warm_runs.start(["-c", SERVER], tmp_path, os.environ, out, out)
        port = int(told.readline())
        ours = Store(member(0, port, "still/0"))
        ours.note("word", "heard")
        os.kill(server.pid, signal.SIGSTOP)
        while process_state(server.pid) != "T":
            pass
        monkeypatch.setattr("pytest_fxbucket.ranks.torchrun.store.LIMIT_S", 0.5)
        calls = (
            lambda: ours.has("word"),
            lambda: ours.note("a", "b"),
            lambda: ours.count("c", 1),
            lambda: ours.get("word"),
        )
        says = rf"torchrun's store at 127.0.0.1:{port} does not answer \(not within 0.5 s\)"
        try:
            for call in calls:
                with pytest.raises(RankError, match=says):
                    call()
            os.kill(server.pid, signal.SIGCONT)
            monkeypatch.undo()
            assert Store(member(1, port, "still/0")).notes(["word"]) == ["heard"]
        finally:
            server.kill()  # one that stands still is waited for without end
            server.wait()
