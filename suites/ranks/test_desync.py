"""Where ranks part is found from their records alone."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest

from pytest_fxbucket.ranks.desync import agree, desyncs, wait_for_ever
from pytest_fxbucket.ranks.flight_recorder import FROM_ANY, RankPosition, RecordedGroup, RecordedLaunch
from pytest_fxbucket.ranks.pool import RankFailure

ALL = (0, 1, 2, 3)


def where(*groups, kept=256):
    """A flight record: for each group its members and what was launched; the last `kept` launches are still in it."""
    launches, told = [], []
    for index, (members, kinds) in enumerate(groups):
        checksum = 0
        for number, kind in enumerate(kinds):
            checksum = zlib.crc32(kind.encode(), checksum)
            launches.append(RecordedLaunch(index, number, number + 1, True, kind, "", 0))
        told.append(RecordedGroup(members, len(kinds), checksum))
    return RankPosition(groups=tuple(told), launches=tuple(launches[-kept:]))


def sentences(places):
    assert agree(places) == (not desyncs(places))
    return [desync.sentence for desync in desyncs(places)]


def test_ranks_that_launched_the_same_agree():
    assert sentences({rank: where((ALL, ["gather", "reduce"])) for rank in ALL}) == []


def test_the_odd_rank_is_named_first():
    places = {rank: where((ALL, ["gather", "reduce" if rank == 2 else "gather"])) for rank in ALL}
    assert sentences(places) == [
        "the ranks part at collective 2 of the job on ranks 0-3: rank 2 launched reduce, ranks 0-1, 3 launched gather"
    ]
    assert desyncs(places)[0].rank == 2


def test_a_rank_that_left_one_out_is_named():
    places = {rank: where((ALL, ["gather"] * (rank != 1))) for rank in ALL}
    assert sentences(places) == ["rank 1 never launched collective 1 of the job on ranks 0-3; ranks 0, 2-3 launched gather"]
    assert [(desync.rank, desync.is_missing) for desync in desyncs(places)] == [(1, True)]


def test_a_size_counts_where_it_must_agree_and_not_elsewhere():
    def one(numel, compared):
        launch = RecordedLaunch(0, 0, 1, compared, "all_to_all", "float32", numel)
        said = launch.agreed.encode()
        return RankPosition(groups=(RecordedGroup((0, 1), 1, zlib.crc32(said)),), launches=(launch,))

    assert sentences({0: one(4, True), 1: one(5, True)})[0].endswith(
        "rank 0 launched all_to_all of 4 float32, rank 1 launched all_to_all of 5 float32"
    )
    assert sentences({0: one(4, False), 1: one(5, False)}) == []


def test_who_is_missing_is_told_where_sizes_may_differ():
    def one(numel):
        launch = RecordedLaunch(0, 0, 1, False, "all_to_all", "float32", numel)
        return RankPosition(groups=(RecordedGroup((0, 1, 2), 1, 1),), launches=(launch,))

    (found,) = desyncs({0: one(4), 1: one(5), 2: RankPosition(groups=(RecordedGroup((0, 1, 2), 0, 0),))})
    assert (found.rank, found.is_missing) == (2, True)
    assert found.sentence.endswith("ranks 0-1 launched all_to_all")


def test_groups_are_compared_among_their_members_only():
    places = {0: where(((0, 1), ["a"])), 1: where(((0, 1), ["a"])), 2: where(((2, 3), [])), 3: where(((2, 3), []))}
    assert sentences(places) == []


def test_two_groups_of_the_same_members_are_two():
    places = {0: where(((0, 1), ["a"]), ((0, 1), ["b"])), 1: where(((0, 1), ["b"]), ((0, 1), ["a"]))}
    assert len(sentences(places)) == 2


def test_a_group_that_a_member_never_made_is_missed_once_something_was_launched():
    assert sentences({0: where(((0, 1), [])), 1: where()}) == []
    assert sentences({0: where(((0, 1), ["a"])), 1: where()}) == [
        "rank 1 never launched collective 1 of the job on ranks 0-1; rank 0 launched a"
    ]


def waiting(*groups, on=0, does="waits for"):
    """As `where`, at the last launch of the group `on`."""
    told = where(*groups)
    return replace(told, at=[one for one in told.launches if one.group == on][-1], does=does)


def test_ranks_of_which_each_waits_for_one_that_another_has_not_launched_wait_for_ever():
    a, b = (0, 1), (1, 0)
    crosswise = {0: waiting((a, ["x"]), (b, [])), 1: waiting((a, []), (b, ["y"]), on=1)}
    assert wait_for_ever(crosswise, [0, 1])
    assert not wait_for_ever({**crosswise, 1: replace(crosswise[1], does="is past")}, [0, 1]), "it may still launch the other"
    assert not wait_for_ever({0: waiting((a, ["x"])), 1: waiting((a, ["x"]))}, [0, 1]), "it may still arrive"
    assert not wait_for_ever({0: crosswise[0]}, [0, 1]), "nobody knows where the other is"
    assert not wait_for_ever(crosswise, [])


def test_a_rank_that_waits_for_one_that_is_done_waits_for_ever():
    places = {0: waiting((ALL, ["x", "y"])), **{rank: where((ALL, ["x"])) for rank in (1, 2, 3)}}
    assert wait_for_ever(places, [0])
    assert not wait_for_ever(places, [0, 1]), "it has launched one less, and may still come to it"


def test_a_member_that_left_no_record_is_not_missed():
    assert sentences({rank: where((ALL, ["gather"])) for rank in (0, 1, 3)}) == []


def test_what_the_records_forgot_is_not_compared():
    kinds = ["a", *["gather"] * 9]
    places = {0: where(((0, 1), kinds), kept=5), 1: where(((0, 1), [*kinds[:-1], "reduce"]), kept=3)}
    assert "collective 10 of the job" in sentences(places)[0]


def test_real_ranks_that_launch_something_else_have_failed(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks.run("suites.ranks.jobs:other_kind", [1] * 4, timeout_s=60)
    assert caught.value.kind == "mismatch"
    assert "rank 1 launched all_gather of 2 float32, ranks 0, 2-3 launched all_reduce(sum) of 2 float32" in str(caught.value)


def test_another_order_on_two_groups_is_no_parting_on_either(ranks):
    # Nothing hangs under gloo here; the check `collectives` looks for circles over several groups in graphs.
    ranks.run("suites.ranks.jobs:other_order_on_two_groups", [1] * 4, timeout_s=60)


def test_subgroups_of_real_ranks_are_their_own_business(ranks):
    told = ranks.run("suites.ranks.jobs:on_half_the_ranks", [None] * 4, timeout_s=60)
    assert [len(one) for one in told] == [1, 1, 2, 2]


def talking(**said):
    """Flight records of messages: `r1="0>1 4 int32, 1>2 1 int64"` received the first and sent the second."""
    places = {}
    for name, kinds in said.items():
        rank, launches, sums = int(name[1:]), [], {"send to": 0, "receive from": 0}
        for number, one in enumerate(filter(None, kinds.split(", "))):
            pair, numel, dtype = one.split()
            sender, receiver = map(int, pair.split(">"))
            verb, peer = ("send to", receiver) if sender == rank else ("receive from", sender)
            launches.append(RecordedLaunch(1, number, number + 1, True, f"{verb} rank {peer}", dtype, int(numel)))
            sums[verb] += zlib.crc32(one.encode()) + 1
        groups = (RecordedGroup((0, 1, 2), 0, 0), RecordedGroup((rank,), len(launches), 0))
        places[rank] = RankPosition("", None, "", groups, tuple(launches), *sums.values())
    return places


def test_messages_that_were_received_as_they_were_sent_are_well_whatever_their_order():
    assert (
        sentences(talking(r0="0>1 4 int32, 1>0 4 int32, 0>1 2 int32", r1="0>1 2 int32, 1>0 4 int32, 0>1 4 int32", r2="")) == []
    )


def test_each_rank_that_sends_to_another_is_told_by_its_first_message_that_does_not_fit():
    places = talking(
        r0="0>1 4 int32, 0>1 9 int32, 0>1 3 int32, 0>2 1 bool", r1="0>1 9 int32, 1>2 5 int32", r2="1>2 5 int8, 0>2 1 bool"
    )
    assert sentences(places) == [
        "rank 1 never received 3 int32 that rank 0 sent",
        "rank 1 sent 5 int32 to rank 2, which receives 5 int8",
    ]
    assert [(one.rank, one.is_missing) for one in desyncs(places)] == [(1, True), (2, False)]


def test_of_messages_whose_launches_are_forgotten_or_whose_receivers_name_no_sender_nobody_tells_which():
    lost = talking(r0="0>1 4 int32, 0>1 9 int32", r1="0>1 9 int32", r2="")
    assert sentences(lost) == ["rank 1 never received 4 int32 that rank 0 sent"]
    forgotten = {**lost, 0: replace(lost[0], launches=lost[0].launches[1:])}
    (one,) = lost[1].launches
    from_any = {**lost, 1: replace(lost[1], launches=(replace(one, kind=FROM_ANY),))}
    for places in (forgotten, from_any):
        assert not agree(places)
        assert desyncs(places) == []


def test_messages_of_a_rank_that_left_no_record_are_not_missed():
    places = talking(r0="0>1 4 int32", r2="")
    assert agree(places)
    assert desyncs(places) == []
