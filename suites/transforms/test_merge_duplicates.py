"""What is launched twice for the same value is launched once: what stays, what goes, and how it is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.fuzz.program import Program, aten, c10d
from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.passes.new_nodes import LAUNCHES
from pytest_fxbucket.transforms.merge_duplicates import merge_duplicates
from pytest_fxbucket.transforms.transformation import traits_of
from suites.graph.handmade import Handmade
from suites.transforms.duplicates import Changed, changed, step_of

BF16 = torch.bfloat16
GATHER = "all_gather_into_tensor_default"


def test_the_first_launch_stays_with_the_views_behind_each_wait_and_the_rest_is_gone(made: Program, x: fx.Node) -> None:
    first = made.gather(x)
    left = made.part(made.call(aten.split.Tensor, first, 2), 1)
    cast = made.call(aten._to_copy.default, made.call(aten._to_copy.default, x, dtype=torch.float64), dtype=torch.float32)
    drawn = made.call(aten.rand_like.default, x)
    again = made.gather(made.call(aten.view_as.default, made.call(aten.detach.default, x), drawn))
    right = made.call(aten.view.default, again, [-1])
    found = changed(made, made.neg(left), made.neg(right), made.neg(made.gather(cast)))
    assert found.launches == [GATHER, f"{GATHER}_2"]
    kept = next(node for node in found.after.graph.nodes if node.name == GATHER)
    assert kept.meta[LAUNCHES] == (GATHER, f"{GATHER}_1")
    names = [node.name for node in found.after.graph.nodes]
    assert "detach_default" not in names
    assert "rand_like_default" in names
    assert names.index("view_default") > names.index("wait_tensor_default")


def test_a_reader_before_the_first_wait_has_that_wait_move_up_to_it(made: Program, x: fx.Node) -> None:
    first, second = made.launch_gather(x), made.launch_gather(x)
    early = made.neg(made.wait(second))
    late = made.neg(made.wait(first))
    found = changed(made, early, late)
    assert found.launches == [GATHER]
    assert [node.name for node in found.after.graph.nodes][:4] == ["x", GATHER, "wait_tensor_default_1", "neg_default"]


def test_what_is_waited_for_twice_is_waited_for_once(made: Program, x: fx.Node) -> None:
    first = made.wait(made.gather(x))
    results = [first, made.wait(made.gather(x)), made.neg(made.wait(made.wait(made.gather(x))))]
    found = changed(made, *results)
    assert found.launches == [GATHER]
    waits = [node.name for node in found.after.graph.nodes if is_wait(node)]
    assert waits == ["wait_tensor_default", "wait_tensor_default_1"]


def test_three_are_one_and_a_fourth_of_a_twin_group_is_one_of_them() -> None:
    made = Program(2, {"0:gather": [[0, 1]]})
    x = made.given("x", 2, 3)
    results = [made.neg(made.gather(x)) for _ in range(3)] + [made.neg(made.gather(x, "0:gather"))]
    found = changed(made, *results)
    assert len(found.launches) == 1
    assert found.transformed.done == ("all_gather of x (forward): 4 launches are 1",)


def test_what_the_graph_gives_out_twice_is_two_tensors_still(made: Program, x: fx.Node) -> None:
    flat = made.call(aten.view.default, x, [-1])
    results = [made.gather(x), made.gather(flat), made.call(aten.view.default, made.gather(x), [-1]), made.neg(made.gather(x))]
    found = changed(made, *results)
    assert len(found.launches) == 1
    assert found.transformed.done == ("all_gather of x (forward): 4 launches are 1, copied 2 times as the graph gives it out",)


def test_what_is_given_out_by_later_ones_alone_is_copied_from_the_second_of_them_on(made: Program, x: fx.Node) -> None:
    results = [made.neg(made.gather(x)), made.gather(x), made.gather(x)]
    found = changed(made, *results)
    assert found.transformed.done == (
        "all_gather of x (forward): 3 launches are 1, copied once as the graph gives it out twice",
    )


def test_coalesced_launches_of_the_same_are_one_part_by_part(made: Program) -> None:
    x, y = made.shards("xy")
    z = made.call(aten.detach.default, y)
    first = made.call(c10d.all_gather_into_tensor_coalesced.default, [x, y], 2, "0")
    second = made.call(c10d.all_gather_into_tensor_coalesced.default, [x, z], 2, "0")
    early = made.neg(made.wait(made.part(second, 0)))
    results = [made.wait(made.part(second, 1)), made.neg(made.wait(made.part(first, 0)))]
    found = changed(made, early, *map(made.neg, results))
    assert found.launches == ["all_gather_into_tensor_coalesced_default"]


def test_a_coalesced_launch_of_other_tensors_too_is_left_alone_and_says_so(made: Program) -> None:
    x, y = made.shards("xy")
    alone = made.neg(made.gather(x))
    found = changed(made, alone, *map(made.neg, made.coalesced("all_gather", [x, y])))
    assert found.is_same
    assert found.transformed.left == (
        (
            "all_gather of x, y (forward)",
            "other tensors go in the same launch, of it or of the one before (all_gather_into_tensor_default)",
        ),
    )


def test_launches_are_called_by_their_parameters_in_the_order_of_the_graph() -> None:
    made = Handmade()
    wq, wk = made.param("layers.0.wq.weight", 2, 3), made.param("layers.0.wk.weight", 2, 3)
    made.loss(*(made.gathered(w) for w in (wq, wk, wk, wq)))
    gradient = made.call(aten.neg.default, made.gathered(wq))
    gradient.meta["autograd_backward"] = True
    made.returns(made.call(aten.add.Tensor, made.reduced(gradient), made.reduced(gradient)), fqn="layers.0.wq.weight")
    found = Changed(fx.GraphModule(torch.nn.Module(), made.finish()), made.inputs, made.outputs)
    assert found.transformed.done == (
        "all_gather of layers.0.wq.weight (forward): 2 launches are 1",
        "all_gather of layers.0.wk.weight (forward): 2 launches are 1",
        "reduce_scatter of layers.0.wq.weight (backward): 2 launches are 1",
    )
    ((what, why),) = found.transformed.left
    assert what == "all_gather of layers.0.wq.weight (backward)"
    assert why.startswith("backward launches its own instead of keeping it, as reshard_after_forward = true has it")


def test_nothing_to_do_changes_nothing_and_its_own_output_is_left_as_it_is(made: Program) -> None:
    x, y = made.shards("xy")
    found = changed(made, made.neg(made.gather(x)), made.neg(made.gather(y)), made.neg(made.gather(x)))
    again = Changed(found.after)
    assert again.is_same
    assert (again.transformed.done, again.transformed.left) == ((), ())


@pytest.mark.parametrize("again", ["forward", 1, None, ["backward"]])
def test_a_wrong_argument_is_refused_and_nothing_has_changed(again: Any, made: Program, x: fx.Node) -> None:
    graph_module = made.returns(made.gather(x), made.gather(x))
    before = str(graph_module.graph)
    with pytest.raises(PlanError) as caught:
        merge_duplicates(step_of(graph_module), {}, again=again)
    assert str(caught.value) == f'merge_duplicates: again is {again!r}, expected true, false, "backward" or "microbatches"'
    assert str(graph_module.graph) == before


def test_it_stands_before_the_pass_and_keeps_all_bits() -> None:
    traits = traits_of(merge_duplicates)
    assert traits.before == ("bucket",)
    assert not traits.keeps_collectives
    assert traits.rounds == ""
