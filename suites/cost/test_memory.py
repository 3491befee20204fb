"""Which storages of graphs and steps written by hand live when, to the byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import fx

from pytest_fxbucket.captured_plan import CapturedPlan
from pytest_fxbucket.cost import memory
from pytest_fxbucket.cost.memory import Liveness, liveness_of
from pytest_fxbucket.graph.collectives import tensors
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan_on_mesh import PlanOnMesh, mesh_of
from pytest_fxbucket.simulate.held_memory import memory_of
from pytest_fxbucket.step.roles import StepGraph
from suites.graph.handmade import Handmade, aten

PIPELINE = Path(__file__).parents[2] / "fixtures/plans/pipeline.toml"
FOUR = 4 * 4
"""Bytes of four floats."""


def lived(made: Handmade, rounding: int = 1) -> dict[str, int]:
    """By node the bytes that live while it runs."""
    graph = made.finish()
    found = liveness_of(graph, made.inputs, made.outputs, rounding)
    return dict(zip((node.name for node in graph.nodes), found.at, strict=True))


def test_a_value_lives_from_its_node_to_its_last_user_and_inputs_throughout() -> None:
    made = Handmade()
    given = made.batch(4)
    one = made.call(aten.neg.default, given)
    two = made.call(aten.neg.default, one)
    made.returns(made.call(aten.neg.default, two), "loss")
    at = lived(made)
    assert [at[node.name] for node in made.graph.nodes] == [FOUR, 2 * FOUR, 3 * FOUR, 3 * FOUR, 2 * FOUR]


def test_views_and_writes_in_place_take_nothing_and_keep_what_they_see() -> None:
    made = Handmade()
    one = made.call(aten.neg.default, made.batch(4))
    seen = made.call(aten.view.default, one, [2, 2])
    made.call(aten.add_.Tensor, one, one)
    last = made.call(aten.neg.default, seen)
    at = lived(made)
    assert [at[node.name] for node in (one, seen)] == [2 * FOUR, 2 * FOUR]
    assert at[last.name] == 3 * FOUR


def test_fake_values_of_a_copied_node_do_not_make_it_the_node_that_it_is_a_copy_of() -> None:
    made = Handmade()
    given = made.batch(4)
    one = made.call(aten.neg.default, given)
    with made.graph.inserting_after(one):
        between = made.graph.call_function(aten.neg.default, (given,))
    between.meta["val"] = given.meta["val"].new_empty(4)
    again = made.graph.node_copy(one, lambda node: node)
    again.meta["val"] = one.meta["val"]
    assert lived(made)[again.name] == 2 * FOUR, "what the first one made is freed long ago"


def test_what_is_sent_lives_until_its_wait_whatever_stands_between() -> None:
    made = Handmade()
    sent = made.call(aten.neg.default, made.batch(4))
    flying = made.gather(sent)
    work = made.call(aten.neg.default, made.graph.find_nodes(op="placeholder")[0])
    waited = made.wait(flying)
    last = made.call(aten.neg.default, waited)
    at = lived(made)
    assert at[work.name] == FOUR + FOUR + 2 * FOUR + FOUR
    assert at[waited.name] == FOUR + FOUR + 2 * FOUR
    assert at[last.name] == FOUR + 2 * FOUR + 2 * FOUR


def test_an_all_reduce_works_on_a_copy_and_holds_nothing() -> None:
    made = Handmade()
    sent = made.call(aten.neg.default, made.batch(4))
    waited = made.summed(sent)
    assert lived(made)[waited.name] == 2 * FOUR


@pytest.mark.parametrize(("index", "bytes_"), [(0, 4), (1, 12), (-1, 12)])
def test_a_list_keeps_all_its_tensors_and_a_part_its_own(index: int, bytes_: int) -> None:
    made = Handmade()
    given = made.batch(4)
    both = made.call(aten.split_with_sizes_copy.default, given, [1, 3])
    part = made.part(both, index)
    last = made.call(aten.neg.default, part)
    at = lived(made)
    assert [at[both.name], at[part.name]] == [2 * FOUR, 2 * FOUR], "the list holds both as long as it is there"
    assert at[last.name] == FOUR + 2 * bytes_


def test_a_part_of_lists_is_all_of_its_list() -> None:
    made = Handmade()
    given = made.batch(4)
    lists = made.call(aten.split_with_sizes_copy.default, given, [1, 3])
    small, large = lists.meta["val"]
    with made.mode:
        lists.meta["val"] = [small, [large, torch.empty(4)]]  # as a fused update gives
    part = made.part(lists, 1)
    made.call(aten.neg.default, given)
    last = made.call(aten.neg.default, made.part(part, 1))
    at = lived(made)
    assert at[part.name] == FOUR + 4 + 12 + FOUR
    assert at[last.name] == FOUR + FOUR + FOUR
    names = [node.name for node in made.graph.nodes]
    assert at[names[names.index(part.name) + 1]] == FOUR + 12 + FOUR + FOUR, "the list that is taken lives without the other"


def test_parts_of_a_long_list_cost_no_more_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_at(parts: int) -> int:
        made, seen = Handmade(), list[object]()
        given = made.call(aten.split_with_sizes_copy.default, made.batch(parts), [1] * parts)
        for index in range(parts):
            made.part(given, index)
        monkeypatch.setattr(memory, "tensors", lambda value: seen.append(value) or tensors(value))
        lived(made)
        return len(seen)

    assert looked_at(200) < 2.1 * looked_at(100)


@pytest.mark.parametrize(("rounding", "bytes_"), [(1, 2 * FOUR), (512, 1024)])
def test_allocations_are_rounded_up(rounding: int, bytes_: int) -> None:
    made = Handmade()
    one = made.call(aten.neg.default, made.batch(4))
    assert lived(made, rounding)[one.name] == bytes_


def test_the_most_between_two_nodes_is_what_all_nodes_between_say() -> None:
    drawn, count = random.Random(0), 2000
    for at in (range(count), range(count, 0, -1), [drawn.randrange(10**6) for _ in range(count)]):
        found = Liveness((), tuple(at))
        for _ in range(100):
            first = drawn.randrange(count)
            last = drawn.randrange(first, count)
            assert found.most(first, last) == max(at[first : last + 1])


def step_of(**graphs: Handmade) -> StepGraph:
    modules = {phase: fx.GraphModule(torch.nn.Module(), made.finish()) for phase, made in graphs.items()}
    inputs = {phase: tuple(made.inputs) for phase, made in graphs.items()}
    outputs = {phase: tuple(made.outputs) for phase, made in graphs.items()}
    return StepGraph(modules, inputs, outputs, (), (), (), 0)


def test_state_that_a_graph_does_not_take_and_what_was_left_for_a_later_one_count() -> None:
    forward, backward, update = Handmade(), Handmade(), Handmade()
    saved = forward.call(aten.neg.default, forward.param("w", 4))
    forward.returns(saved, "crossing", "saved")
    backward.returns(backward.call(aten.neg.default, backward.given("crossing", "saved", 4)), "grad", "w")
    update.given("state", "w.exp_avg", 4)
    update.call(aten.neg.default, update.given("grad", "w", 4))
    found = memory_of(step_of(forward=forward, backward=backward, update=update))
    assert {phase: one.peak for phase, one in found.items()} == {
        "forward": 3 * FOUR,  # the weight, state, what is saved
        "backward": 4 * FOUR,
        "update": 4 * FOUR,  # what was saved is gone; the gradient, and what is computed of it
    }


def test_what_a_call_carries_to_the_next_lives_until_that_is_over_and_nothing_else_does() -> None:
    def iteration(takes: bool, gives: bool) -> Handmade:
        made = Handmade()
        weight = made.param("w", 4)
        read = made.given("carried", "g", 4) if takes else weight
        if gives:
            made.returns(made.call(aten.neg.default, read), "carried", "g")
        made.returns(made.call(aten.neg.default, weight), "grad", "w")
        return made

    found = memory_of(step_of(setup=iteration(False, True), steady=iteration(True, True), cleanup=iteration(True, False)))
    assert [found[phase].peak for phase in ("setup", "steady", "cleanup")] == [3 * FOUR, 4 * FOUR, 3 * FOUR]
    alone = memory_of(step_of(steady=iteration(True, True)))
    assert alone["steady"].peak == 4 * FOUR, "what was carried there counts even if who gave it is not looked at"


@pytest.mark.parametrize("row", ["two_interleaved", "two_zero_bubble"])
def test_what_is_sent_back_to_the_first_stage_is_held_however_its_backward_is_parted(row: str) -> None:
    """Under zero bubbles it has no gradients of inputs to make, and all of its backward comes later."""
    (plan,) = (one for one in load_plans(PIPELINE) if one.matrix_id == row)
    world = PlanOnMesh(CapturedPlan(plan, mesh_of(plan, run=True)), "manual")
    step = world.final_step(0)
    assert step.pipelined is not None
    sent = {one.name for one in step.pipelined.backward[0]}
    phase = "stage 0 backward" if row == "two_interleaved" else "stage 0 weight"
    held = [one.bytes for one in memory_of(step)[phase].storages if one.value is not None and one.value.fqn in sent]
    assert held
    assert min(held) == sum(one.bytes for one in step.pipelined.backward[0])
