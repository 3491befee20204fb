"""RS(a) + RS(b) becomes RS(a + b) where nobody sees more of it than rounding; all else is left alone and says why."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz import lockstep
from pytest_fxbucket.fuzz.program import Program, aten, copied
from pytest_fxbucket.graph.collectives import is_wait
from pytest_fxbucket.passes.new_nodes import LAUNCHES
from pytest_fxbucket.transforms.add_before_reducing import add_before_reducing
from pytest_fxbucket.transforms.transformation import traits_of
from suites.graph.handmade import Handmade
from suites.transforms.duplicates import Changed, changed, step_of

KINDS = pytest.mark.parametrize(
    ("kind", "op"), [("reduce", "sum"), ("reduce", "avg"), ("all_reduce", "sum"), ("all_reduce", "avg")]
)


def added(made: Program, *nodes: fx.Node) -> Changed:
    return changed(made, *nodes, by=add_before_reducing)


@KINDS
def test_two_reductions_that_are_only_added_are_one_of_the_sum(kind: str, op: str, made: Program) -> None:
    x, y = made.fulls("xy")
    waits = [getattr(made, kind)(node, op) for node in (x, y)]
    found = added(made, made.neg(made.add(*waits)))
    (kept,) = (node for node in found.after.graph.nodes if node.name in found.launches)
    assert kept.meta[LAUNCHES] == (kept.name.removesuffix("_1"), kept.name)
    (total,) = kept.all_input_nodes
    assert (total.target, [node.name for node in total.all_input_nodes]) == (aten.add.Tensor, ["x", "y"])
    assert total.meta["nn_module_stack"] == kept.meta["nn_module_stack"]
    assert LAUNCHES not in total.meta
    label = "all_reduce" if kind == "all_reduce" else "reduce_scatter"
    assert found.transformed.done == (
        f"{label} of x (forward) + {label} of y (forward): 2 launches are 1, of what each rank adds before",
    )


@KINDS
def test_sums_of_more_are_one_by_one_in_any_nesting(kind: str, op: str, made: Program) -> None:
    a, b, c, d = (getattr(made, kind)(node, op) for node in made.fulls("wxyz"))
    left = made.add(made.add(a, b), c)
    found = added(made, made.neg(made.add(d, left)))
    assert len(found.launches) == 1
    assert [text.rpartition(": ")[2] for text in found.transformed.done] == ["4 launches are 1, of what each rank adds before"]
    made = Program(2)
    a, b, c, d = (getattr(made, kind)(node, op) for node in made.fulls("wxyz"))
    found = added(made, made.neg(made.add(made.add(c, a), made.add(d, b))))
    assert len(found.launches) == 1


def test_views_and_copies_that_both_go_through_stand_behind_the_one_reduction(made: Program) -> None:
    ways = []
    for x in made.fulls("xyz"):
        flat = made.call(aten.view.default, made.reduce(x), [3, 2])
        ways.append(made.call(aten.t.default, made.call(aten._to_copy.default, flat, dtype=torch.float32)))
    total = made.call(aten.detach.default, made.add(made.add(ways[0], ways[1]), ways[2]))
    found = added(made, made.neg(total))
    assert len(found.launches) == 1
    assert [node.target for node in found.after.graph.nodes].count(aten.t.default) == 1


def test_other_ways_that_keep_the_order_of_elements_are_the_same_way(made: Program) -> None:
    x, y = made.fulls("xy")
    flat = made.call(aten.view.default, made.call(aten.detach.default, made.reduce(x)), [-1])
    found = added(
        made,
        made.neg(made.add(made.call(aten.view.default, flat, [3, 2]), made.call(aten.reshape.default, made.reduce(y), [3, 2]))),
    )
    assert len(found.launches) == 1


def test_what_is_waited_for_twice_is_one_reduction_too(made: Program) -> None:
    x, y = made.fulls("xy")
    waits = [made.call(aten.view.default, made.wait(made.reduce(x)), [-1]), made.call(aten.view.default, made.reduce(y), [-1])]
    found = added(made, made.neg(made.add(*waits)))
    assert len(found.launches) == 1
    assert sum(map(is_wait, found.after.graph.nodes)) == 1


def test_a_step_of_two_directions_names_the_parameter() -> None:
    made = Handmade()
    shard = made.param("layers.0.weight", 2, 3)
    made.loss(made.gathered(shard))
    grads = [made.call(aten.neg.default, made.given("batch", f"[{i}]", 4, 3)) for i in range(2)]
    for node in grads:
        node.meta["autograd_backward"] = True
    made.returns(made.call(aten.add.Tensor, *map(made.reduced, grads)), fqn="layers.0.weight")
    graph_module = fx.GraphModule(torch.nn.Module(), made.finish())
    found = Changed(graph_module, made.inputs, made.outputs, by=add_before_reducing)
    assert found.transformed.done == (
        "reduce_scatter of layers.0.weight (backward): 2 launches are 1, of what each rank adds before",
    )


def test_the_last_bit_differs_where_sums_are_rounded(made: Program) -> None:
    """In bfloat16, of 8 bits, 256 + 1 is 256, and so is 256 + 1 again; 256 + 2 is 258."""
    x, y = (made.given(name, 2, 1, dtype=torch.bfloat16) for name in "xy")
    before = made.returns(made.neg(made.add(made.reduce(x), made.reduce(y))))
    after = copied(before)
    add_before_reducing(step_of(after), {})
    given = [[torch.full((2, 1), number, dtype=torch.bfloat16) for number in numbers] for numbers in ((256.0, 1.0), (0.0, 1.0))]
    outputs = [lockstep.run(one.graph, given)[one.graph.output_node()] for one in (before, after)]
    assert [out[0][0].item() for out in outputs] == [-258.0, -256.0]


def test_what_can_be_added_is_though_a_third_cannot(made: Program) -> None:
    a, b, c = (made.reduce(node, op) for node, op in zip(made.fulls("xyz"), ("sum", "sum", "avg"), strict=True))
    found = added(made, made.neg(made.add(made.add(a, b), c)))
    assert len(found.launches) == 2
    assert found.whys == ["they differ in kind, operation, ranks or process group"]
    assert found.transformed.left[0][0] == " + ".join(f"reduce_scatter of {name} (forward)" for name in "xyz")


def test_what_is_added_to_something_else_first_says_so(made: Program) -> None:
    x, y = made.fulls("xy")
    z = made.given("z", 2, 3)
    found = added(made, made.neg(made.add(made.reduce(y), made.add(z, made.reduce(x)))), made.neg(made.add(made.reduce(z), 1)))
    assert found.is_same
    assert found.transformed.left == (
        (
            "reduce_scatter of x (forward) + reduce_scatter of y (forward)",
            "they are not added to each other: add_tensor adds something else in between",
        ),
    )


def test_of_a_residual_stream_that_is_reduced_again_nothing_is_said(made: Program) -> None:
    """What the second all-reduce sends is computed from the sum with the first."""
    x, y = made.fulls("xy")
    stream = made.add(x, made.all_reduce(y))
    found = added(made, made.neg(made.add(stream, made.all_reduce(made.neg(stream)))))
    assert found.is_same
    assert found.transformed.left == ()


def test_it_says_how_it_rounds_and_needs_no_sum() -> None:
    traits = traits_of(add_before_reducing)
    assert traits.before == ("bucket",)
    assert "rounded on each rank before the sum over ranks" in traits.rounds
    made = Program(2)
    x, y = made.fulls("xy")
    found = added(made, made.neg(made.reduce(x)), made.neg(made.add(made.reduce(y), 1)))
    assert found.is_same
    assert (found.transformed.done, found.transformed.left) == ((), ())
