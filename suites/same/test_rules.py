"""What a pass may do, rule by rule: a legal graph that raises no alarm, and its nearest illegal one, which does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.program import Program, aten, c10d
from pytest_fxbucket.same.two_graphs import problems

MEMBERS = {"0": (0, 1), "0:gather": (0, 1), "halves": (0,)}
Made = Callable[[], fx.GraphModule]


def new() -> Program:
    return Program(2)


def unlike(before: fx.GraphModule, after: fx.GraphModule) -> list[str]:
    return problems(before, after, MEMBERS)


def cast_and_gather(*dtypes: torch.dtype, folded: bool = False) -> fx.GraphModule:
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


def sliced(begin: int, shape: tuple[int, ...] = (4, 3), *, whole: bool = False) -> fx.GraphModule:
    p = new()
    a, b = p.shards("ab")
    if whole:
        return p.returns(p.neg(p.gather(a)))
    both = p.call(aten.cat.default, [p.call(aten.view.default, one, [-1]) for one in (a, b)])
    rows = p.call(aten.view.default, p.gather(both), [2, 12])
    part = p.call(aten.slice.Tensor, rows, 1, begin, begin + 6)
    return p.returns(p.neg(p.call(aten.reshape.default, part, list(shape))))


def gathered_twice(names: str) -> fx.GraphModule:
    p = new()
    given = dict(zip("ab", p.shards("ab"), strict=True))
    forward = p.neg(p.gather(given[names[0]]))
    again = p.gather(given[names[1]]) if len(names) > 1 else forward.all_input_nodes[0]
    return p.returns(forward, p.call(aten.exp.default, again))


def two_reductions(first: str, returned: tuple[int, int] = (0, 1)) -> fx.GraphModule:
    p = new()
    given = dict(zip("ab", p.fulls("ab"), strict=True))
    launches = {name: p.launch_reduce(given[name]) for name in ("ab" if first == "a" else "ba")}
    waits = [p.wait(launches[name]) for name in "ab"]
    return p.returns(*(waits[index] for index in returned))


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


def on_group(group: str) -> fx.GraphModule:
    p = Program(2, {"halves": [[0], [1]]})
    (a,) = p.shards("a")
    return p.returns(p.neg(p.wait(p.call(c10d.all_reduce.default, a, "sum", group))))


def stepped(*lists: str) -> fx.GraphModule:
    """Parameters a and b less their gradients c and d, in place."""
    p = new()
    given = dict(zip("abcd", p.shards("abcd"), strict=True))
    for names in lists:
        half = len(names) // 2
        mine, theirs = ([given[n] for n in part] for part in (names[:half], names[half:]))
        p.call(aten._foreach_add_.List, mine, theirs, alpha=-1.0)
    return p.returns(given["a"])


def read_late(*, moved: bool, view_moved: bool = False) -> fx.GraphModule:
    p = new()
    a, b = p.shards("ab")
    view = p.call(aten.view.default, a, [6]) if not view_moved else None
    early = p.call(aten.exp.default, a) if not moved else None
    p.call(aten.add_.Tensor, a, b)
    return p.returns(early or p.call(aten.exp.default, a), p.neg(view or p.call(aten.view.default, a, [6])))


def copied_late(*, moved: bool) -> fx.GraphModule:
    """What is packed for a launch is as old as its copy."""
    p = new()
    a, b = p.shards("ab")
    early = p.call(aten.clone.default, a) if not moved else None
    p.call(aten.add_.Tensor, a, b)
    return p.returns(p.gather(early or p.call(aten.clone.default, a)))


def exchanged(kind: str, second: str) -> fx.GraphModule:
    """Rows that go to other ranks, returned twice: launched again in another shape, or taken from the first launch."""
    p = new()
    (a,) = p.fulls("a")

    def launched(node: fx.Node, *said: object) -> fx.Node:
        target = c10d.all_to_all_single.default if kind == "all_to_all" else c10d.broadcast.default
        return p.wait(p.call(target, node, *said, "0"))

    usual: list[object] = [[2, 2], [2, 2]] if kind == "all_to_all" else [1]
    other: list[object] = [[2, 2], [1, 3]] if kind == "all_to_all" else [0]
    first = launched(a, *usual)
    seen = p.call(aten.view.default, p.call(aten.view.default, a, [-1]), [4, 3])
    if second == "a copy":
        return p.returns(first, p.call(aten.clone.default, first))
    if second == "a copy of what was written":
        p.call(aten.add_.Tensor, first, 1)
        return p.returns(first, p.call(aten.clone.default, first))
    if second == "other rows":
        seen = p.call(aten.flip.default, seen, [0])
    if second == "columns for rows":
        seen = p.call(aten.reshape.default, p.call(aten.t.default, seen), [4, 3])
    return p.returns(first, launched(seen, *(other if second == "to others" else usual)))


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


def asserting(names: str) -> fx.GraphModule:
    p = new()
    given = dict(zip("ab", p.shards("ab"), strict=True))
    for name in names:
        p.call(aten._assert_async.default, p.call(aten.all.default, given[name]))
    return p.returns(p.neg(given["a"]))


@pytest.mark.parametrize(("before", "after"), [("a", ""), ("ab", "b")])
def test_what_is_done_to_the_world_is_done_still(before: str, after: str) -> None:
    assert unlike(asserting(before), asserting(before)) == []
    assert "what is done to the world" in unlike(asserting(before), asserting(after))[0]


def added(*args: object, **kwargs: object) -> fx.GraphModule:
    p = new()
    a, b = p.shards("ab")
    return p.returns(p.call(aten.add.Tensor, a, b, *args, **kwargs))


def times(value: float) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    return p.returns(p.call(aten.mul.Tensor, a, value))


def constant(name: str, value: float) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    holder = torch.nn.Module()
    holder.register_buffer(name, torch.full((3,), value))
    held = p.graph.get_attr(name)
    held.meta["val"] = a.meta["val"][0]
    p.graph.output([p.add(a, held)])
    return fx.GraphModule(holder, p.graph)


def seen_as(*targets: object) -> fx.GraphModule:
    p = new()
    (a,) = p.shards("a")
    node = a
    for target in targets:
        node = p.call(target, node)  # type: ignore[arg-type]
    return p.returns(p.neg(node))


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


def copied(*shape: int) -> fx.GraphModule:
    """An input, or a buffer that it was copied into, seen in ``shape``."""
    p = new()
    (a,) = p.shards("a")
    if shape:
        buffer = p.call(aten.empty.memory_format, [2, 3], device=torch.device("cpu"))
        p.call(aten.copy_.default, buffer, a)
        a = p.call(aten.view.default, buffer, list(shape))
    return p.returns(p.neg(a))


def two_draws(*order: int) -> fx.GraphModule:
    """Of one shape."""
    p = new()
    (a,) = p.shards("a")
    draws = [p.call(aten.rand_like.default, a) for _ in range(2)]
    return p.returns(*(draws[index] for index in order))


def scaled(target: Callable[..., object]) -> fx.GraphModule:
    """By a number that is computed of a size."""
    p = new()
    (a,) = p.shards("a")
    return p.returns(p.call(aten.mul.Tensor, a, p.call(target, p.call(aten.sym_size.int, a, 0), 2)))


def counted(*, written: bool) -> fx.GraphModule:
    made = constant("x", 1.0)
    (held,) = made.graph.find_nodes(op="get_attr")
    if written:
        with made.graph.inserting_before(made.graph.output_node()):
            made.graph.call_function(aten.add_.Tensor, (held, 1.0))
    return made


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


def parts_sent(order: str) -> fx.GraphModule:
    """Two parts of what was computed, each a copy, of which the first is written before both are sent."""
    p = new()
    (a,) = p.shards("a", 4)
    both = p.call(aten.split_with_sizes_copy.default, p.neg(a), [2, 2])
    parts = dict(zip("ab", (p.call(operator.getitem, both, index) for index in (0, 1)), strict=True))
    p.call(aten.mul_.Tensor, parts["a"], 2.0)
    return p.returns(*(p.gather(parts[name]) for name in order))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAN = float("nan")
RULES: dict[str, tuple[Made, Sequence[Made], Sequence[Made]]] = {
    "a cast may be folded into the pack, since a copy casts element by element": (
        partial(cast_and_gather, BF16),
        [partial(cast_and_gather, BF16, folded=True)],
        [partial(cast_and_gather, F16, BF16, folded=True), partial(cast_and_gather, F16)],
    ),
    "a cast that is undone is still one": (partial(cast_and_gather, F32), [], [partial(cast_and_gather, BF16, F32)]),
    "a parameter may be taken out of any bucket, since its bytes are followed": (
        partial(sliced, 0, whole=True),
        [partial(sliced, 0)],
        [partial(sliced, 1), partial(sliced, 6), partial(sliced, 0, (3, 4))],
    ),
    "parts of one list stay told apart when one of them is written": (
        partial(parts_sent, "ab"),
        [partial(parts_sent, "ab")],
        [partial(parts_sent, "ba"), partial(parts_sent, "aa")],
    ),
    "a gather may be repeated, since nobody wrote the shard": (
        partial(gathered_twice, "a"),
        [partial(gathered_twice, "aa")],
        [partial(gathered_twice, "ab")],
    ),
    "launches may change places, since they read what they read": (
        partial(two_reductions, "a"),
        [partial(two_reductions, "b")],
        [partial(two_reductions, "b", (1, 0))],
    ),
    "gradients may be reduced in one launch, since a sum is element by element": (
        partial(reduced_together, ""),
        [partial(reduced_together, "ABab")],
        [partial(reduced_together, "BAba"), partial(reduced_together, "ABab", "avg")],
    ),
    "another rank's part counts too, since that rank gets it": (
        partial(reduced_together, ""),
        [],
        [partial(reduced_together, "ABba"), partial(reduced_together, "ABaB")],
    ),
    "a group may be another one of the same ranks, since only they count": (
        partial(on_group, "0"),
        [partial(on_group, "0:gather")],
        [partial(on_group, "halves")],
    ),
    "a foreach may be parted, since each member is by itself": (
        partial(stepped, "abcd"),
        [partial(stepped, "bd", "ac")],
        [partial(stepped, "ad", "bc")],
    ),
    "a written input counts though it is no output": (partial(stepped, "abcd"), [], [partial(stepped, "ac")]),
    "a view may move past a write, and a read may not": (
        partial(read_late, moved=False),
        [partial(read_late, moved=False, view_moved=True)],
        [partial(read_late, moved=True)],
    ),
    "what is sent is as old as its copy": (partial(copied_late, moved=False), [], [partial(copied_late, moved=True)]),
    "what is sent is what a view shows when it is sent": (
        partial(launched, "vwg"),
        [partial(launched, "wvg")],
        [partial(launched, "vgw")],
    ),
    "a default may be written out, since it is what it was": (added, [partial(added, alpha=1)], [partial(added, alpha=2)]),
    "a constant may have another name, since its bytes are what counts": (
        partial(constant, "x", 1.0),
        [partial(constant, "y", 1.0)],
        [partial(constant, "x", 1.5)],
    ),
    "a constant is told by its bits": (partial(constant, "x", 0.0), [], [partial(constant, "x", -0.0)]),
    "a constant that is written is left as it was left": (
        partial(counted, written=True),
        [],
        [partial(counted, written=False)],
    ),
    "an alias may come and go, since it is the same memory seen alike": (
        seen_as,
        [partial(seen_as, aten.detach.default, aten.alias.default)],
        [partial(seen_as, aten.t.default, aten.relu.default)],
    ),
    "there may be gaps between rows, since they are not read": (
        partial(unpacked, "alone"),
        [partial(unpacked, "gaps")],
        [partial(unpacked, "other"), partial(unpacked, "columns")],
    ),
    "a copy is what was copied, in its own shape alone": (copied, [partial(copied, 2, 3)], [partial(copied, 3, 2)]),
    **{
        f"{kind}: what is sent once counts as sent twice, in whichever shape": (
            partial(exchanged, kind, "launched again"),
            [partial(exchanged, kind, "a copy")],
            [
                partial(exchanged, kind, second)
                for second in ("a copy of what was written", "other rows", "columns for rows", "to others")
            ],
        )
        for kind in ("all_to_all", "broadcast")
    },
    "two draws of one shape are two": (partial(two_draws, 0, 1), [], [partial(two_draws, 1, 0)]),
    "sizes are expressions too": (partial(scaled, operator.add), [], [partial(scaled, operator.mul)]),
    **{
        f"a number is its type and its bits: {one!r} is not {other!r}": (partial(times, one), [], [partial(times, other)])
        for one, other in ((0.0, -0.0), (2, 2.0), (1, True), (1.0, 1.0 + 2**-52), (NAN, 0.0))
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_allows_raises_no_alarm_and_what_is_next_to_it_does(rule: str) -> None:
    before, legal, illegal = RULES[rule]
    for make in (before, *legal):
        assert unlike(before(), make()) == []
    for make in illegal:
        assert "first differs at" in unlike(before(), make())[0]


def test_what_sees_how_memory_lies_is_left_where_bytes_are_told_without_gaps() -> None:
    made = unpacked("gaps")
    for node in made.graph.find_nodes(op="call_function", target=aten.exp.default):
        node.target = aten.sym_stride.int
        node.args = (*node.args, 0)
        node.meta["val"] = 8
    assert any("sees how memory lies" in line for line in unlike(made, made))
