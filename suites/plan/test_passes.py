"""``[pass]``: which passes a plan names, and what a list that names none is told."""

from __future__ import annotations

import pytest

from pytest_fxbucket.pass_names import in_order, no_pass
from suites.plan.plan_texts import BUCKET, MODEL, PARALLEL, plan_of, plans_of, refusal

REST = MODEL + PARALLEL + BUCKET
EXPECTED = 'a list of passes, each "manual", "torch" or "module:callable"'


def test_a_plan_is_of_our_pass_unless_it_names_others() -> None:
    assert plan_of(REST).pass_name == "manual"
    plan = plan_of(REST, '[pass]\nof = ["mine:recompute", "manual", "torch", "mine:recompute"]')
    assert plan.passes.of == ("mine:recompute", "manual", "torch", "mine:recompute")
    assert in_order(plan.pass_name) == [*plan.passes.of]


def test_a_row_of_the_matrix_may_have_other_passes() -> None:
    base, row = plans_of(REST, '[[matrix]]\nid = "x"\npass.of = ["torch"]')
    assert (base.pass_name, row.pass_name) == ("manual", "torch")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[pass]\nof = []", f"[pass] of must be {EXPECTED}, not an empty list"),
        ('[pass]\nof = "manual"', f'[pass] of must be {EXPECTED}, not "manual"'),
        (
            '[pass]\nof = ["manul"]',
            '[pass] of[0] must be "manual", "torch" or "module:callable", not "manul"; did you mean "manual"?',
        ),
        ('[pass]\nname = ["manual"]', '[pass] has no key "name"; name is a key of [transform]'),
        ("pass = 1", "[pass] must be a table, not 1"),
    ],
)
def test_what_is_no_list_of_passes_is_refused(table: str, said: str) -> None:
    first, rest = (table, REST) if table.startswith("pass =") else (REST, table)
    assert refusal(first, rest) == said


@pytest.mark.parametrize("name", ["manual", "torch", "a.b:c", "a:b,manual", "a:b, c:d"])
def test_passes_are_written_one_after_the_other(name: str) -> None:
    assert no_pass(name) is None


@pytest.mark.parametrize(("name", "wrong"), [("", ""), ("a:b,", ""), ("a:b,manul", "manul"), ("a", "a")])
def test_the_one_that_is_no_pass_is_named(name: str, wrong: str) -> None:
    assert str(no_pass(name)).startswith(f'"{wrong}" is no pass; expected manual, torch or module:callable')
