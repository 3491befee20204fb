"""Updates in a golden: each stands in the section where it happens, in order with waits and launches."""

from __future__ import annotations

import pytest

from pytest_fxbucket.golden.mismatch import changes
from pytest_fxbucket.golden.read_back import read_back
from pytest_fxbucket.golden.schedule import Schedule, schedule_of
from pytest_fxbucket.golden.text import golden_text
from suites.graph.whole_steps import Kind, WholeStep, entries, passed

KINDS: tuple[Kind, ...] = ("fused", "foreach", "plain", "in_place")


def schedule(step: WholeStep, updates: str) -> Schedule:
    return schedule_of(passed(step, updates=updates).after, entries(step), {"0": "dp_shard"})


def body(step: WholeStep, updates: str) -> str:
    return golden_text("x.toml", [], {"joint": schedule(step, updates)})


def sections(step: WholeStep, updates: str) -> dict[str, list[str]]:
    (graph,) = read_back(body(step, updates)).graphs.values()
    return graph.events


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_ready_stands_in_the_backward_between_its_wait_and_the_next_launch(kind: Kind) -> None:
    found = sections(WholeStep(kind=kind), "ready")
    at = found["backward"].index("wait reduce_scatter c")
    assert found["backward"][at - 1 : at + 2] == ["launch reduce_scatter b", "wait reduce_scatter c", "update c"]
    assert found["backward"][-3:] == ["wait reduce_scatter b", "update b", "wait reduce_scatter a"]
    assert found["optimizer"] == ["update a"]


@pytest.mark.parametrize("kind", KINDS)
def test_updates_that_come_last_are_a_section_of_their_own(kind: Kind) -> None:
    found = sections(WholeStep(kind=kind), "last")
    assert found["optimizer"] == ["update a", "update b", "update c"]
    assert not [event for event in found["backward"] if "update" in event]


def test_the_norm_to_clip_by_is_the_optimizers() -> None:
    found = sections(WholeStep(kind="foreach", clips=True), "last")
    norm = ["launch all_reduce norms", "wait all_reduce norms"]
    assert [event for event in found["optimizer"] if "all_reduce" in event] == norm
    assert found["optimizer"][0] == "update a", "it makes the norms"


def test_layers_that_are_updated_alike_are_folded() -> None:
    step = WholeStep("abcdefgh", kind="fused")
    after = passed(step).after
    for name, folded in (("layers.{}", "  update  layers.{i"), ("{}", "  update  {i")):
        entry_of = {one.fqn: name.format(step.layers.index(one.fqn[0])) for one in step.held}
        text = golden_text("x.toml", [], {"joint": schedule_of(after, entry_of, {"0": "dp_shard"})})
        assert folded in text


def test_the_diff_says_that_updates_became_ready() -> None:
    step = WholeStep(kind="foreach")
    told = changes(body(step, "last"), body(step, "ready"))
    assert told == [
        "update c moved from optimizer to backward, behind wait reduce_scatter c",
        "update b moved from optimizer to backward, behind wait reduce_scatter b",
    ]
