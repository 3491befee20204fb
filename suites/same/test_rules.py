"""What a pass may do, rule by rule: a legal graph that raises no alarm, and its nearest illegal one, which does."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from suites.passes.programs import Program, aten, c10d
from suites.same.holding import problems

MEMBERS = {"0": (0, 1), "0:gather": (0, 1), "halves": (0,)}
Made = Callable[[], fx.GraphModule]


def new() -> Program:
    return Program(2)


def unlike(before: fx.GraphModule, after: fx.GraphModule) -> list[str]:
    return problems(before, after, MEMBERS)


def check(before: Made, legal: Made, illegal: Made, why: str = "first differs at") -> None:
    assert unlike(before(), legal()) == []
    found = unlike(before(), illegal())
    assert found
    assert why in found[0]


def cast_and_gather(*dtypes: torch.dtype, folded: bool = False, operator_: str = "to") -> fx.GraphModule:
    """Gather of a cast, or of a buffer that it is copied into."""
    p = new()
    (x,) = p.shards("a")
    node = x
    for dtype in dtypes[:-1] if folded else dtypes:
        node = p.call(aten._to_copy.default, node, dtype=dtype)
    if folded:
        buffer = p.call(aten.empty.memory_format, [6], dtype=dtypes[-1], device=torch.device("cpu"))
        p.call(aten.copy_.default, p.call(aten.view.default, buffer, [2, 3]), node)
        node = buffer
    return p.returns(p.neg(p.call(aten.view.default, p.gather(node), [4, 3])))


def test_a_cast_may_be_folded_into_the_pack_since_a_copy_casts_element_by_element() -> None:
    bf16, f16 = torch.bfloat16, torch.float16
    check(
        lambda: cast_and_gather(bf16),
        lambda: cast_and_gather(bf16, folded=True),
        lambda: cast_and_gather(f16, bf16, folded=True),
    )
    assert unlike(cast_and_gather(bf16), cast_and_gather(f16))
    assert unlike(cast_and_gather(torch.float32), cast_and_gather(bf16, torch.float32))


def sliced(begin: int, shape: tuple[int, ...] = (4, 3), *, whole: bool = False) -> fx.GraphModule:
    p = new()
    a, b = p.shards("ab")
    if whole:
        return p.returns(p.neg(p.gather(a)))
    both = p.call(aten.cat.default, [p.call(aten.view.default, one, [-1]) for one in (a, b)])
    rows = p.call(aten.view.default, p.gather(both), [2, 12])
    part = p.call(aten.slice.Tensor, rows, 1, begin, begin + 6)
    return p.returns(p.neg(p.call(aten.reshape.default, part, list(shape))))


def test_a_parameter_may_be_taken_out_of_any_bucket_since_its_bytes_are_followed() -> None:
    check(lambda: sliced(0, whole=True), lambda: sliced(0), lambda: sliced(1))
    assert unlike(sliced(0, whole=True), sliced(6))
    assert unlike(sliced(0, whole=True), sliced(0, (3, 4)))


def gathered_twice(names: str) -> fx.GraphModule:
    p = new()
    given = dict(zip("ab", p.shards("ab"), strict=True))
    forward = p.neg(p.gather(given[names[0]]))
    again = p.gather(given[names[1]]) if len(names) > 1 else forward.all_input_nodes[0]
    return p.returns(forward, p.call(aten.exp.default, again))


def test_a_gather_may_be_repeated_since_nobody_wrote_the_shard() -> None:
    check(lambda: gathered_twice("a"), lambda: gathered_twice("aa"), lambda: gathered_twice("ab"))


def two_reductions(first: str, returned: tuple[int, int] = (0, 1)) -> fx.GraphModule:
    p = new()
    given = dict(zip("ab", p.fulls("ab"), strict=True))
    launches = {name: p.launch_reduce(given[name]) for name in ("ab" if first == "a" else "ba")}
    waits = [p.wait(launches[name]) for name in "ab"]
    return p.returns(*(waits[index] for index in returned))


def test_launches_may_change_places_since_they_read_what_they_read() -> None:
    check(lambda: two_reductions("a"), lambda: two_reductions("b"), lambda: two_reductions("b", (1, 0)))


def reduced_together(order: str, op: str = "sum", group: str = "0") -> fx.GraphModule:
    """Two reductions, or one of both with each rank's parts in ``order``: a capital of its first part, else its second."""
    p = new()
    a, b = p.fulls("ab")
    if not order:
        return p.returns(p.reduce(a), p.reduce(b))
    halves = [p.call(aten.slice.Tensor, one, 0, begin, begin + 2) for one in (a, b) for begin in (0, 2)]
    named = dict(zip("AaBb", halves, strict=True))
    whole = p.call(aten.cat.default, [p.call(aten.reshape.default, named[one], [-1]) for one in order])
    got = p.reduce(whole, op, group)
    return p.returns(*(p.call(aten.view.default, p.call(aten.slice.Tensor, got, 0, n, n + 6), [2, 3]) for n in (0, 6)))


