"""What a schedule says of a reading: parts of compute, one event for each entry between two launches, activations, dtypes."""

from __future__ import annotations

from dataclasses import replace

import torch

from pytest_fxbucket.golden.mismatch import changes
from pytest_fxbucket.golden.read_back import read_back
from pytest_fxbucket.golden.schedule import Schedule, schedule_of
from pytest_fxbucket.golden.text import golden_text
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis, Member
from pytest_fxbucket.step.roles import Direction

ENTRIES = {"a.w": "a", "a.b": "a", "b.w": "b"}


def launch(
    at: int, wait: int, *fqns: str, kind: str = "all_gather", module: str = "", direction: Direction = "forward"
) -> Bucket:
    return Bucket(
        kind=kind,  # type: ignore[arg-type]
        op="",
        group="0",
        dtype=None,
        numel=8,
        bytes=8 * len(fqns),
        parts=1,
        members=tuple(Member(fqn, 8 * i, 2, 23) for i, fqn in enumerate(fqns)),
        direction=direction,
        launch=at,
        wait=wait,
        first_use=None,
        backward_use=None,
        node=f"launch{at}",
        module=module,
    )


def events(buckets: list[Bucket], *computes: tuple[int, str], entries: dict[str, str] = ENTRIES) -> list[str]:
    reading = GraphAnalysis(tuple(buckets), tuple((at, "forward", fqn) for at, fqn in computes), (), 99)
    return [f"{event.what} {event.label}" for event in schedule_of(reading, entries, {"0": "dp"}).events]


def test_a_wait_in_the_midst_of_compute_is_seen_by_how_much_stands_before_it() -> None:
    """Else a wait could move from the end of a layer to its beginning, and the golden would not change."""
    one = [launch(0, 5, "b.w")]
    assert events(one, (3, "a.w"), (7, "a.b")) == [
        "launch all_gather b", "compute a (1 of 2)", "wait all_gather b", "compute a (1 of 2)",
    ]  # fmt: skip
    assert events(one, (6, "a.w"), (7, "a.b")) == ["launch all_gather b", "wait all_gather b", "compute a"]


def test_compute_between_two_launches_is_one_event_for_each_entry() -> None:
    assert events([launch(0, 9, "b.w")], (1, "a.w"), (2, "b.w"), (3, "a.b")) == [
        "launch all_gather b", "compute a", "compute b", "wait all_gather b",
    ]  # fmt: skip


def test_compute_without_an_entry_is_its_modules() -> None:
    assert events([], (1, "c.linear.w"), (2, "c.linear.b"), (3, "scale")) == ["compute c.linear", "compute scale"]


def test_launches_of_activations_are_named_by_their_module() -> None:
    inner = [launch(9 * i, 9 * i + 1, "", kind="all_reduce", module=f"layers.{i}.attention") for i in range(2)]
    twice = [*inner, replace(inner[1], launch=12, wait=13, node="more"), launch(14, 15, "")]
    assert [event for event in events(twice) if event.startswith("launch")] == [
        "launch all_reduce activations of layers.0.attention",
        "launch all_reduce activations of layers.1.attention",
        "launch all_reduce activations of layers.1.attention #2",
        "launch all_gather activations",
    ]


def test_a_bucket_of_several_entries_names_them_all_or_the_first_and_last() -> None:
    assert events([launch(0, 1, "a.w", "b.w")])[0] == "launch all_gather a & b"
    many = [launch(0, 1, "a.w", "b.w", "c.w", "d.w")]
    assert events(many)[0] == "launch all_gather a ... d.w (4)"


def test_buckets_stand_in_the_order_of_the_plan_then_of_their_directions() -> None:
    buckets = [
        launch(0, 1, "b.w"), launch(2, 3, "c.w"), launch(4, 5, "a.w", direction="backward"), launch(6, 7, "a.w"),
    ]  # fmt: skip
    found = schedule_of(GraphAnalysis(tuple(buckets), (), (), 9), ENTRIES, {"0": "dp"}).buckets
    assert [(one.entry, one.direction) for one in found] == [
        ("a", "forward"), ("a", "backward"), ("b", "forward"), ("c.w", "forward"),
    ]  # fmt: skip


