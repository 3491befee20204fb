"""What a rank enters in its flight record is what the parent reads."""

from __future__ import annotations

import os

import pytest

from pytest_fxbucket.ranks import flight_recorder
from pytest_fxbucket.ranks.flight_recorder import FlightRecords, RankPosition, ranks_text


@pytest.fixture
def records(monkeypatch):
    """Flight records of four ranks, with this process as rank 2."""
    monkeypatch.setattr(flight_recorder, "_all", ())
    monkeypatch.setattr(flight_recorder, "_own", None)
    found = FlightRecords(4)
    flight_recorder.adopt(os.dup(found.fd), 4)
    flight_recorder.act_as(2)
    yield found
    found.close()


def test_a_rank_that_did_nothing_is_nowhere(records):
    assert records.read(2) == RankPosition()
    assert records.read(2).text == ""


def test_a_launch_is_told_by_kind_size_number_and_members(records):
    group = flight_recorder.group((0, 1, 2, 3))
    token = flight_recorder.launch(group, "all_gather", "bfloat16", 4096)
    assert records.read(2).text == "launched all_gather of 4,096 bfloat16, number 1 on ranks 0-3"
    flight_recorder.waits(token)
    assert records.read(2).text == "waits for all_gather of 4,096 bfloat16, number 1 on ranks 0-3"
    flight_recorder.waited(token)
    assert records.read(2).text == "is past all_gather of 4,096 bfloat16, number 1 on ranks 0-3"


def test_an_older_launch_may_be_the_one_that_is_waited_for(records):
    group = flight_recorder.group((0, 2))
    first = flight_recorder.launch(group, "all_reduce(sum)", "float32", 3)
    flight_recorder.launch(group, "barrier")
    assert records.read(2).text == "launched barrier, number 2 on ranks 0, 2"
    flight_recorder.waits(first)
    assert records.read(2).text == "waits for all_reduce(sum) of 3 float32, number 1 on ranks 0, 2"


def test_a_mark_numbers_the_collectives_from_one_again(records):
    group, other = flight_recorder.group((0, 1, 2, 3)), flight_recorder.group((0, 2))
    flight_recorder.launch(group, "barrier")
    flight_recorder.mark("step 2")
    flight_recorder.launch(group, "barrier")
    flight_recorder.launch(other, "barrier")
    where = records.read(2)
    assert where.mark == "step 2"
    assert [(launch.group, launch.index, launch.number) for launch in where.launches] == [(0, 0, 1), (0, 1, 1), (1, 0, 1)]


def test_a_mark_is_cut_at_200_bytes_and_never_in_pieces(records):
    flight_recorder.mark("ä" * 150)
    assert records.read(2) == RankPosition("ä" * 100)  # the counts behind it are as they were
    flight_recorder.mark("short")
    assert records.read(2).mark == "short"


def test_each_rank_has_its_own(records):
    flight_recorder.act_as(0)
    flight_recorder.mark("here")
    assert [records.read(rank).mark for rank in range(4)] == ["here", "", "", ""]


def test_the_last_256_launches_are_kept_in_order(records):
    group = flight_recorder.group((0, 1, 2, 3))
    for _ in range(300):
        flight_recorder.launch(group, "barrier")
    where = records.read(2)
    assert [launch.index for launch in where.launches] == list(range(44, 300))
    assert where.groups[0].count == 300


def test_clear_keeps_the_groups_from_before_settle_and_no_others(records):
    group = flight_recorder.group((0, 1, 2, 3))
    flight_recorder.settle()
    flight_recorder.group((2, 3))
    flight_recorder.mark("old")
    flight_recorder.launch(group, "barrier")
    records.clear(2)
    where = records.read(2)
    assert (where.mark, where.at, where.launches) == ("", None, ())
    assert [(one.members, one.count) for one in where.groups] == [((0, 1, 2, 3), 0)]
    assert flight_recorder.launch(group, "barrier") == 1
    assert records.read(2).at.number == 1


