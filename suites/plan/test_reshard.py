"""Which entries stay gathered: as the plan says by entry, and left out as FSDP2 has it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.selectors import kept_entries

ENTRIES = ["embed", "layers.0", "layers.1", "norm+output"]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (True, []),
        (False, ENTRIES),
        (None, ["norm+output"]),
        ({"layers.*": False}, ["layers.0", "layers.1", "norm+output"]),
        ({"layers.[0-1]": False, "output+norm": True}, ["layers.0", "layers.1"]),
        ({"embed": False, "norm+output": False}, ["embed", "norm+output"]),
        ({"embed+norm+output": True}, []),
    ],
)
def test_entries_that_stay_gathered(asked: Any, kept: list[str]) -> None:
    assert kept_entries(asked, ENTRIES, ["norm+output"]) == frozenset(kept)


def test_what_is_in_no_entry_is_fsdp2s_root_and_stays() -> None:
    assert kept_entries(None, ["layers.0", "head", "root"], ["head", "root"]) == {"head", "root"}
    assert kept_entries({"root": True}, ["layers.0", "root"], ["root"]) == frozenset()


def test_an_entry_of_several_layers_is_named_by_what_names_them_all() -> None:
    assert kept_entries({"layers.*": False}, ["layers.0+layers.1", "layers.2+norm"], []) == {"layers.0+layers.1"}


@pytest.mark.parametrize("entry", ["d.a b", "d.[x]"])
def test_a_name_that_came_out_of_a_star_need_be_no_selector(entry: str) -> None:
    assert kept_entries({"d.*": False}, [entry, "head"], ["head"]) == {entry, "head"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"norm": False}, 'names "norm", which is no entry of [bucket] plan; entries are embed, layers.0, layers.1 and 1 more'),
        ({"layers.0": True, "layers.*": False}, 'is true for layers.0 by "layers.0" and false by "layers.*"; let one of them'),
    ],
)
def test_a_table_that_means_nothing_or_two_things_is_refused(asked: dict[str, bool], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        kept_entries(asked, ENTRIES, [])
    assert says in str(caught.value)
