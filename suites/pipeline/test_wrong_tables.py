"""Wrong tables, each found without running it, with rank, stage and microbatch named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fxbucket.errors import StageError
from pytest_fxbucket.pipeline.played import bubble
from pytest_fxbucket.pipeline.problems import table_problems
from pytest_fxbucket.pipeline.schedules import Action, table_of
from suites.pipeline.changed_tables import ALL, Change, changed, each_alone, moved, place, swapped, without


def late_receives(own: list[Action]) -> list[Action]:
    for token, behind in (("3RECV_F1", "0SEND_F3"), ("3RECV_F2", "3RECV_F1"), ("3RECV_F3", "3RECV_F2")):
        own = moved(token, behind=behind)(own)
    return own


def twice(token: str) -> Change:
    def change(own: list[Action]) -> list[Action]:
        own.insert(place(own, token), own[place(own, token)])
        return own

    return change


GPIPE = ("GPipe", 3, 3, 4)
FOR_EVER = "ranks wait for ever: "
IN_ORDER = "where transfers between two ranks run in the order in which each launches them"
WRONG: dict[str, tuple[tuple[str, int, int, int], int, Change, list[str]]] = {
    "a send without a receive": (
        GPIPE,
        1,
        without("1RECV_F2"),
        [
            "rank 1 has F of stage 1, microbatch 2 before RECV_F of stage 1, microbatch 2, which it needs",
            "rank 0 has SEND_F of stage 0, microbatch 2 once, but rank 1 has RECV_F of stage 1, microbatch 2 never",
        ],
    ),
    "a receive without a send": (
        ("Interleaved1F1B", 4, 2, 4),
        1,
        without("3SEND_B1"),
        ["rank 0 has RECV_B of stage 2, microbatch 1 once, but rank 1 has SEND_B of stage 3, microbatch 1 never"],
    ),
    "a value sent twice": (
        GPIPE,
        2,
        twice("2SEND_B3"),
        [
            "rank 1 has RECV_B of stage 1, microbatch 3 once, but rank 2 has SEND_B of stage 2, microbatch 3 2 times",
            "rank 2 has SEND_B of stage 2, microbatch 3 2 times, but rank 1 has RECV_B of stage 1, microbatch 3 once",
            "rank 2 has SEND_B of stage 2, microbatch 3 2 times, but rank 1 has RECV_B of stage 1, microbatch 3 once",
        ],
    ),
    "another order on one rank": (
        GPIPE,
        0,
        lambda own: swapped("0SEND_F1", "0SEND_F2")(swapped("0F1", "0F2")(own)),
        [
            "transfer 1 from rank 0 to rank 1 is SEND_F of stage 0, microbatch 2 where it is sent, but RECV_F of stage 1, "
            "microbatch 1 where it is received, and the receiver would take the one for the other"
        ],
    ),
    "a microbatch run twice": (
        GPIPE,
        2,
        twice("2B1"),
        ["on rank 2 stage 2, microbatch 1 runs backward 2 times, expected once"],
    ),
    "a microbatch run forward twice": (
        GPIPE,
        2,
        twice("2F1"),
        ["on rank 2 stage 2, microbatch 1 runs forward 2 times, expected once"],
    ),
    "a value sent before it is there": (
        GPIPE,
        0,
        swapped("0F2", "0SEND_F2"),
        ["rank 0 has SEND_F of stage 0, microbatch 2 before F of stage 0, microbatch 2, which it needs"],
    ),
    "a send to nobody": (
        GPIPE,
        2,
        lambda own: [*own, Action(2, "SEND_F", 2, 0)],
        ["rank 2 has SEND_F of stage 2, microbatch 0, but there is no stage at its other end"],
    ),
    "a send to itself": (
        ("ZBVZeroBubble", 4, 2, 4),
        1,
        lambda own: [*own, Action(1, "SEND_F", 1, 0)],
        ["rank 1 has SEND_F of stage 1, microbatch 0, whose other end is on the same rank"],
    ),
    "a stage that there is not": (
        GPIPE,
        0,
        lambda own: [*own, Action(0, "REDUCE_GRAD", 7)],
        ["rank 0 has REDUCE_GRAD of stage 7, but stages are 0 to 2"],
    ),
    "a microbatch left out": (
        ("LoopedBFS", 4, 2, 4),
        0,
        without("0F3", "0SEND_F3"),
        [
            "on rank 0 stage 0, microbatch 3 runs forward never, expected once",
            "rank 0 has B of stage 0, microbatch 3 before F of stage 0, microbatch 3, which it needs",
            "rank 1 has RECV_F of stage 1, microbatch 3 once, but rank 0 has SEND_F of stage 0, microbatch 3 never",
        ],
    ),
    "gradients of weights never": (
        ("InterleavedZeroBubble", 4, 2, 4),
        1,
        without("3W2"),
        [
            "on rank 1 stage 3, microbatch 2 runs gradients of weights (W) never, expected once, since its input gradients are "
            "apart"
        ],
    ),
    "gradients of weights before those of inputs": (
        ("ZBVZeroBubble", 4, 2, 4),
        0,
        swapped("3I2", "3W2"),
        [
            "rank 0 has W of stage 3, microbatch 2 before I of stage 3, microbatch 2, which it needs",
            "rank 0 has SEND_B of stage 3, microbatch 2 before B of stage 3, microbatch 2, which it needs",
        ],
    ),
    "backward before forward": (
        ("1F1B", 2, 2, 4),
        1,
        swapped("1F2", "1B2"),
        ["rank 1 has B of stage 1, microbatch 2 before F of stage 1, microbatch 2, which it needs"],
    ),
    "a neighbour on the same rank not yet run": (
        ("ZBVZeroBubble", 4, 2, 4),
        1,
        moved("1F0", behind="2F0"),
        ["rank 1 has F of stage 2, microbatch 0 before F of stage 1, microbatch 0, which it needs"],
    ),
    "a stage on another rank": (
        GPIPE,
        1,
        lambda own: [replace(a, stage=2) if a.token == "1REDUCE_GRAD" else a for a in own],
        [
            "rank 1 has REDUCE_GRAD of stage 2, but stage 2 is on rank 2",
            "on rank 1 stage 1 reduces gradients never, expected once",
            "on rank 2 stage 2 reduces gradients 2 times, expected once",
        ],
    ),
    "gradients reduced before the last are there": (
        GPIPE,
        0,
        moved("0REDUCE_GRAD", behind="0B2"),
        ["rank 0 has B of stage 0, microbatch 3 behind REDUCE_GRAD of stage 0, which would not have its gradients"],
    ),
    "parameters not gathered": (
        ("LoopedBFS", 4, 2, 1),
        0,
        without("2UNSHARD"),
        [
            "rank 0 has F of stage 2, microbatch 0 while the stage's parameters are not gathered",
            "rank 0 has B of stage 2, microbatch 0 while the stage's parameters are not gathered",
        ],
    ),
    "parameters let go too early": (
        ("LoopedBFS", 4, 2, 1),
        0,
        moved("2RESHARD", behind="2F0"),
        ["rank 0 has B of stage 2, microbatch 0 while the stage's parameters are not gathered"],
    ),
    "a microbatch that there is not": (
        GPIPE,
        0,
        lambda own: [*own, Action(0, "F", 0, 4)],
        ["rank 0 has F of stage 0, microbatch 4, but microbatches are 0 to 3"],
    ),
    "a deadlock of eight stages by one swap": (
        ("GPipe", 8, 8, 8),
        3,
        moved("3SEND_F7", behind="3RECV_B0"),
        [
            f"{FOR_EVER}rank 3 at RECV_B of stage 3, microbatch 0 for rank 4, rank 4 at RECV_F of stage 4, microbatch 7 for "
            f"rank 3, {IN_ORDER}"
        ],
    ),
    "a deadlock of three ranks, where sends wait": (
        ("LoopedBFS", 6, 3, 4),
        0,
        late_receives,
        [
            f"{FOR_EVER}rank 0 at SEND_F of stage 0, microbatch 3 for rank 1, rank 1 at SEND_F of stage 1, microbatch 2 for "
            "rank 2, rank 2 at SEND_F of stage 2, microbatch 1 for rank 0, where a send waits until its receive is there"
        ],
    ),
    "batches launched one by one": (
        ("1F1B", 2, 2, 4),
        ALL,
        each_alone,
        [
            f"{FOR_EVER}rank 0 at RECV_B of stage 0, microbatch 0 for rank 1, rank 1 at RECV_F of stage 1, microbatch 1 for "
            f"rank 0, {IN_ORDER}"
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_found_before_anything_runs(name: str) -> None:
    numbers, rank, change, expected = WRONG[name]
    table = table_of(*numbers)
    assert table_problems(table) == ()
    found = table_problems(changed(table, rank, change))
    print(*found, sep="\n")
    assert list(found) == expected


def test_a_table_that_waits_for_ever_has_no_bubble() -> None:
    table = changed(table_of(*GPIPE), 0, without("0F2"))
    with pytest.raises(StageError, match=r"^B of stage 0, microbatch 0 on rank 0 waits for ever, .* see table_problems$"):
        bubble(table)
