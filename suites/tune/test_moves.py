"""Moves are pure, legal and told apart: what they make is a plan that a file may say, read back the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.load import parse_plans
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.tune.entries import items_of
from pytest_fxbucket.tune.moves import PlanMove, StepFacts, moves_of
from pytest_fxbucket.tune.proposal import proposal_of
from suites.tune.small_plans import HEAD, NAMES, ROOT, STARS, plan_of

FACTS = StepFacts(NAMES, 3 << 20, frozenset({"layers"}))
RANGES = HEAD + '\n[bucket]\nplan = ["tok_embeddings", "layers.[0-3]", "norm+output"]\n'
WHOLE = HEAD + '\n[bucket]\nplan = ["tok_embeddings", "layers", ["norm", "output"]]\n'
PAIRS = HEAD + '\n[bucket]\nplan = ["tok_embeddings", "layers.0+layers.1", "layers.[2-3]", "norm", "output"]\n'
AUTO = STARS + 'by = "overlap"\n[overlap]\nschedule = "auto"\nmax_prefetch = 3\n'
HAND = STARS + "cap_mb = 4\n[overlap]\nprefetch = 0\ndefer_reduce = false\ngather_group = 'own'\n"
SIZE = HEAD + '\n[bucket]\nby = "size"\ncap_mb = 25\n'
ROOTED = HEAD + '\n[bucket]\nplan = ["layers.*"]\nunplanned = "root"\n'


def moves(text: str, names: Sequence[str] = NAMES, start: str = "") -> dict[str, PlanMove]:
    found = moves_of(plan_of(text), replace(FACTS, entries=names), plan_of(start or text))
    return {move.says: move for move in found}


def items(move: PlanMove) -> list[str]:
    return items_of(move.plan.bucket.plan)


CASES = {
    "stars": (STARS, NAMES),
    "ranges": (RANGES, NAMES),
    "whole": (WHOLE, ("tok_embeddings", "layers", "norm+output")),
    "pairs": (PAIRS, ("tok_embeddings", "layers.0+layers.1", "layers.2", "layers.3", "norm", "output")),
    "auto": (AUTO, NAMES),
    "hand": (HAND, NAMES),
    "size": (SIZE, ()),
    "rooted": (ROOTED, ("layers.0", "layers.1", "layers.2", "layers.3", "root")),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_move_makes_is_read_back_from_the_file_that_says_it(case: tuple[str, Sequence[str]]) -> None:
    text, names = case
    plan = plan_of(text)
    before = repr(plan)
    found = moves_of(plan, replace(FACTS, entries=names), plan)
    assert len(found) >= 3
    for move in found:
        proposal = proposal_of(text, plan, move.plan, lambda _: None)
        assert proposal.problem == ""
        (read,) = parse_plans(proposal.new, ROOT / "tuned.toml")
        assert read == move.plan != plan, move.says
    assert repr(plan) == before
    assert len({repr((move.plan.bucket, move.plan.overlap)) for move in found}) == len(found)


def test_layers_are_merged_by_twos_and_fours_and_parted_again() -> None:
    found = moves(STARS)
    assert items(found["[bucket] plan has layers.[0-3] in entries of 2"]) == [
        "tok_embeddings",
        "layers.0+layers.1",
        "layers.2+layers.3",
        "norm+output",
    ]
    by_four = found["[bucket] plan has layers.[0-3] in entries of 4"]
    assert items(by_four)[1] == "layers.0+layers.1+layers.2+layers.3"
    back = moves_of(by_four.plan, replace(FACTS, entries=[entry.name for entry in by_four.plan.bucket.plan]), plan_of(STARS))
    alone = next(move for move in back if move.says.endswith("in entries of 1"))
    assert items(alone) == ["tok_embeddings", "layers.[0-3]", "norm+output"]


def test_a_star_stays_where_nothing_of_it_moves() -> None:
    found = moves(STARS)
    assert items(found['[bucket] plan has "norm+output" apart']) == ["tok_embeddings", "layers.*", "norm", "output"]
    assert items(found['[bucket] plan has "tok_embeddings+layers.0" as one entry']) == [
        "tok_embeddings+layers.0",
        "layers.[1-3]",
        "norm+output",
    ]


def test_a_module_of_layers_is_parted_by_a_star() -> None:
    found = moves(WHOLE, ("tok_embeddings", "layers", "norm+output"))
    assert items(found['[bucket] plan has "layers.*"']) == ["tok_embeddings", "layers.*", "norm+output"]


def test_entries_stay_where_caps_go_by_their_order_and_where_there_are_none() -> None:
    for text in (STARS + "cap_mb = [4, 8]\n", STARS + "enabled = false\n", SIZE):
        assert [says for says in moves(text) if "[bucket] plan" in says] == []


def test_what_no_entry_names_is_in_no_move() -> None:
    for move in moves(ROOTED, ("layers.0", "layers.1", "layers.2", "layers.3", "root")).values():
        assert all("root" not in entry.selectors for entry in move.plan.bucket.plan)


def test_places_by_hand_are_not_thrown_away() -> None:
    placed = STARS + '[overlap.launch_at]\nforward = { "norm+output" = "layers.0" }\n'
    assert '[overlap] schedule = "auto"' in moves(STARS)
    assert '[overlap] schedule = "auto"' not in moves(placed)


def test_a_schedule_finds_no_keys_beside_it_that_contradict_it() -> None:
    auto = moves(HAND)['[overlap] schedule = "auto"'].plan.overlap
    assert (auto.schedule, auto.prefetch, auto.defer_reduce, auto.gather_group) == ("auto", 1, True, "own")
    manual = moves(AUTO)['[overlap] schedule = "manual"'].plan
    assert (manual.overlap.max_prefetch, manual.bucket.by) == (None, "plan")


def test_keys_that_a_schedule_makes_idle_leave_the_file() -> None:
    plan = plan_of(HAND)
    proposal = proposal_of(HAND, plan, moves(HAND)['[overlap] schedule = "auto"'].plan, lambda _: None)
    assert "prefetch" not in proposal.new
    assert "defer_reduce" not in proposal.new
    assert "\n-prefetch = 0\n" in proposal.diff


def test_without_a_cluster_of_its_own_a_plan_is_not_scheduled_by_one() -> None:
    bare = STARS[: STARS.index("[cluster]")] + STARS[STARS.index("[bucket]") :]
    assert [says for says in moves(bare) if "schedule" in says] == []


def test_caps_go_from_the_largest_launch() -> None:
    def caps(text: str) -> list[str]:
        return [says.partition(" = ")[2] for says in moves(text) if "cap_mb = " in says]

    assert caps(STARS) == ["1", "2"], "powers of two below 3 MiB"
    assert caps(HAND) == ["2", "0"], "4 MiB is more than there is, and so is 8"
    assert caps(HAND.replace("cap_mb = 4", "cap_mb = 0.5")) == ["0.25", "1", "0"]


def test_a_key_goes_back_to_what_it_was() -> None:
    back = moves(HAND, start=STARS)
    assert {says for says, move in back.items() if move.takes_back} == {
        "[bucket] cap_mb as it was",
        *(f"[overlap] {key} as it was" for key in ("prefetch", "defer_reduce", "gather_group")),
    }
    assert not {"[overlap] prefetch = 1", "[bucket] cap_mb = 0"} & set(back), "which would have to gain something"
    plan: Plan = back["[overlap] prefetch as it was"].plan
    assert (plan.overlap.prefetch, plan.overlap.defer_reduce) == (1, False)


@pytest.mark.parametrize("listed", [["layers.[0-3]"], ["a.00", "a.1"], ["a.1", "a.0"], ["a.0", "b.1"], ["a", "b.0+b.1", "b.2"]])
def test_items_are_read_back_as_the_same_entries(listed: list[str]) -> None:
    entries = parse_entries(listed, "")
    assert parse_entries(items_of(entries), "") == entries
