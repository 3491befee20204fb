"""Entries as text: ranges, ``+``, inner lists, and what is no entry."""

from __future__ import annotations

import pytest

from pytest_fxbucket.plan import Entry, PlanError, parse_entries


def names(raw: object) -> list[str]:
    return [entry.name for entry in parse_entries(raw, "W")]


def test_a_range_gives_an_entry_for_each_number_with_both_ends_in() -> None:
    assert names(["layers.[0-3]"]) == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert names(["a.[8-11].b"]) == ["a.8.b", "a.9.b", "a.10.b", "a.11.b"]
    assert names(["a.[2-2]"]) == ["a.2"]


def test_several_ranges_run_like_nested_loops() -> None:
    assert names(["a.[0-1].b.[3-4]"]) == ["a.0.b.3", "a.0.b.4", "a.1.b.3", "a.1.b.4"]


def test_plus_binds_last_so_a_range_in_it_stays_one_entry() -> None:
    expected = (Entry("layers.[0-1]+norm", ("layers.0", "layers.1", "norm")),)
    assert parse_entries(["layers.[0-1]+norm"], "W") == expected
    assert parse_entries([["layers.[0-1]", "norm"]], "W") == expected
    assert parse_entries([["layers.[0-1] + norm"]], "W") == expected


def test_an_inner_list_of_one_name_is_that_name() -> None:
    assert parse_entries([["norm"]], "W") == parse_entries(["norm"], "W")


def test_a_star_is_kept_for_the_model() -> None:
    assert parse_entries(["layers.*"], "W") == (Entry("layers.*", ("layers.*",)),)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ("layers", "W must be a list of entries"),
        ([None], "W has None as an entry"),
        ([True], "W has true as an entry"),
        (["  "], "W has an empty entry"),
        ([[]], "W has an empty list as an entry"),
        ([["a", 3]], "W has 3 in an inner list"),
        ([["a", ["b"]]], "W has a list of 1 in an inner list"),
        (["a+"], 'W: entry "a+" has nothing on one side of a +'),
        (["a..b"], 'entry "a..b" is no name'),
        (["a b"], 'entry "a b" is no name'),
        (["layers.[0-]"], '"[0-]", which is no range; write both ends'),
        (["layers.[0-3"], "which is no range"),
        (["layers.0-3]"], "which is no range"),
        (["layers[0-3]"], "which is no range; write both ends between dots"),
        (["layers.[3-0]"], 'runs backwards, "[3-0]"; write "[0-3]"'),
        (["layers.a*"], 'has a * within a name; it stands for a whole one, as in "layers.*", so name each module'),
        (["*.[qkv]_proj"], 'brackets hold numbers; name each: "q_proj", "k_proj", "v_proj"'),
        ([f"a.[0-{'9' * 5000}]"], "which is no range"),
        ([f"a.[0-{'9' * 18}]"], "stands for 1000000000000000000 names"),
        (["a+a"], 'entry "a+a" names "a" twice'),
        (["a.[0-1]+a.1"], 'names "a.1" twice'),
        (["a.[0-9999].[0-9999]"], "stands for 100000000 names"),
    ],
)
def test_what_is_no_entry_is_refused_with_the_text_that_was_written(raw: object, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_entries(raw, "W")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