def test_a_group_keeps_its_name(records):
    for name in ("dp_shard", "dp_shard:gather", "ä" * 100):
        flight_recorder.group((0, 1), name)
    assert [(one.members, one.name[:20]) for one in records.read(2).groups] == [
        ((0, 1), name) for name in ("dp_shard", "dp_shard:gather", "ä" * 20)
    ]


@pytest.mark.parametrize(
    "ranks", [(0,), (5,), (0, 1), (1, 3), (0, 1, 2, 3), (0, 4, 8, 12), (1, 2, 5), tuple(range(1, 64, 2)), (0, 1, 8, 9, 63)]
)
def test_members_survive_as_text(records, ranks):
    flight_recorder.group(ranks)
    assert records.read(2).groups[0].members == ranks


@pytest.mark.parametrize("apart", [2, 3])
def test_a_group_of_many_ranks_has_all_members_or_is_not_recorded(records, apart):
    scattered = (*range(0, 64, apart), 99)
    flight_recorder.group(scattered)
    assert records.read(2).groups[0].members == scattered
    assert flight_recorder.group((*range(0, 1000, apart), 1999)) == -1
    assert len(records.read(2).groups) == 1


def test_a_factor_is_kept_whole_since_ranks_may_differ_in_it(records):
    kind = "reduce_scatter(premul_sum -1.23457e-05)"
    flight_recorder.launch(flight_recorder.group((0, 1, 2, 3)), kind, "float32", 3)
    assert records.read(2).at.kind == kind


def test_ranks_read_as_people_write_them():
    assert [ranks_text(ranks) for ranks in [(3,), (0, 1, 2), (0, 2, 3), (0, 4, 8)]] == [
        "rank 3",
        "ranks 0-2",
        "ranks 0, 2-3",
        "ranks 0-8/4",
    ]


def test_groups_beyond_the_table_are_not_recorded_and_do_no_harm(records):
    handles = [flight_recorder.group((0, 1, 2, 3)) for _ in range(66)]
    assert handles[-3:] == [63, -1, -1]
    assert flight_recorder.launch(-1, "barrier") == 0
    flight_recorder.waits(0)
    assert records.read(2).at is None


def test_collectives_of_real_ranks_are_entered(ranks):
    told = ranks.run("suites.ranks.jobs:every_kind", [None] * 4, timeout_s=60)
    assert told[0] == [
        "all_reduce(sum) of 3 float32",
        "reduce to 1(max) of 2 float64",
        "reduce_scatter(avg) of 8 float32",
        "reduce_scatter(sum) of 8 float32",
        "all_gather of 2 float32",
        "all_gather of 2 float32",
        "all_gather of 2 float32",
        "all_to_all of 4 float32",
        "broadcast of 0 of 5 int64",
        "barrier",
    ]
    assert told == [told[0]] * 4


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_launch_on_a_twin_is_told_by_its_name(pools, backend):
    told = pools.get(2, backend).run("suites.ranks.jobs:on_a_twin", [None] * 2, timeout_s=60)
    assert told == [[("pair", 1), ("pair:gather", 1), ("pair:gather", 2)]] * 2


def test_what_peers_send_each_other_is_told_apart(ranks):
    told = ranks.run("suites.ranks.jobs:ring", [None] * 4, timeout_s=60)
    assert told[1] == ["send to rank 2 of 3 float32", "receive from rank 0 of 3 float32"]


def test_who_sends_is_known_to_who_receives_from_any_rank(ranks):
    assert ranks.run("suites.ranks.jobs:each_to_the_first", [None] * 4, timeout_s=60) == [[1, 2, 3], None, None, None]


def test_clear_forgets_what_was_sent_and_received(records):
    flight_recorder.message(2, 3, 0, "float32", 4, received=False)
    flight_recorder.message(1, 2, 0, "float32", 4, received=True)
    where = records.read(2)
    assert (bool(where.sent), bool(where.received)) == (True, True)
    records.clear(2)
    where = records.read(2)
    assert (where.sent, where.received) == (0, 0)
