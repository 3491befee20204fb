"""Places by hand in a plan file: pairs of entries that are there, in quotes, and in no circle."""

from __future__ import annotations

import pickle

import pytest

from pytest_fxbucket.plan import PlanError
from pytest_fxbucket.plan.pass_consistency import agree_with_entries
from suites.plan.plan_texts import MODEL, PARALLEL, plan_of, plans_of, refusal

PLAN = f"{MODEL}{PARALLEL}" + '[bucket]\nplan = ["embed", "layers.[0-3]", "norm+output"]\n'


def error_of(overlap: str) -> str:
    return refusal(PLAN, "[overlap]", overlap).removeprefix("[overlap] ")


def test_pairs_reach_the_plan_as_they_are_written_and_travel_to_the_ranks() -> None:
    text = 'launch_at = { forward = { "layers.3" = "layers.1", "norm+output" = "layers.3" }, backward = {} }\n'
    text += '[overlap.wait_before.backward]\n"layers.2" = "layers.0"\n'
    plan = plan_of(f"{PLAN}[overlap]\n{text}")
    assert plan.overlap.launch_at == {"forward": {"layers.3": "layers.1", "norm+output": "layers.3"}}
    assert plan.overlap.wait_before == {"backward": {"layers.2": "layers.0"}}
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_row_of_the_matrix_has_pairs_of_its_own() -> None:
    row = '[[matrix]]\nid = "early"\noverlap.launch_at.forward."layers.1" = "embed"\n'
    base, early = plans_of(f"{PLAN}{row}")
    assert base.overlap.launch_at == {}
    assert early.overlap.launch_at == {"forward": {"layers.1": "embed"}}


def test_the_entry_of_the_rest_and_the_entries_of_a_star_can_be_named() -> None:
    overlap = '[overlap]\nlaunch_at = { forward = { root = "embed" } }\n'
    plan = plan_of(f'{PLAN}unplanned = "root"\n{overlap}')
    assert plan.overlap.launch_at == {"forward": {"root": "embed"}}
    star = PLAN.replace("layers.[0-3]", "layers.*")
    plan = plan_of(f'{star}[overlap]\nlaunch_at = {{ forward = {{ "layers.1" = "embed" }} }}\n')
    with pytest.raises(PlanError, match=r'^W: .* there is no entry "layers.1"'):
        agree_with_entries(plan, ["embed", "layers.0"], "W")


@pytest.mark.parametrize(
    ("overlap", "says"),
    [
        ("launch_at = 3", 'launch_at must be a table such as { forward = { "layers.3" = "layers.1" } }, not 3'),
        ('launch_at = "layers.1"', "launch_at must be a table such as"),
        ('launch_at = { "layers.1" = "embed" }', 'launch_at has no key "layers.1"'),
        ('launch_at = { forwards = { "layers.1" = "embed" } }', 'launch_at has no key "forwards"; did you mean "forward"?'),
        ('launch_at = { forward = ["layers.1"] }', "launch_at.forward must be a table of entry = entry, not a list of 1"),
        (
            'launch_at = { forward = { layers.3 = "layers.1" } }',
            'launch_at.forward has a table at layers; write an entry with dots in quotes, as in "layers.3" = ...',
        ),
        ('launch_at = { forward = { "layers.1" = 3 } }', 'launch_at.forward has 3 in the pair of "layers.1"'),
        ('launch_at = { forward = { "layers.1" = " " } }', 'has " " in the pair of "layers.1"'),
        ('launch_at = { forward = { "" = "embed" } }', 'has "" in the pair of ""'),
        ('launch_at = { forward = { "layers.1" = ["embed"] } }', "has a list of 1 in the pair"),
    ],
)
def test_what_is_no_table_of_pairs_is_refused(overlap: str, says: str) -> None:
    assert error_of(overlap).startswith(says) or says in error_of(overlap)


@pytest.mark.parametrize(
    ("overlap", "says"),
    [
        (
            'launch_at = { forward = { "layers.4" = "layers.1" } }',
            'launch_at.forward: "layers.4" = "layers.1" names no bucket: there is no entry "layers.4"; '
            'did you mean "layers.3"?',
        ),
        (
            'wait_before = { backward = { "layers.1" = "layer.0" } }',
            'wait_before.backward: "layers.1" = "layer.0" names no bucket: there is no entry "layer.0"; '
            'did you mean "layers.0"?',
        ),
        (
            'launch_at = { forward = { output = "layers.1" } }',
            'names no bucket: "output" is within the entry "norm+output"; name that',
        ),
        (
            'launch_at = { forward = { "layers.1.attn" = "embed" } }',
            'names no bucket: "layers.1.attn" is within the entry "layers.1"; name that',
        ),
        (
            'launch_at = { forward = { qq = "embed" } }',
            'there is no entry "qq"; entries are embed, layers.0, layers.1, layers.2, layers.3, norm+output',
        ),
        ('launch_at = { forward = { "layers.[0-1]" = "embed" } }', 'there is no entry "layers.[0-1]"; did you mean "layers.'),
    ],
)
def test_a_pair_that_names_no_bucket_is_led_to_the_nearest_entry(overlap: str, says: str) -> None:
    assert says in error_of(overlap)


@pytest.mark.parametrize(
    ("overlap", "says"),
    [
        ('launch_at = { forward = { "layers.1" = "layers.1" } }', 'launch_at.forward: "layers.1" is placed at itself'),
        (
            'wait_before = { backward = { "layers.1" = "embed", embed = "layers.2", "layers.2" = "layers.1" } }',
            "wait_before.backward: the pairs form a circle, layers.1 -> embed -> layers.2 -> layers.1; each would have to",
        ),
        (
            'launch_at = { forward = { "layers.3" = "layers.1", "layers.1" = "layers.2", "layers.2" = "layers.1" } }',
            "launch_at.forward: the pairs form a circle, layers.1 -> layers.2 -> layers.1;",
        ),
    ],
)
def test_pairs_that_wait_for_each_other_are_named_in_their_order(overlap: str, says: str) -> None:
    assert error_of(overlap).startswith(says)


def test_a_chain_of_pairs_and_the_same_pair_the_other_way_in_backward_are_no_circle() -> None:
    chain = '"layers.3" = "layers.2", "layers.2" = "layers.1", "layers.1" = "embed"'
    text = f'launch_at = {{ forward = {{ {chain} }}, backward = {{ "layers.1" = "layers.2" }} }}'
    plan = plan_of(f"{PLAN}[overlap]\n{text}\n")
    assert len(plan.overlap.launch_at["forward"]) == 3