def test_gradients_may_be_reduced_in_one_launch_since_a_sum_is_element_by_element() -> None:
    check(lambda: reduced_together(""), lambda: reduced_together("ABab"), lambda: reduced_together("BAba"))
    assert unlike(reduced_together(""), reduced_together("ABab", "avg"))


def test_another_ranks_part_counts_too_since_that_rank_gets_it() -> None:
    """Rank 0's own part is right: only what it sends to rank 1 is not."""
    assert unlike(reduced_together(""), reduced_together("ABba"))
    assert unlike(reduced_together(""), reduced_together("ABaB"))


def on_group(group: str) -> fx.GraphModule:
    p = Program(2, {"halves": [[0], [1]]})
    (a,) = p.shards("a")
    return p.returns(p.neg(p.wait(p.call(c10d.all_reduce.default, a, "sum", group))))


def test_a_group_may_be_another_one_of_the_same_ranks_since_only_they_count() -> None:
    check(lambda: on_group("0"), lambda: on_group("0:gather"), lambda: on_group("halves"))


def stepped(*lists: str, writer: str = "foreach") -> fx.GraphModule:
    """Parameters a and b less their gradients c and d, in place."""
    p = new()
    given = dict(zip("abcd", p.shards("abcd"), strict=True))
    for names in lists:
        half = len(names) // 2
        mine, theirs = ([given[n] for n in part] for part in (names[:half], names[half:]))
        p.call(aten._foreach_add_.List, mine, theirs, alpha=-1.0)
    return p.returns(given["a"])


def test_a_foreach_may_be_parted_since_each_member_is_by_itself() -> None:
    check(lambda: stepped("abcd"), lambda: stepped("bd", "ac"), lambda: stepped("ad", "bc"))


def test_a_written_input_counts_though_it_is_no_output() -> None:
    assert unlike(stepped("abcd"), stepped("ac"))


def read_late(*, moved: bool, view_moved: bool = False) -> fx.GraphModule:
    p = new()
    a, b = p.shards("ab")
    view = p.call(aten.view.default, a, [6]) if not view_moved else None
    early = p.call(aten.exp.default, a) if not moved else None
    p.call(aten.add_.Tensor, a, b)
    return p.returns(early or p.call(aten.exp.default, a), p.neg(view or p.call(aten.view.default, a, [6])))


def test_a_view_may_move_past_a_write_and_a_read_may_not() -> None:
    check(lambda: read_late(moved=False), lambda: read_late(moved=False, view_moved=True), lambda: read_late(moved=True))


def copied_late(*, moved: bool) -> fx.GraphModule:
    """What is packed for a launch is as old as its copy."""
    p = new()
    a, b = p.shards("ab")
    early = p.call(aten.clone.default, a) if not moved else None
    p.call(aten.add_.Tensor, a, b)
    return p.returns(p.gather(early or p.call(aten.clone.default, a)))


def test_what_is_sent_is_as_old_as_its_copy() -> None:
    assert unlike(copied_late(moved=False), copied_late(moved=True))
    assert unlike(copied_late(moved=False), copied_late(moved=False)) == []


def drawn(order: str, count: int = 2) -> fx.GraphModule:
    p = new()
    (a, b) = p.shards("ab")
    made = {}
    for name in order:
        made[name] = p.call(aten.rand_like.default, {"a": a, "b": b}.get(name, a))
    return p.returns(*(made[name] for name in "ab"[:count]))


