"""Tables under [[transform]] that cannot stand together, or beside others."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.plan import PlanError, parse_plans

PLAN = """
[model]
factory = "m:build"
batch = "m:batch"
[parallel]
dp_shard = 4
[optimizer]
factory = "torch.optim:AdamW"
[bucket]
plan = ["a", "b"]
"""
MOVES = '[[transform]]\nname = "next_iteration"\nargs = { entries = ["b"] }\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MOVES + MOVES, "1 and 2 are both next_iteration; list all its entries in one"),
        (
            MOVES + '[[transform]]\nname = "m:mine"\n',
            "1: next_iteration gives three graphs, and m:mine stands behind it; list it last",
        ),
        (
            "[checks]\nbenchmark = true\n" + MOVES,
            "1: next_iteration gives three graphs, and [checks] benchmark times one; leave one of them out, by a matrix row",
        ),
        (
            '[overlap]\ninsert_overlap_deps = true\n[[transform]]\nname = "bucket"\n' + MOVES,
            "2: next_iteration moves what [overlap] insert_overlap_deps = true would hold in its place; leave that out",
        ),
    ],
)
def test_what_next_iteration_cannot_stand_with(text: str, says: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_plans(PLAN + text, Path("p.toml"))
    assert str(raised.value) == f"p.toml: [[transform]] {says}"


def test_next_iteration_stands_last() -> None:
    (plan,) = parse_plans(PLAN + '[[transform]]\nname = "m:mine"\n' + MOVES, Path("p.toml"))
    assert [one.name for one in plan.transform] == ["m:mine", "next_iteration"]
