"""How a pass could try to be green: each of these graphs computes something else, and none gets through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from pytest_fxbucket.fuzz.program import Program, aten, c10d
from pytest_fxbucket.same.two_graphs import problems

Made = Callable[[], fx.GraphModule]
MEMBERS = {"0": (0, 1)}
CPU = torch.device("cpu")


def unlike(before: fx.GraphModule, after: fx.GraphModule) -> list[str]:
    return problems(before, after, MEMBERS)


def plain() -> fx.GraphModule:
    p = Program(2)
    (a,) = p.shards("a")
    return p.returns(p.neg(p.call(aten.t.default, p.gather(a))))


def lying_view() -> fx.GraphModule:
    """It says to have the shape that the transposed one has."""
    p = Program(2)
    (a,) = p.shards("a")
    gathered = p.gather(a)
    lying = p.call(aten.view.default, gathered, [3, 4])
    lying.meta["val"] = gathered.meta["val"].t()
    return p.returns(p.neg(lying))


def given(*, lying: bool) -> fx.GraphModule:
    p = Program(2)
    (a,) = p.shards("a")
    true = a.meta["val"]
    sent = p.neg(a)
    after = p.returns(p.gather(p.call(aten.view.default, sent, [3, 2]) if lying else sent))
    a.meta["val"] = true.new_empty(3, 2) if lying else true
    return after


def cast(*, lying: bool) -> fx.GraphModule:
    """The cast was met in a pack alone, so nobody has told its shape yet."""
    p = Program(2)
    (a,) = p.shards("a")
    half = p.call(aten._to_copy.default, p.neg(a), dtype=torch.bfloat16)
    if lying:
        half.meta["val"] = half.meta["val"].view(3, 2)
    sent = p.call(aten.view.default, half, [3, 2] if lying else [2, 3])
    return p.returns(p.neg(p.gather(sent)))


def wrong_group_size() -> fx.GraphModule:
    p = Program(2)
    (a,) = p.shards("a")
    launch = p.launch_gather(a)
    launch.args = (a, 1, "0")
    return p.returns(p.neg(p.call(aten.t.default, p.wait(launch))))


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


def two_views(first: int) -> fx.GraphModule:
    """Two rows of an input are written, one with each value."""
    p = Program(2)
    a, b = p.shards("ab")
    rows = [p.call(aten.select.int, a, 0, row) for row in (first, 1 - first)]
    p.call(aten.copy_.default, rows[0], p.call(aten.select.int, b, 0, 0))
    p.call(aten.copy_.default, rows[1], p.call(aten.select.int, b, 0, 1))
    return p.returns(p.neg(a))


def reshaped(early: bool) -> fx.GraphModule:
    """``reshape`` of what is not contiguous copies, so it matters when."""
    p = Program(2)
    a, b = p.shards("ab")
    turned = p.call(aten.t.default, a)
    copy = p.call(aten.reshape.default, turned, [-1]) if early else None
    p.call(aten.add_.Tensor, a, b)
    return p.returns(p.neg(copy or p.call(aten.reshape.default, turned, [-1])))


def same_memory(clone: bool) -> fx.GraphModule:
    """Two buffers of equal expressions are two: what is written into one is not in the other."""
    p = Program(2)
    (a,) = p.shards("a")
    one = p.call(aten.exp.default, a)
    other = p.call(aten.exp.default, a) if clone else one
    p.call(aten.add_.Tensor, one, a)
    return p.returns(p.neg(one), p.neg(other))


def reduced(dtype: torch.dtype | None = None, op: str = "sum", twice: bool = False) -> fx.GraphModule:
    p = Program(2)
    (a,) = p.fulls("a")
    sent = p.call(aten._to_copy.default, a, dtype=dtype) if dtype else a
    got = p.reduce(sent, op)
    got = p.call(aten._to_copy.default, got, dtype=torch.float32) if dtype else got
    return p.returns(p.all_reduce(got) if twice else got)


def seen_as_integers(*, seen: bool) -> fx.GraphModule:
    p = Program(2)
    (a,) = p.shards("a")
    return p.returns(p.call(aten.t.default, p.gather(p.call(aten.view.dtype, a, torch.int32) if seen else a)))


def strided(turned: bool) -> fx.GraphModule:
    """``as_strided`` sees memory, so what lies beneath matters."""
    p = Program(2)
    (a,) = p.shards("a")
    value = p.call(aten.exp.default, p.call(aten.t.default, a))
    if turned:
        value = p.call(aten.clone.default, value, memory_format=torch.contiguous_format)
    return p.returns(p.gather(p.call(aten.as_strided.default, value, [6], [1])))


def conjugated(kept: bool) -> fx.GraphModule:
    p = Program(2)
    a = p.given("a", 2, 3, dtype=torch.complex64)
    node = p.gather(a)
    node = p.call(aten._conj.default, node) if kept else node
    return p.returns(p.call(aten.mul.Tensor, node, 2.0))


def turned(op: Any) -> fx.GraphModule:
    p = Program(2)
    gathered = p.gather(p.given("a", 2, 3, dtype=torch.complex64))
    return p.returns(p.call(aten.mul.Tensor, p.call(op, gathered, *((0, 1) if op is aten.transpose.int else ())), 2.0))


def copied_to(**where: Any) -> fx.GraphModule:
    p = Program(2)
    (a,) = p.shards("a")
    return p.returns(p.neg(p.call(aten._to_copy.default, p.gather(a), dtype=torch.float32, **where)))


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


def sent(*sizes: int) -> fx.GraphModule:
    """A launch of a kind that is told as a whole."""
    p = Program(2)
    (a,) = p.shards("a", 4, 3)
    return p.returns(p.wait(p.call(c10d.all_to_all_single.default, a, [2, 2], list(sizes), "0")))


ATTACKS: dict[str, tuple[Made, Sequence[Made]]] = {
    "a view that lies about its shape": (plain, [lying_view]),
    "an input that lies about its shape": (partial(given, lying=False), [partial(given, lying=True)]),
    "a cast that lies about its shape": (partial(cast, lying=False), [partial(cast, lying=True)]),
    "a group size that is not the group's": (plain, [wrong_group_size]),
    "what nobody wrote, for zeros": (partial(padded, "zeros"), [partial(padded, "empty"), partial(padded, "filled late")]),
    "a write through a view of what was gathered": (
        partial(gathered_and_written, "ewn"),
        [partial(gathered_and_written, "wen"), partial(gathered_and_written, "enw")],
    ),
    "a write to another part of an input": (partial(two_views, 0), [partial(two_views, 1)]),
    "a later copy of what is written": (partial(reshaped, early=True), [partial(reshaped, early=False)]),
    "one storage for two of one expression": (partial(same_memory, clone=True), [partial(same_memory, clone=False)]),
    "another dtype or way to reduce": (
        reduced,
        [partial(reduced, torch.bfloat16), partial(reduced, op="avg"), partial(reduced, twice=True)],
    ),
    "bytes seen as another dtype": (partial(seen_as_integers, seen=False), [partial(seen_as_integers, seen=True)]),
    "other memory under a value that is looked at": (partial(strided, turned=False), [partial(strided, turned=True)]),
    "a lazy conjugate, for a view": (partial(conjugated, kept=False), [partial(conjugated, kept=True)]),
    "a transposed conjugate, for a transposition": (
        partial(turned, aten.transpose.int),
        [partial(turned, aten.adjoint.default), partial(turned, aten.mH.default)],
    ),
    "a copy on another device": (copied_to, [partial(copied_to, device=torch.device("meta"))]),
    "another share of what is exchanged": (partial(sent, 2, 2), [partial(sent, 1, 3)]),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_computes_something_else_does_not_get_through(attack: str) -> None:
    before, others = ATTACKS[attack]
    assert unlike(before(), before()) == []
    for make in others:
        assert unlike(before(), make())


def test_a_tensor_with_a_number_for_each_member_keeps_the_members_in_their_places() -> None:
    """Torch computes no fake value of it, so the graph is written by hand."""
    mode = FakeTensorMode()

    def scaled(places: tuple[int, int]) -> fx.GraphModule:
        graph = fx.Graph()
        given = [graph.placeholder(name) for name in ("a", "b", "numbers")]
        members = [given[place] for place in places]
        call = graph.call_function(torch.ops.aten._foreach_addcmul.Tensor, (members, members, members, given[2]))
        items = [graph.call_function(getitem, (call, place)) for place in places]
        graph.output(tuple(items))
        with mode:
            for node in (*given, *items):
                node.meta["val"] = torch.empty(2)
            call.meta["val"] = [torch.empty(2), torch.empty(2)]
        return fx.GraphModule(torch.nn.Module(), graph)

    assert problems(scaled((0, 1)), scaled((0, 1)), {}) == []
    assert len(problems(scaled((0, 1)), scaled((1, 0)), {})) == 2


def test_a_cast_with_its_defaults_written_out_is_the_same_cast() -> None:
    """As ``torch.fx.operator_schemas.normalize_function`` writes it."""

    def cast_by(**more: object) -> fx.GraphModule:
        p = Program(2)
        (a,) = p.shards("a")
        half = p.call(aten._to_copy.default, p.neg(a), dtype=torch.bfloat16, **more)
        return p.returns(p.neg(p.call(aten.view.default, half, [6])))

    assert unlike(cast_by(), cast_by(non_blocking=False, layout=None, memory_format=None)) == []
