"""The comparison that all tests on ranks stand on: it must see a difference, whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.on_ranks import compare
from pytest_fxbucket.fuzz.program import HALVES, Program, aten, copied
from pytest_fxbucket.ranks.pools import Pools

Change = Callable[[fx.GraphModule], None]


def program() -> fx.GraphModule:
    made = Program(2)
    p, x = *made.shards("p"), *made.fulls("x")
    gathered, reduced = made.gather(p), made.reduce(x)
    made.call(aten.add_.Tensor, x, 1.0)
    return made.returns(gathered, reduced, made.call(aten.mul.Tensor, reduced, 0.0))


def changed(change: Change) -> list[fx.GraphModule]:
    before = program()
    after = copied(before)
    change(after)
    after.recompile()
    return [before, after]


def _named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name.startswith(name))


def _average(gm: fx.GraphModule) -> None:
    _named(gm, "reduce_scatter").update_arg(1, "avg")


def _no_write(gm: fx.GraphModule) -> None:
    gm.graph.erase_node(_named(gm, "add_"))


def _other_zero(gm: fx.GraphModule) -> None:
    _named(gm, "mul").update_arg(1, -0.0)


def _one_output_less(gm: fx.GraphModule) -> None:
    gm.graph.output_node().args = (gm.graph.output_node().args[0][:2],)


def _returns_instead(target: Callable[..., object], *args: object, **kwargs: object) -> Change:
    def change(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            other = gm.graph.call_function(target, (output.args[0][0], *args), kwargs)
        output.args = ([other, *output.args[0][1:]],)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_average, "output 1 differs in"),
        (_no_write, "input 1 differs in 12 of 12 elements"),
        (_other_zero, "output 2 differs in"),
        (_one_output_less, "3 outputs before the pass, 2 after it"),
        (_returns_instead(aten._to_copy.default, dtype=torch.float64), "output 0 has dtype torch.float32 before"),
        (_returns_instead(aten.t.default), "output 0 has shape (4, 3) before the pass, (3, 4) after it"),
    ],
)
def test_a_difference_of_any_kind_is_seen(pools: Pools, change: Change, says: str) -> None:
    found = compare(pools, *changed(change), 2)
    assert any(says in text for text in found), found


def test_strides_count_where_they_tell_where_an_element_lies(pools: Pools) -> None:
    def change(gm: fx.GraphModule) -> None:
        _returns_instead(aten.t.default)(gm)
        for target, kwargs in ((aten.clone.default, {"memory_format": torch.contiguous_format}), (aten.t.default, {})):
            _returns_instead(target, **kwargs)(gm)

    assert any("output 0 has strides (3, 1) before the pass, (1, 4) after it" in t for t in compare(pools, *changed(change), 2))


def test_another_group_of_the_same_size_is_seen_on_every_rank(pools: Pools) -> None:
    made = Program(4, HALVES[4])
    before = made.returns(made.gather(*made.shards("p"), group="halves"))
    after = copied(before)
    _named(after, "all_gather").update_arg(2, "strided")
    after.recompile()
    found = compare(pools, before, after, 4, groups=HALVES[4])
    assert {text.partition(":")[0] for text in found} == {"rank 0", "rank 1", "rank 2", "rank 3"}
    assert compare(pools, before, before, 4, groups=HALVES[4]) == []


def test_inputs_that_share_a_storage_share_it_on_the_ranks(pools: Pools) -> None:
    made = Program(2)
    whole = made.given("whole", 4, 3)
    with made.mode:
        part = made.shown("part", whole.meta["val"][1:3])
    gm = made.returns(made.call(aten.zero_.default, whole), made.neg(part))
    other = copied(gm)
    _named(other, "neg").target = aten.zeros_like.default
    other.recompile()
    assert any("output 1 differs" in text for text in compare(pools, gm, other, 2))  # -0.0 of the storage that was zeroed