def test_draws_keep_their_order_since_each_takes_the_next_numbers() -> None:
    assert unlike(drawn("ab"), drawn("ab")) == []
    assert unlike(drawn("ab"), drawn("ba"))
    assert any("the random state" in line for line in unlike(drawn("ab"), drawn("abc")))


def asserted(*, kept: bool) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    if kept:
        p.call(aten._assert_async.default, p.call(aten.all.default, a))
    return p.returns(p.neg(a))


def test_what_is_done_to_the_world_is_done_still() -> None:
    assert unlike(asserted(kept=True), asserted(kept=True)) == []
    assert "what is done to the world" in unlike(asserted(kept=True), asserted(kept=False))[0]


def added(*args: object, **kwargs: object) -> fx.GraphModule:
    p = new()
    a, b = p.shards("ab")
    return p.returns(p.call(aten.add.Tensor, a, b, *args, **kwargs))


def test_a_default_may_be_written_out_since_it_is_what_it_was() -> None:
    check(added, lambda: added(alpha=1), lambda: added(alpha=2))


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (2, 2.0), (1, True), (1.0, 1.0 + 2**-52), (float("nan"), 0.0)])
def test_constants_are_their_type_and_their_bits(one: float, other: float) -> None:
    def times(value: float) -> fx.GraphModule:
        p = new()
        (a,) = p.shards("a")
        return p.returns(p.call(aten.mul.Tensor, a, value))

    assert unlike(times(one), times(one)) == []
    assert unlike(times(one), times(other))


def constant(name: str, value: float) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    holder = torch.nn.Module()
    holder.register_buffer(name, torch.full((3,), value))
    held = p.graph.get_attr(name)
    held.meta["val"] = a.meta["val"][0]
    p.graph.output([p.add(a, held)])
    return fx.GraphModule(holder, p.graph)


def test_a_constant_may_have_another_name_since_its_bytes_are_what_counts() -> None:
    check(lambda: constant("x", 1.0), lambda: constant("y", 1.0), lambda: constant("x", 1.5))
    assert unlike(constant("x", 0.0), constant("x", -0.0))


def seen_as(*targets: object) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    node = a
    for target in targets:
        node = p.call(target, node)  # type: ignore[arg-type]
    return p.returns(p.neg(node))


def test_an_alias_may_come_and_go_since_it_is_the_same_memory_seen_alike() -> None:
    check(seen_as, lambda: seen_as(aten.detach.default, aten.alias.default), lambda: seen_as(aten.t.default, aten.relu.default))


def opaque(target: Callable[..., object]) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    node = p.graph.call_function(target, (a,))
    node.meta["val"] = a.meta["val"]
    return p.returns(node, p.neg(a))


def identity(value: torch.Tensor) -> torch.Tensor:
    return value


def test_what_cannot_be_followed_is_named_with_its_reason() -> None:
    found = unlike(opaque(aten.detach.default), opaque(identity))
    assert found
    for line in found:
        assert line.startswith("left: ")
        assert "is a Python function, which may write anything" in line


def test_sizes_are_expressions_too() -> None:
    def scaled(target: object) -> fx.GraphModule:
        p = new()
        (a,) = p.shards("a")
        size = p.call(aten.sym_size.int, a, 0)
        return p.returns(p.call(aten.mul.Tensor, a, p.call(target, size, 2)))  # type: ignore[arg-type]

    assert unlike(scaled(operator.add), scaled(operator.add)) == []
    assert unlike(scaled(operator.add), scaled(operator.mul))


def test_a_difference_behind_what_is_not_followed_is_red_all_the_same() -> None:
    def behind(target: object) -> fx.GraphModule:
        p = new()
        (a,) = p.shards("a")
        node = p.graph.call_function(identity, (a,))
        node.meta["val"] = a.meta["val"]
        return p.returns(p.call(target, node))  # type: ignore[arg-type]

    assert all(line.startswith("left: ") for line in unlike(behind(aten.neg.default), behind(aten.neg.default)))
    assert "first differs at" in unlike(behind(aten.neg.default), behind(aten.exp.default))[0]


