"""Blocks that may not move: one sentence says which, and why; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.step.roles import StepGraph
from suites.graph.handmade import aten
from suites.graph.whole_steps import Kind, WholeStep
from suites.transforms.moved_steps import bucketed, moved, step_of


def why(step: StepGraph, entries: Any = ("c",)) -> str:
    """The sentence; the graph stays as it is."""
    graph = next(iter(step.graphs.values())).graph
    before = str(graph)
    with pytest.raises((PassError, PlanError)) as raised:
        moved(step, entries)
    assert str(graph) == before
    text = str(raised.value)
    assert text.startswith("next_iteration: ")
    assert "\n" not in text
    return text.removeprefix("next_iteration: ")


class Changed(WholeStep):
    """The update of the last layer, with something before or behind it."""

    def __init__(self, before: Callable[[WholeStep, Any], None] = lambda *_: None, behind: Any = None, **more: Any) -> None:
        self.before, self.behind = before, behind
        super().__init__("abc", **{"kind": "plain", **more})

    def update(self, group: Any, scale: Any) -> None:
        last = group[0].fqn.startswith("c.")
        if last:
            self.before(self, group[0])
        super().update(group, scale)
        if last and self.behind:
            self.behind(self, group[0])


def test_without_an_optimizer() -> None:
    step = step_of(WholeStep("abc"))
    kept = [(n, v) for n, v in zip(step.graphs["joint"].graph.output_node().args[0], step.outputs["joint"], strict=True)]
    kept = [(node, value) for node, value in kept if value.role in ("loss", "grad")]
    step.graphs["joint"].graph.output_node().args = ([node for node, _ in kept],)
    step = replace(step, outputs={"joint": tuple(value for _, value in kept)})
    assert why(step) == (
        "entry c cannot move: the step does not update c, so nothing could follow its reduction; add [optimizer]"
    )


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_clipping_needs_all_reductions(kind: Kind) -> None:
    text = why(bucketed(WholeStep("abc", kind, clips=True)))
    assert text.startswith("entry c cannot move: the update of ")
    assert "needs its reduction too (_foreach_norm_scalar makes one value of all gradients" in text
    assert text.endswith("clipping waits for all reductions; set [step] clip_norm = 0")


@pytest.mark.parametrize(("kind", "name"), [("fused", "_fused_adamw_tensor_lr"), ("foreach", "_foreach_add_list")])
def test_one_group_of_entries_that_do_not_all_move(kind: Kind, name: str) -> None:
    text = why(bucketed(WholeStep("abc", kind, by_entry=False)), ["b", "c"])
    assert text.startswith(f"entries c and b cannot move: {name} updates a.w together with it, and that does not move")
    assert text.endswith('[optimizer] groups = "entry" gives each entry its own')


def test_one_group_moves_as_a_whole() -> None:
    assert len(moved(bucketed(WholeStep("abc", "fused", by_entry=False)), ["a", "b", "c"]).graphs) == 3


def test_a_bucket_that_carries_what_does_not_move() -> None:
    text = why(bucketed(WholeStep("abc")), ["c.w"])
    assert text.startswith("entry c.w cannot move: its reduction (reduce_scatter_tensor")
    assert ") also carries the gradient of c.b, which does not move; name what shares its bucket too, or" in text


def test_an_entry_that_is_not_trained() -> None:
    step = step_of(Local("abc"), trainable=False)
    assert why(step) == "entry c cannot move: none of its parameters is trained"


class Local(WholeStep):
    def backward(self, layer: str) -> None:
        for one in reversed(self.of(layer)):
            made = self.call(aten.mul.Tensor, self.x, self.gathered(one.shard))
            part = self.call(aten.slice.Tensor, made, 0, 0, 4)
            one.gradient = self.call(aten.mul.Tensor, part, 2.0) if layer == "c" else self.reduced(made)
            self.returns(one.gradient, "grad", one.fqn)


def test_a_gradient_that_is_not_reduced() -> None:
    text = why(step_of(Local("abc")))
    assert text == "entry c cannot move: no reduction brings the gradient of c.w, so there is nothing that could be hidden"


class Twice(WholeStep):
    """A reduction for each of two microbatches."""

    def backward(self, layer: str) -> None:
        for one in reversed(self.of(layer)):
            made = self.call(aten.mul.Tensor, self.x, self.gathered(one.shard))
            parts = [self.reduced(self.call(aten.mul.Tensor, made, factor)) for factor in (2.0, 3.0)]
            one.gradient = self.call(aten.add.Tensor, *parts)
            self.returns(one.gradient, "grad", one.fqn)


def test_a_gradient_that_is_reduced_for_each_microbatch() -> None:
    text = why(step_of(Twice("abc")))
    assert text.startswith("entry c cannot move: the gradient of c.b is reduced more than once in a step (")
    assert text.endswith("add up the parts of microbatches and reduce their sum once")


def test_an_update_in_place() -> None:
    text = why(step_of(WholeStep("abc", "in_place")))
    assert text.startswith("entry c cannot move: the step does not update c")


def test_a_write_in_place_to_what_others_hold() -> None:
    step = Changed(behind=lambda step, one: step.call(aten.add_.Tensor, step.held[0].shard, one.gradient))
    assert why(step_of(step)) == (
        "entry c cannot move: add__tensor writes parameter a.w in place; let the step give new values"
    )


def test_a_write_in_place_to_what_the_update_reads() -> None:
    step = Changed(lambda step, one: step.call(aten.mul_.Tensor, one.state["momentum"], 0.5))
    assert why(step_of(step)) == (
        "entry c cannot move: mul__tensor writes state c.w.momentum in place, which its update reads; "
        "let the step give new values"
    )


def test_a_write_behind_the_reduction_to_what_it_reduced() -> None:
    step = Changed(lambda step, one: step.call(aten.neg_.default, unreduced(one.gradient)))
    text = why(step_of(step))
    assert text.startswith(
        "entry c cannot move: neg__default must stay behind reduce_scatter_tensor_default_1, since one writes"
    )


def test_a_write_behind_what_packs_for_the_reduction() -> None:
    step = Changed(lambda step, one: step.call(aten.neg_.default, unreduced(one.gradient)))
    text = why(bucketed(step))
    assert text.startswith("entry c cannot move: neg__default must stay behind cat_4, since one writes in place")


def unreduced(gradient: fx.Node) -> fx.Node:
    return gradient.all_input_nodes[0].all_input_nodes[0]


@pytest.mark.parametrize(
    ("role", "fqn", "said"),
    [
        ("value", "norm", "value norm, which the step gives, is made of its reduced gradients"),
        ("buffer", "b", "buffer b, which the step gives, is made of its reduced gradients"),
        ("state", "average", "state average, which does not move, is made of what it updates"),
    ],
)
def test_what_the_step_gives_in_its_own_call(role: Any, fqn: str, said: str) -> None:
    step = Changed(behind=lambda step, one: step.returns(step.call(aten.neg.default, one.gradient), role, fqn))
    assert why(step_of(step)).startswith(f"entry c cannot move: {said}")


def test_random_numbers_in_an_update() -> None:
    def noisy(step: WholeStep, one: Any) -> None:
        one.gradient = step.call(aten.add.Tensor, one.gradient, step.call(aten.rand_like.default, one.gradient))

    assert why(step_of(Changed(noisy))) == (
        "entry c cannot move: rand_like_default draws random numbers, and would draw others behind those of its own step"
    )


def test_what_may_write_anything_in_an_update() -> None:
    def unknown(step: WholeStep, one: Any) -> None:
        one.gradient = step.call(scaled_somehow, one.gradient)

    assert why(step_of(Changed(unknown))) == (
        "entry c cannot move: scaled_somehow is a Python function, which may write anything, so nothing may pass it"
    )


def scaled_somehow(x: Any) -> Any:
    return x * 2


def test_a_number_of_its_own_call() -> None:
    def counted(step: WholeStep, one: Any) -> None:
        node = step.graph.call_function(aten._local_scalar_dense.default, (step.call(aten.sum.default, step.x),))
        node.meta["val"] = 1.0
        one.gradient = step.call(aten.mul.Tensor, one.gradient, node)

    text = why(step_of(Changed(counted)))
    assert text.startswith(
        "entry c cannot move: it reads _local_scalar_dense_default (aten._local_scalar_dense.default), which"
    )


def test_gradients_that_are_added_up_over_calls() -> None:
    def added(step: WholeStep, one: Any) -> None:
        one.gradient = step.call(aten.add.Tensor, one.gradient, step.earlier)  # type: ignore[attr-defined]

    class Accumulating(Changed):
        def batch(self, *shape: int) -> fx.Node:
            self.earlier = self.given("grad", "c.w", 4)
            return super().batch(*shape)

    assert why(step_of(Accumulating(added))) == (
        "entry c cannot move: the step adds to the gradient of c.w that was there before, which is a call late then"
    )


def test_order_that_is_kept_by_operators() -> None:
    text = why(bucketed(WholeStep("abc"), insert_overlap_deps=True))
    assert text.startswith("the graph keeps its order by operators of its own (pytest_fxbucket.compat.fx)")
    assert text.endswith("use [overlap] insert_overlap_deps = false")


def test_a_step_of_two_graphs() -> None:
    step = step_of(WholeStep("abc"))
    both = replace(step, graphs={"forward": step.graphs["joint"], "backward": step.graphs["joint"]})
    assert why(both) == "the step has graphs forward, backward; one graph of the whole step is expected"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], 'entries names none; name those that are to move, as in entries = ["layers.3"]'),
        ("c", 'entries must be a list of entries such as ["embed", "layers.[0-3]", "norm+output"], not "c"'),
        (["c", "c"], 'entries: entry "c" is there twice; take one out'),
        (["c", "c.w"], 'entries: entries "c" and "c.w" both hold c.w; let one of them have it'),
        (["d"], 'entries: entry "d" matches nothing'),
    ],
)
def test_bad_entries(entries: Any, said: str) -> None:
    assert why(bucketed(WholeStep("abc")), entries).startswith(said)


def test_tied_weights_in_two_entries() -> None:
    step = bucketed(WholeStep("abc"))
    first, *rest = step.parameters
    tied = replace(step, parameters=(replace(first, aliases=("head.w",)), *rest), modules=(*step.modules, "head"))
    assert why(tied, ["a", "head"]) == (
        'entries: entries "a" and "head" share a tied parameter, a.w and head.w being one; make them one entry, "a+head"'
    )