def test_a_launch_that_stands_among_the_compute_of_forward_is_listed_there() -> None:
    """Gathered for backward at the start of the step, a parameter would be held all through it, and the golden stay green."""
    late, early = launch(8, 9, "a.w", direction="backward"), launch(0, 9, "a.w", direction="backward")
    computes = ((3, "forward", "b.w"), (10, "backward", "a.w"))
    for bucket, section, label in ((late, "backward", "all_gather a"), (early, "forward", "all_gather a of backward")):
        first = schedule_of(GraphAnalysis((bucket,), computes, (), 99), ENTRIES, {"0": "dp"}).events  # type: ignore[arg-type]
        found = next(event for event in first if event.what == "launch")
        assert (found.section, found.label) == (section, label)


def test_products_of_activations_are_compute_of_the_entry_that_they_come_from() -> None:
    """A launch that moves from one side of attention to the other is seen, though attention reads no parameter."""
    entries = {"layers.0.attn.wq.w": "layers.0", "layers.0.attn.wo.w": "layers.0", "layers.1.w": "layers.1"}
    buckets = (launch(5, 9, "layers.1.w"),)
    for at, before in ((4, "layers.0 (2 of 3)"), (6, "layers.0 (1 of 3)")):
        reading = GraphAnalysis(
            buckets,
            ((1, "forward", "layers.0.attn.wq.w"), (8, "forward", "layers.0.attn.wo.w")),
            (),
            99,
            products=((at, "forward", "layers.0.attn.wq.w"),),
        )
        found = [event.label for event in schedule_of(reading, entries, {"0": "dp"}).events if event.what == "compute"]
        assert found[0] == before


def test_every_wait_of_a_launch_is_an_event() -> None:
    one = replace(launch(0, 2, "a.w"), waits=(2, 6))
    assert events([one], (4, "b.w")) == [
        "launch all_gather a", "wait all_gather a (1 of 2)", "compute b", "wait all_gather a (2 of 2)",
    ]  # fmt: skip


def test_a_broadcast_says_whose_bytes_it_sends() -> None:
    one = replace(launch(0, 1, "a.w"), kind="broadcast", source=2)
    (named,) = schedule_of(GraphAnalysis((one,), (), (), 9), ENTRIES, {"0": "dp"}).buckets
    assert named.op == "from 2"
    (graph,) = read_back(golden_text("", [], {"joint": Schedule((), (named,))})).graphs.values()
    assert (graph.buckets[0].op, graph.buckets[0].dims) == ("from 2", "dp")


F32, BF16, BYTE = torch.float32, torch.bfloat16, torch.uint8
MIXED = replace(
    launch(0, 1),
    dtype=BYTE,
    numel=32,
    bytes=32,
    parts=2,
    members=(Member("a.w", 0, 2, 23, F32), Member("a.b", 8, 4, 7, BF16)),
)


def text(bucket: Bucket) -> str:
    schedule = schedule_of(GraphAnalysis((bucket,), (), (), 9), {"a.w": "a", "a.b": "a"}, {"0": "dp"})
    return golden_text("", [], {"joint": schedule})


def test_each_member_of_a_bucket_of_several_dtypes_says_its_own() -> None:
    assert text(MIXED).splitlines()[-4:] == [
        "  a",
        "    forward all_gather: 2 members, mixed as uint8, 32 bytes, dp",
        "      a.w 2 float32",
        "      a.b 4 bfloat16",
    ]


def test_members_of_one_dtype_say_it_once() -> None:
    plain = replace(MIXED, dtype=F32, members=(MIXED.members[0],), numel=4, bytes=16)
    assert text(plain).splitlines()[-2:] == ["    forward all_gather: 1 member, float32, 16 bytes, dp", "      a.w 2"]


def test_bytes_that_carry_nothing_are_padding() -> None:
    apart = replace(MIXED, members=(MIXED.members[0], replace(MIXED.members[1], offset=12)), bytes=48)
    assert text(apart).splitlines()[-5:] == [
        "    forward all_gather: 2 members, mixed as uint8, 48 bytes, dp",
        "      a.w 2 float32",
        "      (padding) 4 bytes",
        "      a.b 4 bfloat16",
        "      (padding) 4 bytes",
    ]


def test_a_member_that_changes_its_dtype_is_told_in_words() -> None:
    narrow = replace(MIXED, members=(MIXED.members[0], replace(MIXED.members[1], dtype=torch.float16)))
    assert changes(text(MIXED), text(narrow)) == ["a.b of forward all_gather a changed: 4 bfloat16 -> 4 float16 elements"]
    second, first = replace(MIXED.members[1], offset=0), replace(MIXED.members[0], offset=8)
    assert changes(text(MIXED), text(replace(MIXED, members=(second, first)))) == [
        "byte layout of forward all_gather a changed: a.b stands where a.w stood"
    ]