def launched(order: str) -> fx.GraphModule:
    """A view is made, its input written, the view sent, in ``order``."""
    p = new()
    a, b = p.shards("ab")
    view = sent = a
    for step in order:
        if step == "v":
            view = p.call(aten.view.default, a, [3, 2])
        elif step == "w":
            p.call(aten.add_.Tensor, a, b)
        else:
            sent = p.launch_gather(view)
    return p.returns(p.neg(p.wait(sent)))


def test_what_is_sent_is_what_a_view_shows_when_it_is_sent() -> None:
    check(lambda: launched("vwg"), lambda: launched("wvg"), lambda: launched("vgw"))


def buffered(*shape: int) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    buffer = p.call(aten.empty.memory_format, [2, 3], device=torch.device("cpu"))
    p.call(aten.copy_.default, buffer, a)
    return p.returns(p.call(aten.t.default, p.call(aten.view.default, buffer, list(shape))))


def test_a_copy_is_what_was_copied_in_its_own_shape_alone() -> None:
    def turned() -> fx.GraphModule:
        p = new()
        (a,) = p.shards("a")
        return p.returns(p.neg(a))

    def copied(*shape: int) -> fx.GraphModule:
        made = buffered(*shape)
        for node in made.graph.find_nodes(op="call_function", target=aten.t.default):
            node.target = aten.neg.default
        return made

    check(turned, lambda: copied(2, 3), lambda: copied(3, 2))


def test_two_draws_of_one_shape_are_two() -> None:
    def made(*order: int) -> fx.GraphModule:
        p = new()
        (a,) = p.shards("a")
        draws = [p.call(aten.rand_like.default, a) for _ in range(2)]
        return p.returns(*(draws[index] for index in order))

    assert unlike(made(0, 1), made(0, 1)) == []
    assert unlike(made(0, 1), made(1, 0))


def test_the_first_of_two_effects_is_not_lost() -> None:
    def asserting(names: str) -> fx.GraphModule:
        p = new()
        given = dict(zip("ab", p.shards("ab"), strict=True))
        for name in names:
            p.call(aten._assert_async.default, p.call(aten.all.default, given[name]))
        return p.returns(p.neg(given["a"]))

    assert any("what is done to the world" in line for line in unlike(asserting("ab"), asserting("b")))


def test_a_constant_that_is_written_is_left_as_it_was_left() -> None:
    def counted(*, written: bool) -> fx.GraphModule:
        made = constant("x", 1.0)
        (held,) = made.graph.find_nodes(op="get_attr")
        if written:
            with made.graph.inserting_before(made.graph.output_node()):
                made.graph.call_function(aten.add_.Tensor, (held, 1.0))
        return made

    assert unlike(counted(written=True), counted(written=True)) == []
    assert unlike(counted(written=True), counted(written=False))


def unpacked(form: str) -> fx.GraphModule:
    """A gathered matrix: by itself, as rows with gaps between them, or in memory by columns."""
    p = new()
    a, b = p.shards("ab", 1, 4)
    if form == "alone":
        return p.returns(p.call(aten.exp.default, p.gather(a)))
    rows = p.gather(p.call(aten.cat.default, [b, a] if form == "other" else [a, b], 1))
    part = p.call(aten.slice.Tensor, rows, 1, 0, 4)
    if form == "columns":
        turned = p.call(aten.clone.default, p.call(aten.t.default, part), memory_format=torch.contiguous_format)
        part = p.call(aten.t.default, turned)
    return p.returns(p.call(aten.exp.default, part))


def test_there_may_be_gaps_between_rows_since_they_are_not_read() -> None:
    check(lambda: unpacked("alone"), lambda: unpacked("gaps"), lambda: unpacked("other"))
    assert unlike(unpacked("alone"), unpacked("columns"))


def test_what_sees_how_memory_lies_is_left_where_bytes_are_told_without_gaps() -> None:
    made = unpacked("gaps")
    for node in made.graph.find_nodes(op="call_function", target=aten.exp.default):
        node.target = aten.sym_stride.int
        node.args = (*node.args, 0)
        node.meta["val"] = 8
    assert any("sees how memory lies" in line for line in unlike(made, made))
