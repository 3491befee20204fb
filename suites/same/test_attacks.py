"""How a pass could try to be green: each of these graphs computes something else, and none gets through."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from suites.passes.programs import Program, aten, c10d
from suites.same.holding import problems

MEMBERS = {"0": (0, 1)}
CPU = torch.device("cpu")


def unlike(before: fx.GraphModule, after: fx.GraphModule) -> list[str]:
    return problems(before, after, MEMBERS)


def plain() -> fx.GraphModule:
    p = Program(2)
    (a,) = p.shards("a")
    return p.returns(p.neg(p.call(aten.t.default, p.gather(a))))


def test_lying_shapes_are_not_believed() -> None:
    """A view that says to have the shape that the transposed one has."""
    p = Program(2)
    (a,) = p.shards("a")
    gathered = p.gather(a)
    lying = p.call(aten.view.default, gathered, [3, 4])
    lying.meta["val"] = gathered.meta["val"].t()
    assert unlike(plain(), p.returns(p.neg(lying)))


def test_a_lying_input_is_not_believed() -> None:
    p = Program(2)
    (a,) = p.shards("a")
    true = a.meta["val"]
    turned = p.call(aten.view.default, p.call(aten.neg.default, a), [3, 2])
    after = p.returns(p.gather(turned))
    a.meta["val"] = true.new_empty(3, 2)
    q = Program(2)
    (b,) = q.shards("a")
    assert unlike(q.returns(q.gather(q.call(aten.neg.default, b))), after)


def test_a_cast_that_lies_about_its_shape_stands_for_no_other_value() -> None:
    """The cast was met in a pack alone, so nobody has told its shape yet."""

    def cast(lying: bool) -> fx.GraphModule:
        p = Program(2)
        (a,) = p.shards("a")
        half = p.call(aten._to_copy.default, p.neg(a), dtype=torch.bfloat16)
        if lying:
            half.meta["val"] = half.meta["val"].view(3, 2)
        sent = p.call(aten.view.default, half, [3, 2] if lying else [2, 3])
        return p.returns(p.neg(p.gather(sent)))

    assert unlike(cast(False), cast(False)) == []
    assert unlike(cast(False), cast(True))


def test_a_group_size_that_is_not_the_groups_is_another_launch() -> None:
    p = Program(2)
    (a,) = p.shards("a")
    launch = p.launch_gather(a)
    launch.args = (a, 1, "0")
    assert unlike(plain(), p.returns(p.neg(p.call(aten.t.default, p.wait(launch)))))


def padded(how: str) -> fx.GraphModule:
    p = Program(2)
    (a,) = p.shards("a")
    if how == "zeros":
        buffer = p.call(aten.zeros.default, [4, 3], device=CPU)
    else:
        buffer = p.call(aten.empty.memory_format, [4, 3], device=CPU)
    p.call(aten.copy_.default, p.call(aten.slice.Tensor, buffer, 0, 0, 2), a)
    if how == "filled late":
        got = p.gather(buffer)
        p.call(aten.copy_.default, p.call(aten.slice.Tensor, buffer, 0, 2, 4), a)
        return p.returns(p.neg(got))
    return p.returns(p.neg(p.gather(buffer)))


@pytest.mark.parametrize("how", ["empty", "filled late"])
def test_what_nobody_wrote_is_no_zero(how: str) -> None:
    assert unlike(padded("zeros"), padded("zeros")) == []
    assert unlike(padded("zeros"), padded(how))


def gathered_and_written(order: str) -> fx.GraphModule:
    """What was gathered is read, and written in place."""
    p = Program(2)
    (a,) = p.shards("a")
    whole = p.gather(a)
    made = {}
    for step in order:
        if step == "w":
            p.call(aten.mul_.Tensor, p.call(aten.view.default, whole, [-1]), 2.0)
        else:
            made[step] = p.call(aten.exp.default if step == "e" else aten.neg.default, whole)
    return p.returns(made["e"], made["n"])


def test_a_write_through_a_view_of_what_was_gathered_is_seen() -> None:
    assert unlike(gathered_and_written("ewn"), gathered_and_written("ewn")) == []
    assert unlike(gathered_and_written("ewn"), gathered_and_written("wen"))
    assert unlike(gathered_and_written("ewn"), gathered_and_written("enw"))


def two_views(first: int) -> fx.GraphModule:
    """Two rows of an input are written, one with each value."""
    p = Program(2)
    a, b = p.shards("ab")
    rows = [p.call(aten.select.int, a, 0, row) for row in (first, 1 - first)]
    p.call(aten.copy_.default, rows[0], p.call(aten.select.int, b, 0, 0))
    p.call(aten.copy_.default, rows[1], p.call(aten.select.int, b, 0, 1))
    return p.returns(p.neg(a))


def test_which_part_of_an_input_is_written_counts() -> None:
    assert unlike(two_views(0), two_views(0)) == []
    assert unlike(two_views(0), two_views(1))


def reshaped(early: bool) -> fx.GraphModule:
    """``reshape`` of what is not contiguous copies, so it matters when."""
    p = Program(2)
    a, b = p.shards("ab")
    turned = p.call(aten.t.default, a)
    copy = p.call(aten.reshape.default, turned, [-1]) if early else None
    p.call(aten.add_.Tensor, a, b)
    return p.returns(p.neg(copy or p.call(aten.reshape.default, turned, [-1])))


def test_what_may_be_a_copy_is_as_old_as_it_is() -> None:
    assert unlike(reshaped(early=True), reshaped(early=False))


def same_memory(clone: bool) -> fx.GraphModule:
    """Two buffers of equal expressions are two: what is written into one is not in the other."""
    p = Program(2)
    (a,) = p.shards("a")
    one = p.call(aten.exp.default, a)
    other = p.call(aten.exp.default, a) if clone else one
    p.call(aten.add_.Tensor, one, a)
    return p.returns(p.neg(one), p.neg(other))


def test_two_storages_of_one_expression_are_two() -> None:
    assert unlike(same_memory(clone=True), same_memory(clone=False))


def reduced(dtype: torch.dtype | None = None, op: str = "sum", twice: bool = False) -> fx.GraphModule:
    p = Program(2)
    (a,) = p.fulls("a")
    sent = p.call(aten._to_copy.default, a, dtype=dtype) if dtype else a
    got = p.reduce(sent, op)
    got = p.call(aten._to_copy.default, got, dtype=torch.float32) if dtype else got
    return p.returns(p.all_reduce(got) if twice else got)


def test_in_which_dtype_and_how_it_is_reduced_counts() -> None:
    assert unlike(reduced(), reduced(torch.bfloat16))
    assert unlike(reduced(), reduced(op="avg"))
    assert unlike(reduced(), reduced(twice=True))


def test_bytes_seen_as_another_dtype_are_other_numbers() -> None:
    p = Program(2)
    (a,) = p.shards("a")
    seen = p.call(aten.view.dtype, a, torch.int32)
    other = p.returns(p.call(aten.t.default, p.gather(seen)))
    q = Program(2)
    (b,) = q.shards("a")
    assert unlike(q.returns(q.call(aten.t.default, q.gather(b))), other)


def strided(turned: bool) -> fx.GraphModule:
    """``as_strided`` sees memory, so what lies beneath matters."""
    p = Program(2)
    (a,) = p.shards("a")
    value = p.call(aten.exp.default, p.call(aten.t.default, a))
    if turned:
        value = p.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    return p.returns(p.gather(p.call(aten.as_strided.default, value, [6], [1])))


def test_memory_under_a_value_is_part_of_it_where_it_is_looked_at() -> None:
    assert unlike(strided(turned=False), strided(turned=False)) == []
    assert unlike(strided(turned=False), strided(turned=True))


def conjugated(kept: bool) -> fx.GraphModule:
    p = Program(2)
    a = p.given("a", 2, 3, dtype=torch.complex64)
    node = p.gather(a)
    node = p.call(aten._conj.default, node) if kept else node
    return p.returns(p.call(aten.mul.Tensor, node, 2.0))


def test_a_lazy_conjugate_is_no_view_of_the_same_numbers() -> None:
    assert unlike(conjugated(kept=True), conjugated(kept=False))


def exchanged(order: str) -> fx.GraphModule:
    """``set_`` lets one tensor live where another does; which writes it sees then nobody follows."""
    p = Program(2)
    a, b = p.shards("ab")
    mine = p.call(aten.clone.default, a)
    for step in order:
        p.call(*((aten.set_.source_Tensor, mine, b) if step == "s" else (aten.add_.Tensor, b, 1.0)))
    return p.returns(p.neg(mine))


def test_storages_that_are_exchanged_are_left_to_bitwise_by_name() -> None:
    assert any("puts one storage in another's place" in line for line in unlike(exchanged("sa"), exchanged("sa")))


def test_launches_of_other_kinds_are_told_as_a_whole() -> None:
    def sent(*sizes: int) -> fx.GraphModule:
        p = Program(2)
        (a,) = p.shards("a", 4, 3)
        return p.returns(p.wait(p.call(c10d.all_to_all_single.default, a, [2, 2], list(sizes), "0")))

    assert unlike(sent(2, 2), sent(2, 2)) == []
    assert unlike(sent(2, 2), sent(1, 3))
