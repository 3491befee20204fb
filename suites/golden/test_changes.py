"""For each way of changing a schedule the words that the diff says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pytest_fxbucket.golden.mismatch import changes
from pytest_fxbucket.golden.read_back import read_back
from pytest_fxbucket.golden.schedule import PADDING, NamedBucket, Schedule
from suites.golden.by_hand import body, bucket, events

A, B, C = bucket("a", "w", "b"), bucket("b", "w", "b"), bucket("c", "w")
RA, RB = (bucket(name, "w", "b", kind="rs", direction="backward") for name in "ab")
FORWARD = "L ag a, L ag b, W ag a, C a, L ag c, W ag b, C b, W ag c, C c"
BACKWARD = "C b, L rs b, C a, L rs a, W rs b, W rs a"


def schedule(*buckets: NamedBucket, forward: str = FORWARD, backward: str = BACKWARD) -> Schedule:
    return Schedule((*events(forward), *events(backward, "backward")), buckets or (A, B, C, RA, RB))


def updated(backward: str, optimizer: str) -> Schedule:
    whole = schedule(backward=backward)
    return replace(whole, events=(*whole.events, *events(optimizer, "optimizer")))


GOOD = schedule()
LOST = "backward: reduce_scatter a; overlap lost, no compute hides it now"
READY = updated("C b, L rs b, C a, L rs a, W rs b, U b, W rs a", "U a")


@dataclass(frozen=True)
class Way:
    """A way of changing a schedule."""

    after: Schedule
    words: tuple[str, ...]
    before: Schedule = GOOD
    back: tuple[str, ...] = ()
    """The words of the way back, where they say it of the other direction."""


TWICE = "L ag a, L ag a #2, W ag a, W ag a #2, C a"
ACTIVATIONS = [bucket(f"activations of {name}", "/(no parameter)", kind="ar") for name in "abc"]
NINE = bucket("a", *(f"p{i}" for i in range(9)))
SINGLES = [bucket("a", f"p{i}", number=i + 1) for i in range(9)]
ONE, MANY = schedule(NINE, B, C, RA, RB), schedule(*SINGLES, B, C, RA, RB)

OTHER_A = {
    "another dtype": (
        replace(A, dtype="bfloat16", bytes=64),
        "dtype of forward all_gather a changed: float32 -> bfloat16 (128 -> 64 bytes)",
    ),
    "another group": (replace(A, dims="dp_replicate"), "group of forward all_gather a changed: dp_shard -> dp_replicate"),
    "other bytes": (replace(A, bytes=256), "bytes of forward all_gather a changed: 128 -> 256"),
    "another layout": (bucket("a", "b", "w"), "byte layout of forward all_gather a changed: a.b stands where a.w stood"),
    "padding in the layout": (
        replace(A, members=(A.members[0], (PADDING, "4 bytes"), A.members[1])),
        "byte layout of forward all_gather a changed: padding of none -> 4 bytes behind a.w",
    ),
    "a member of another size": (
        replace(A, members=(("a.w", "8"), ("a.b", "4"))),
        "a.w of forward all_gather a changed: 4 -> 8 elements",
    ),
}
"""What one bucket has is another: it in place of A, and the one sentence of it."""

WAYS = {
    **{name: Way(schedule(a, B, C, RA, RB), (words,)) for name, (a, words) in OTHER_A.items()},
    "nothing": Way(GOOD, ()),
    "a bucket lost a member": Way(
        schedule(bucket("a", "w"), B, C, RA, RB),
        ("forward all_gather a lost a.b", "bytes of forward all_gather a changed with its members: 128 -> 64"),
    ),
    "a bucket gained a member": Way(
        schedule(A, bucket("b", "w", "b", "s"), C, RA, RB),
        ("forward all_gather b gained b.s", "bytes of forward all_gather b changed with its members: 128 -> 192"),
    ),
    "a member went to another bucket": Way(
        schedule(
            bucket("a", "w"),
            replace(bucket("b", "w", "b", "/a.b"), entry="a & b"),
            C,
            RA,
            RB,
            forward=FORWARD.replace("ag b", "ag a & b"),
        ),
        (
            "forward all_gather a lost a.b to forward all_gather a & b",
            "bytes of forward all_gather a changed with its members: 128 -> 64",
            "bucket forward all_gather b is now forward all_gather a & b",
            "forward all_gather a & b gained a.b from forward all_gather a",
            "bytes of forward all_gather a & b changed with its members: 128 -> 192",
        ),
    ),
    "a launch moved earlier": Way(
        schedule(forward="L ag a, L ag b, L ag c, W ag a, C a, W ag b, C b, W ag c, C c"),
        ("forward: launch all_gather c moved earlier past wait all_gather a and compute a",),
        back=("forward: launch all_gather c moved later past wait all_gather a and compute a",),
    ),
    "a prefetch lost": Way(
        schedule(forward="L ag a, W ag a, C a, L ag b, L ag c, W ag b, C b, W ag c, C c"),
        (
            "forward: launch all_gather b moved later past wait all_gather a and compute a; "
            "prefetch lost, no compute hides it now",
        ),
    ),
    "a prefetch lost by a wait too early": Way(
        schedule(forward="L ag a, L ag b, W ag a, W ag b, C a, L ag c, C b, W ag c, C c"),
        (
            "forward: wait all_gather b moved earlier past compute a and launch all_gather c; "
            "prefetch lost, no compute hides it now",
        ),
    ),
    "a wait moved earlier": Way(
        schedule(backward="C c, L rs b, C b, W rs b, C a, L rs a, W rs a"),
        ("backward: wait reduce_scatter b moved earlier past compute a",),
        before=schedule(backward="C c, L rs b, C b, C a, W rs b, L rs a, W rs a"),
        back=("backward: wait reduce_scatter b moved later past compute a",),
    ),
    "two launches moved past one compute, which stands": Way(
        schedule(forward="L ag a, W ag a, C a, L ag b, L ag c, W ag b, C b, W ag c, C c"),
        (
            "forward: launch all_gather b moved later past compute a; prefetch lost, no compute hides it now",
            "forward: launch all_gather c moved later past compute a",
        ),
        before=schedule(forward="L ag a, W ag a, L ag b, L ag c, C a, W ag b, C b, W ag c, C c"),
    ),
    "one of two members of one name lost": Way(
        schedule(bucket("a", "w"), B, C, RA, RB),
        (
            "forward all_gather a lost a.w (2)",
            "bytes of forward all_gather a changed with its members: 128 -> 64",
        ),
        before=schedule(bucket("a", "w", "w"), B, C, RA, RB),
    ),
    "two buckets are one": Way(
        schedule(replace(A, members=(*A.members, *C.members), bytes=192), B, RA, RB),
        (
            "bucket forward all_gather c (1 member) is gone: forward all_gather a carries its members",
            "bytes of forward all_gather a changed with its members: 128 -> 192",
        ),
    ),
    "a bucket in two": Way(
        schedule(bucket("a", "p0", "p1"), bucket("a", "p2", "p3", number=2), B, C, RA, RB),
        (
            "bucket new: forward all_gather a #2 (2 members, with members of forward all_gather a)",
            "forward all_gather a lost a.p2 and a.p3 to forward all_gather a #2",
            "bytes of forward all_gather a changed with its members: 256 -> 128",
        ),
        before=schedule(bucket("a", "p0", "p1", "p2", "p3"), B, C, RA, RB),
    ),
    "a wait moved within compute": Way(
        schedule(forward="L ag a, L ag b, W ag a, C a (1 of 2), L ag c, W ag b, C a (1 of 2), C b, W ag c, C c"),
        (
            "forward: launch all_gather c stands within compute a now",
            "forward: wait all_gather b stands within compute a now",
        ),
    ),
    "a wait moved on within compute": Way(
        schedule(forward=FORWARD.replace("W ag b, C b", "C b (2 of 9), W ag b, C b (7 of 9)")),
        ("forward: wait all_gather b moved earlier within compute b: behind (2 of 9) of it, (5 of 9) before",),
        before=schedule(forward=FORWARD.replace("W ag b, C b", "C b (5 of 9), W ag b, C b (4 of 9)")),
        back=("forward: wait all_gather b moved later within compute b: behind (5 of 9) of it, (2 of 9) before",),
    ),
    "the overlap of a reduction lost": Way(
        schedule(backward="C b, L rs b, W rs b, C a, L rs a, W rs a"),
        (
            "backward: wait reduce_scatter b moved earlier past compute a and launch reduce_scatter a; "
            "overlap lost, no compute hides it now",
        ),
    ),
    "another reduction": Way(
        schedule(A, B, C, replace(RA, op="sum"), RB),
        ("reduction of backward reduce_scatter a changed: avg -> sum",),
    ),
    "a collective no longer bucketed": Way(
        schedule(bucket("a", "w"), bucket("a", "b", number=2), B, C, RA, RB),
        ("forward all_gather a is no longer bucketed: its 2 members are launched one by one",),
    ),
    "one of several no longer bucketed": Way(
        schedule(bucket("a", *(f"p{i}" for i in range(8))), bucket("a", "p8", number=2), B, C, RA, RB),
        (
            "a.p8 is no longer bucketed: it left forward all_gather a and is launched alone",
            "bytes of forward all_gather a changed with its members: 576 -> 512",
        ),
        before=ONE,
    ),
    "nine no longer bucketed": Way(
        MANY, ("forward all_gather a is no longer bucketed: its 9 members are launched one by one",), before=ONE
    ),
    "many members lost": Way(
        schedule(bucket("a", "p0", "p1"), B, C, RA, RB),
        (
            "forward all_gather a lost 7 members, a.p2 ... a.p8",
            "bytes of forward all_gather a changed with its members: 576 -> 128",
        ),
        before=ONE,
    ),
    "many no longer bucketed": Way(
        schedule(bucket("a", "p0", "p1"), *(bucket("a", f"p{i}", number=i) for i in range(2, 9)), B, C, RA, RB),
        (
            "7 members, a.p2 ... a.p8, are no longer bucketed: they left forward all_gather a and are launched one by one",
            "bytes of forward all_gather a changed with its members: 576 -> 128",
        ),
        before=ONE,
    ),
    "many members of other sizes": Way(
        schedule(replace(NINE, members=tuple((fqn, "8") for fqn, _ in NINE.members)), B, C, RA, RB),
        ("9 members, a.p0 ... a.p8, of forward all_gather a have other sizes",),
        before=ONE,
    ),
    "a parameter renamed": Way(
        schedule(bucket("a", "w", "bias"), B, C, replace(RA, members=(("a.w", "4"), ("a.bias", "4"))), RB),
        ("a.b is now called a.bias",),
    ),
    "buckets of an entry exchanged": Way(
        schedule(bucket("a", "p2", "p3"), bucket("a", "p0", "p1", number=2), forward=TWICE),
        (
            "bucket forward all_gather a is now forward all_gather a #2",
            "bucket forward all_gather a #2 is now forward all_gather a",
            "forward: launch all_gather a #2 and launch all_gather a swapped: all_gather a is launched first now",
            "forward: wait all_gather a #2 moved later past wait all_gather a",
        ),
        before=schedule(bucket("a", "p0", "p1"), bucket("a", "p2", "p3", number=2), forward=TWICE),
    ),
    "the compute that hid a gather gone": Way(
        schedule(forward=FORWARD.replace("C a, ", "")),
        ("forward: compute a is gone", "forward: all_gather b; prefetch lost, no compute hides it now"),
    ),
    "more compute": Way(schedule(forward=FORWARD + ", C d"), ("forward: compute d is new",)),
    "entries in another order": Way(schedule(B, A, C, RA, RB), ("the entries stand in another order",)),
    "a collective of activations lost": Way(
        schedule(A, B, C, *ACTIVATIONS[1:]),
        ("bucket lost: forward all_reduce activations of a (1 member)",),
        before=schedule(A, B, C, *ACTIVATIONS),
    ),
    "one of an entry's buckets lost": Way(
        schedule(bucket("a", "q"), bucket("a", "r", number=2), forward="L ag a, L ag a #2, W ag a, W ag a #2, C a"),
        ("bucket lost: forward all_gather a (1 member)",),
        before=schedule(
            bucket("a", "p"),
            bucket("a", "q", number=2),
            bucket("a", "r", number=3),
            forward="L ag a, L ag a #2, L ag a #3, W ag a, W ag a #2, W ag a #3, C a",
        ),
    ),
    "an entry split in two": Way(
        schedule(bucket("a", "w"), bucket("b", "/a.b"), forward="L ag a, W ag a, C a, L ag b, W ag b, C b"),
        (
            "bucket new: forward all_gather b (1 member, with members of forward all_gather a)",
            "forward all_gather a lost a.b to forward all_gather b",
            "bytes of forward all_gather a changed with its members: 128 -> 64",
            "forward: compute b is new",
        ),
        before=schedule(bucket("a", "w", "b"), forward="L ag a, W ag a, C a"),
    ),
    "a bucket lost": Way(schedule(A, B, RA, RB), ("bucket lost: forward all_gather c (1 member)",)),
    "a new bucket": Way(schedule(A, B, C, bucket("d", "w", "b"), RA, RB), ("bucket new: forward all_gather d (2 members)",)),
    "two launches swapped": Way(
        schedule(forward="L ag b, L ag a, W ag a, C a, L ag c, W ag b, C b, W ag c, C c"),
        ("forward: launch all_gather a and launch all_gather b swapped: all_gather b is launched first now",),
    ),
    "a wait gone": Way(schedule(forward=FORWARD.replace("W ag b, ", "")), ("forward: wait all_gather b is gone",)),
    "updates that come when they are ready": Way(
        updated("C b, L rs b, C a, L rs a, W rs b, U b, W rs a", "U a"),
        ("update b moved from optimizer to backward, behind wait reduce_scatter b",),
        before=updated(BACKWARD, "U b, U a"),
        back=("update b moved from backward to optimizer",),
    ),
    "an update before a wait": Way(
        updated("C b, L rs b, C a, L rs a, U b, W rs b, W rs a", "U a"),
        ("backward: update b moved earlier past wait reduce_scatter b",),
        before=READY,
    ),
    "an update behind a wait": Way(
        updated("C b, L rs b, C a, L rs a, W rs b, W rs a, U b", "U a"),
        (
            "backward: update b moved later past wait reduce_scatter a",
            LOST,
        ),
        before=READY,
    ),
    "an update before a launch": Way(
        updated("C b, L rs b, W rs b, U b, C a, L rs a, W rs a", "U a"),
        (
            "backward: wait reduce_scatter b moved earlier past compute a and launch reduce_scatter a; "
            "overlap lost, no compute hides it now",
            "backward: update b moved earlier past compute a and launch reduce_scatter a",
            LOST,
        ),
        before=READY,
    ),
    "an update of another entry": Way(
        updated("C b, L rs b, C a, L rs a, W rs b, U a, W rs a", "U b"),
        (
            "update a moved from optimizer to backward, behind wait reduce_scatter b",
            "update b moved from backward to optimizer",
        ),
        before=READY,
    ),
    "an update gone": Way(
        updated("C b, L rs b, C a, L rs a, W rs b, W rs a", "U a"), ("backward: update b is gone", LOST), before=READY
    ),
    "an update new": Way(
        updated("C b, L rs b, C a, L rs a, W rs b, U b, W rs a", "U a, U c"), ("optimizer: update c is new",), before=READY
    ),
    "half of an update ready": Way(
        updated("C b, L rs b, C a, L rs a, W rs b, U b (1 of 2), W rs a", "U b (1 of 2), U a"),
        ("optimizer: update b is new",),
        before=READY,
    ),
    "a launch new": Way(
        schedule(), ("forward: launch all_gather b is new",), before=schedule(forward=FORWARD.replace("L ag b, ", ""))
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_changing_a_schedule_has_its_words(way: str) -> None:
    one = WAYS[way]
    assert changes(body(one.before), body(one.after)) == list(one.words)


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way].words])
def test_no_way_back_is_silent(way: str) -> None:
    one = WAYS[way]
    told = changes(body(one.after), body(one.before))
    assert told
    assert not one.back or told == list(one.back)


def layered(count: int, **other: NamedBucket) -> Schedule:
    buckets = [other.get(f"layers_{i}", bucket(f"layers.{i}", "w", "b")) for i in range(count)]
    return Schedule((), tuple(buckets))


def test_what_is_the_same_of_many_layers_is_one_sentence() -> None:
    after = Schedule((), tuple(replace(bucket(f"layers.{i}", "w", "b"), dtype="bfloat16") for i in range(126)))
    assert changes(body(layered(126)), body(after)) == [
        "dtype of forward all_gather layers.{i} changed: float32 -> bfloat16, i = 0 ... 125"
    ]


def test_of_many_layers_the_one_that_changed_is_named() -> None:
    after = layered(126, layers_60=bucket("layers.60", "b", "w"))
    assert changes(body(layered(126)), body(after)) == [
        "byte layout of forward all_gather layers.60 changed: layers.60.b stands where layers.60.w stood"
    ]


def test_buckets_that_are_counted_anew_are_the_same_buckets() -> None:
    """One more launch of an entry in front gives all behind it another number."""
    old = [bucket("a", f"p{i}", f"q{i}", number=i + 1) for i in range(4)]
    fresh = [bucket("a", "x", "y"), *(bucket("a", f"p{i}", f"q{i}", number=i + 2) for i in range(4))]
    assert changes(body(Schedule((), tuple(old))), body(Schedule((), tuple(fresh)))) == [
        "bucket new: forward all_gather a (2 members)"
    ]


def test_a_mesh_of_another_size_and_a_graph_that_is_gone_are_said() -> None:
    old = "plan a.toml\nmesh dp_shard=4\n\ngraph forward\n\nbuckets\n\ngraph backward\n\nbuckets\n"
    new = "plan b.toml\nmesh dp_shard=8\n\ngraph forward\n\nbuckets\n"
    assert changes(old, new) == ["mesh changed: dp_shard=4 -> dp_shard=8", "graph backward is gone"]


def test_several_activations_in_a_launch_are_not_renamed() -> None:
    one = Schedule((), (bucket("activations", "/(no parameter)", "/(no parameter)", kind="ar"), A))
    other = Schedule((), (one.buckets[0], bucket("a", "b", "w")))
    assert changes(body(one), body(one)) == []
    assert changes(body(one), body(other)) == ["byte layout of forward all_gather a changed: a.b stands where a.w stood"]


def test_merged_layers_and_halved_ones_are_a_few_sentences() -> None:
    pairs = [bucket(f"layers.{i}", f"/layers.{i}.w", f"/layers.{i + 1}.w") for i in range(0, 126, 2)]
    single = [bucket(f"layers.{i}", f"/layers.{i}.w") for i in range(126)]
    told = changes(body(Schedule((), tuple(single))), body(Schedule((), tuple(pairs))))
    assert len(told) == 2
    assert len(changes(body(Schedule((), tuple(pairs))), body(Schedule((), tuple(single))))) <= 3


@pytest.mark.parametrize("name", ["{}", "layer{}", "layer_{}", "encoder.block{}"])
def test_layers_fold_whatever_they_are_called(name: str) -> None:
    names = [name.format(i) for i in range(40)]
    forward = ", ".join(f"L ag {one}, W ag {one}, C {one}" for one in names)
    short = schedule(*(bucket(one, "w", "b") for one in names), forward=forward, backward="")
    text = body(short)
    assert len(text.splitlines()) < 20
    (graph,) = read_back(text).graphs.values()
    assert sorted(one.name for one in graph.buckets) == sorted(f"forward all_gather {one}" for one in names)
    assert graph.events["forward"] == [f"{event.what} {event.label}" for event in short.events]
    wider = schedule(*(replace(one, bytes=256) for one in short.buckets), forward=forward, backward="")
    assert len(changes(text, body(wider))) == 1


def test_names_with_braces_and_blanks_are_read_back_as_they_are() -> None:
    names = ["layers.{i}", "a  b", "x{j}", *(f"layers.{i}" for i in range(4))]
    odd = Schedule(events(", ".join(f"L ag {one}, W ag {one}" for one in names)), tuple(bucket(one, "w") for one in names))
    (graph,) = read_back(body(odd)).graphs.values()
    assert sorted(one.entry for one in graph.buckets) == sorted(names)
    assert graph.events["forward"] == [f"{event.what} {event.label}" for event in odd.events]


def test_several_graphs_are_told_apart() -> None:
    one = body(GOOD).partition("graph joint")[2]
    other = body(schedule(replace(A, bytes=256), B, C, RA, RB)).partition("graph joint")[2]
    before, after = f"graph forward{one}\ngraph backward{one}", f"graph forward{one}\ngraph backward{other}"
    assert changes(before, after) == ["graph backward: bytes of forward all_gather a changed: 128 -> 256"]
