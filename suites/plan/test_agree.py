"""Keys that would be read and ignored beside each other are refused: by size, caps, entries."""

from __future__ import annotations

import pytest

from pytest_fxbucket.plan import PlanError
from pytest_fxbucket.plan.pass_consistency import agree_with_entries
from suites.plan.plan_texts import MODEL, PARALLEL, plan_of, plans_of, refusal

HEAD = f"{MODEL}{PARALLEL}[bucket]"


@pytest.mark.parametrize(
    ("written", "caps"),
    [("25", (25.0,)), ("0.5", (0.5,)), ("[1, 25]", (1.0, 25.0)), ("[25, 0]", (25.0, 0.0)), ("0", (0.0,))],
)
def test_caps_are_a_number_or_one_for_each_entry(written: str, caps: tuple[float, ...]) -> None:
    plan = plan_of(HEAD, f'plan = ["a", "b"]\ncap_mb = {written}')
    assert plan.bucket.cap_mb == caps


def test_by_size_needs_no_entry_and_a_cap_but_for_the_last_bucket_or_where_nothing_is_merged() -> None:
    plan = plan_of(HEAD, 'by = "size"\ncap_mb = [25, 0]')
    assert (plan.bucket.by, plan.bucket.plan, plan.bucket.cap_mb) == ("size", (), (25.0, 0.0))
    assert plan_of(HEAD, 'by = "size"\nenabled = false').bucket.cap_mb == (0.0,)


def test_a_row_of_the_matrix_can_change_from_entries_to_size() -> None:
    row = '[[matrix]]\nid = "size"\nbucket.by = "size"\nbucket.plan = []\nbucket.cap_mb = 25\n'
    _, by_size = plans_of(HEAD, f'plan = ["a"]\n{row}')
    assert (by_size.bucket.by, by_size.bucket.plan) == ("size", ())


@pytest.mark.parametrize(
    ("bucket", "says"),
    [
        (
            'by = "size"',
            '[bucket] by = "size" fills buckets up to cap_mb, which has 0 (no cap); set it, as in cap_mb = 25',
        ),
        ('by = "size"\ncap_mb = [0, 25]', '[bucket] by = "size" fills buckets up to cap_mb, which has a 0 before its end'),
        (
            'by = "size"\ncap_mb = 25\nplan = ["a"]',
            '[bucket] plan names entries, and by = "size" makes none; leave plan out, or empty in a matrix row',
        ),
        ('by = "size"\ncap_mb = 25\nunplanned = "root"', '[bucket] unplanned = "root" means nothing with by = "size"'),
        ('by = "size"\ncap_mb = 25\nunplanned = "allow"', '[bucket] unplanned = "allow" means nothing with by = "size"'),
        (
            'by = "size"\ncap_mb = 25\n[overlap]\nlaunch_at = { forward = { a = "b" } }',
            '[overlap] launch_at names entries, and by = "size" makes none; use prefetch and defer_reduce',
        ),
        (
            'by = "size"\ncap_mb = 25\n[overlap]\nwait_before = { backward = { a = "b" } }',
            "[overlap] wait_before names entries",
        ),
        ('plan = ["a", "b"]\ncap_mb = [1, 2, 3]', "[bucket] cap_mb has 3 caps for 2 entries; give one an entry at most"),
        ('plan = ["a"]\ncap_mb = [1, 2]', "[bucket] cap_mb has 2 caps for 1 entry;"),
    ],
)
def test_keys_that_cannot_stand_together_are_named(bucket: str, says: str) -> None:
    assert refusal(HEAD, bucket).startswith(says)


def test_the_entry_of_the_rest_may_have_a_cap_of_its_own() -> None:
    assert plan_of(HEAD, 'plan = ["a"]\nunplanned = "root"\ncap_mb = [1, 2]').bucket.cap_mb == (1.0, 2.0)


def test_caps_beside_a_star_are_counted_when_the_model_is_known() -> None:
    plan = plan_of(HEAD, 'plan = ["a.*"]\ncap_mb = [1, 2, 3]')
    agree_with_entries(plan, ["a.0", "a.1", "a.2"], "p.toml")
    with pytest.raises(PlanError, match=r"^p.toml: \[bucket\] cap_mb has 3 caps for 2 entries; give one an entry at most$"):
        agree_with_entries(plan, ["a.0", "a.1"], "p.toml")


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("ring = { nodes = 2 }", '[run] ring is there, and reduce = "rank_order" goes round none; use reduce = "ring"'),
        ('reduce = "ring"\nring = { nodes = 3 }', "[run] ring.nodes = 3 does not divide the 4 ranks that are run"),
        ('reduce = "ring"\n[checks]\neager = false', "checks.eager is false; leave one of them out"),
        ('reduce = "ring"\nring = { node = 2 }', '[run] ring has no key "node"; did you mean "nodes"?'),
        ('reduce = "ring"\nring = 2', "[run] ring must be a table, not 2"),
        ('reduce = "rings"', 'must be "rank_order" or "ring", not "rings"; did you mean "ring"?'),
        ('reduce = "ring"\nring = { chunk_bytes = 8 }', "[run] ring.chunk_bytes must be a whole number of at least 16, not 8"),
    ],
)
def test_a_ring_that_nothing_goes_round_is_refused(run: str, says: str) -> None:
    assert says in refusal(HEAD, f'plan = ["a", "b"]\n[run]\n{run}')
