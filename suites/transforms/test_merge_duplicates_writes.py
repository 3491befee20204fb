"""Never across a write: to what is sent, through whatever name, by whatever operator; nor where a result is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.program import Program, aten, c10d
from suites.passes.programs import SGD
from suites.transforms.duplicates import Changed, changed

GATHER = "all_gather_into_tensor_default"
Write = Callable[[Program, fx.Node, fx.Node], Any]
"""Writes ``x`` somehow; ``y`` is a tensor like it."""


def _fused(made: Program, x: fx.Node, y: fx.Node) -> fx.Node:
    return made.call(aten._fused_sgd_.default, [x], [y], [], **SGD)


def _through_a_view(made: Program, x: fx.Node, y: fx.Node) -> fx.Node:
    row = made.call(aten.select.int, made.call(aten.view.default, x, [3, 2]), 0, 1)
    return made.call(aten.fill_.Scalar, row, 3.0)


def _several_outputs(made: Program, x: fx.Node, y: fx.Node) -> fx.Node:
    flat, other = (made.call(aten.view.default, node, [6]) for node in (x, y))
    indices = made.call(aten.zeros.default, [6], dtype=torch.int64, device=torch.device("cpu"))
    return made.call(aten.sort.values, other, values=flat, indices=indices)


def _by_a_part(made: Program, x: fx.Node, y: fx.Node) -> fx.Node:
    parts = made.call(aten.split.Tensor, x, 1)
    return made.call(aten.mul_.Tensor, made.part(parts, 1), 2)


WRITES: dict[str, Write] = {
    "copy_": lambda m, x, y: m.call(aten.copy_.default, x, y),
    "add_": lambda m, x, y: m.call(aten.add_.Tensor, x, y),
    "list": lambda m, x, y: m.call(aten._foreach_add_.Scalar, [y, x], 1),
    "list copy": lambda m, x, y: m.call(aten._foreach_copy_.default, [x], [y]),
    "view": _through_a_view,
    "detached": lambda m, x, y: m.call(aten.zero_.default, m.call(aten.detach.default, x)),
    "part of a list": _by_a_part,
    "out": lambda m, x, y: m.call(aten.add.out, y, y, out=x),
    "several outputs": _several_outputs,
    "fused optimizer": _fused,
    "collective in place": lambda m, x, y: m.all_reduce_in_place(x, "max"),
}
RUNS = [name for name in WRITES if name != "collective in place"]
"""Those whose writes all ranks of one process can make."""


@pytest.mark.parametrize("name", list(WRITES))
@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])
@pytest.mark.parametrize("way", ["as it is", "by a cast"])
def test_a_value_that_was_written_in_between_is_launched_again(name: str, kind: str, way: str, made: Program) -> None:
    x, y = made.shards("xy")

    def sent() -> fx.Node:
        return made.call(aten._to_copy.default, x, dtype=torch.float64) if way == "by a cast" else x

    first = made.neg(getattr(made, kind)(sent()))
    WRITES[name](made, x, y)
    second = made.neg(getattr(made, kind)(sent()))
    third = made.neg(getattr(made, kind)(sent()))
    found = changed(made, first, second, third, made.neg(x), runs=name in RUNS)
    assert len(found.transformed.done) == 1
    ((what, why),) = found.transformed.left
    assert "(forward)" in what
    assert " writes what it sends, between the one before (" in why
    assert len(found.launches) == (3 if name == "collective in place" else 2)


@pytest.mark.parametrize("name", list(WRITES))
def test_a_copy_from_before_a_write_is_not_one_from_behind_it(name: str, made: Program) -> None:
    x, y = made.shards("xy")
    old = made.call(aten.clone.default, x)
    WRITES[name](made, x, y)
    new = made.call(aten.clone.default, x)
    found = changed(made, made.neg(made.gather(old)), made.neg(made.gather(new)), made.neg(made.gather(x)), runs=name in RUNS)
    assert found.transformed.done == (f"all_gather of {new.name} (forward): 2 launches are 1",)
    assert [what for what, _ in found.transformed.left] == [f"all_gather of {new.name} (forward)"]


@pytest.mark.parametrize("name", list(WRITES))
def test_a_write_before_or_behind_both_is_in_nobodys_way(name: str, made: Program) -> None:
    x, y = made.shards("xy")
    WRITES[name](made, x, y)
    alias = made.call(aten.detach.default, x)
    results = [made.neg(made.gather(x)), made.neg(made.gather(alias))]
    WRITES[name](made, x, y)
    found = changed(made, *results, made.neg(x), runs=name in RUNS)
    assert [text for text in found.transformed.done if text.startswith("all_gather")]
    assert [what for what, _ in found.transformed.left if what.startswith("all_gather")] == []


def test_two_names_of_written_memory_are_the_same_and_two_places_in_it_are_not(made: Program) -> None:
    x, y = made.given("x", 4, 3), made.given("y", 4, 3)
    names = [made.call(aten.slice.Tensor, made.call(aten.detach.default, x), 0, 0, 2) for _ in range(2)]
    names.append(made.call(aten.view.default, names[0], [-1]))
    others = [made.call(aten.slice.Tensor, x, 0, 2, 4) for _ in range(2)]
    made.call(aten.copy_.default, x, y)
    results = [made.neg(made.gather(node)) for node in (*names, *others)]
    found = changed(made, *results)
    assert len(found.launches) == 2
    assert found.transformed.left == ()


def test_what_was_written_twice_is_another_value_each_time(made: Program, x: fx.Node) -> None:
    alias = made.call(aten.detach.default, x)
    results = []
    for _ in range(2):
        made.call(aten.add_.Tensor, x, 1)
        results += [made.neg(made.gather(alias)) for _ in range(2)]
    found = changed(made, *results)
    assert len(found.launches) == len(found.transformed.done) == 2
    assert len(found.whys) == 1


def test_nodes_that_were_copied_share_a_fake_value_and_no_memory(made: Program, x: fx.Node) -> None:
    """As those are that gather again in backward: what is written to one of them is not in the other."""
    casts = [made.call(aten._to_copy.default, x, dtype=torch.float64)]
    casts.append(made.graph.node_copy(casts[0]))
    made.call(aten.add_.Tensor, casts[0], 1)
    results = [made.neg(made.gather(cast)) for cast in casts]
    found = changed(made, *results)
    assert found.is_same


@pytest.mark.parametrize("is_written", [False, True])
def test_what_the_graph_holds_is_one_value_until_it_is_written(is_written: bool, made: Program) -> None:
    y = made.given("y", 2, 3)
    root = torch.nn.Module()
    root.register_buffer("held", torch.zeros(2, 3))
    results = []
    for number in range(2):
        held = made.graph.create_node("get_attr", "held", (), {})
        held.meta["val"] = y.meta["val"].clone()
        results.append(made.neg(made.gather(held)))
        if is_written and not number:
            made.call(aten.copy_.default, held, y)
    made.graph.output(results)
    found = Changed(fx.GraphModule(root, made.graph), runs=False)
    assert len(found.launches) == 1 + is_written
    assert len(found.whys) == is_written


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_a_result_that_somebody_writes_is_its_own(name: str, written: int, made: Program) -> None:
    x, y = made.given("x", 1, 3), made.given("y", 2, 3)
    waits = [made.gather(x), made.gather(x)]
    WRITES[name](made, waits[written], y)
    found = changed(made, *map(made.neg, waits))
    assert found.is_same
    ((what, why),) = found.transformed.left
    assert what == "all_gather of x (forward)"
    assert why.endswith(" writes its result")
    assert why.startswith("of the one before (all_gather_into_tensor_default): ") == (written == 0)


def test_of_three_the_one_whose_result_is_written_stays_and_the_others_are_one(made: Program) -> None:
    x = made.given("x", 1, 3)
    waits = [made.gather(x) for _ in range(3)]
    made.call(aten.add_.Tensor, made.call(aten.view.default, waits[0], [-1]), 1)
    found = changed(made, *map(made.neg, waits))
    assert found.launches == [GATHER, f"{GATHER}_1"]
    assert found.transformed.done == ("all_gather of x (forward): 2 launches are 1",)


def test_a_write_in_flight_leaves_both_alone(made: Program, x: fx.Node) -> None:
    first = made.launch_gather(x)
    again = made.launch_gather(x)
    result = made.neg(made.wait(again))
    made.call(aten.zero_.default, x)
    found = changed(made, result, made.neg(made.wait(first)), runs=False)
    assert found.is_same
    assert found.whys == [
        f"of the one before ({GATHER}): zero__default (aten.zero_.default) writes what it sends before its wait"
    ]


def test_what_says_nothing_of_what_it_writes_counts_as_a_write(made: Program) -> None:
    x, y = made.shards("xy")
    first = made.neg(made.gather(x))
    barrier = made.graph.call_function(torch._foreach_neg, ([y],))
    barrier.meta["val"] = [y.meta["val"]]
    found = changed(made, first, made.neg(made.gather(x)), runs=False)
    assert found.is_same
    ((_, why),) = found.transformed.left
    assert why.endswith(" may write what it sends, between the one before (all_gather_into_tensor_default) and it")


Form = Callable[[Program, fx.Node], fx.Node]
FORMS: dict[str, tuple[Form, str]] = {
    "in place": (lambda m, x: m.call(c10d.all_reduce_.default, m.call(aten.clone.default, x), "sum", "0"), "it works in place"),
    "read early": (lambda m, x: _early(m, x), "neg_default_1 reads it before its wait"),
    "never awaited": (lambda m, x: m.launch_all_reduce(x), "nobody waits for it, or for a part of it"),
}


def _early(made: Program, x: fx.Node) -> fx.Node:
    launch = made.launch_all_reduce(x)
    made.neg(launch)
    return made.wait(launch)


@pytest.mark.parametrize("name", list(FORMS))
def test_other_forms_of_a_launch_are_left_alone_and_say_why(name: str, made: Program, x: fx.Node) -> None:
    make, why = FORMS[name]
    first = made.neg(made.all_reduce(x))
    result = make(made, x)
    result = made.wait(result) if name == "in place" else result
    returned: Sequence[fx.Node] = [first] if name == "never awaited" else [first, made.neg(result)]
    found = changed(made, *returned, runs=False)
    assert found.is_same
    assert found.whys == [why]


def test_gathers_into_given_buffers_are_left_alone(made: Program, x: fx.Node) -> None:
    results = [made.neg(made.gather(x)), *(made.neg(made.gather_into(x, made.buffer_for(x))) for _ in range(2))]
    found = changed(made, *results, runs=False)
    assert found.is_same
    assert found.whys == ["it fills a buffer that it is given"] * 2
