"""Which launches are taken to bring the same, and which are not: by what they send and by what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.fuzz.program import Program, aten, c10d
from suites.transforms.duplicates import changed

BF16 = torch.bfloat16
Way = Callable[[Program, fx.Node], fx.Node]


def _half(made: Program, x: fx.Node) -> fx.Node:
    return made.call(aten._to_copy.default, x, dtype=BF16)


SAME: dict[str, tuple[Way, Way]] = {
    "the same node": (lambda m, x: x, lambda m, x: x),
    "detach": (lambda m, x: x, lambda m, x: m.call(aten.detach.default, x)),
    "alias of detach": (
        lambda m, x: m.call(aten.detach.default, x),
        lambda m, x: m.call(aten.alias.default, m.call(aten.detach.default, x)),
    ),
    "view and back": (lambda m, x: x, lambda m, x: m.call(aten.view.default, m.call(aten.view.default, x, [-1]), [2, 3])),
    "views of one shape": (
        lambda m, x: m.call(aten.view.default, x, [3, 2]),
        lambda m, x: m.call(aten.reshape.default, x, [3, 2]),
    ),
    "another shape": (
        lambda m, x: x,
        lambda m, x: m.call(aten.view.default, m.call(aten.detach.default, x), [-1]),
    ),
    "one more dimension": (lambda m, x: m.call(aten.unsqueeze.default, x, 1), lambda m, x: x),
    "clone": (lambda m, x: m.call(aten.clone.default, x), lambda m, x: m.call(aten.contiguous.default, x)),
    "two casts": (lambda m, x: _half(m, x), lambda m, x: _half(m, x)),
    "two operators that cast": (
        lambda m, x: _half(m, x),
        lambda m, x: m.call(torch.ops.prims.convert_element_type.default, x, BF16),
    ),
    "cast of a view, view of a cast": (
        lambda m, x: _half(m, m.call(aten.view.default, x, [6])),
        lambda m, x: m.call(aten.view.default, _half(m, x), [-1]),
    ),
    "a cast to its own dtype": (lambda m, x: x, lambda m, x: m.call(aten._to_copy.default, x, dtype=torch.float32)),
    "one part": (
        lambda m, x: m.call(aten.slice.Tensor, x, 0, 0, 1),
        lambda m, x: m.call(aten.slice.Tensor, m.call(aten.detach.default, x), 0, 0, 1, 1),
    ),
    "compute element by element": (
        lambda m, x: m.call(aten.mul.Tensor, m.call(aten.exp.default, x), 2.0),
        lambda m, x: m.call(aten.mul.Tensor, m.call(aten.exp.default, m.call(aten.detach.default, x)), 2.0),
    ),
    "behind other waits": (lambda m, x: m.gather(x), lambda m, x: m.gather(m.call(aten.detach.default, x))),
    "strides that no launch sees": (
        lambda m, x: m.call(aten.t.default, m.call(aten.view.default, x, [3, 2])),
        lambda m, x: m.call(aten.contiguous.default, m.call(aten.t.default, m.call(aten.view.default, x, [3, 2]))),
    ),
}


@pytest.mark.parametrize("name", list(SAME))
@pytest.mark.parametrize("kind", ["gather", "reduce", "all_reduce"])
def test_the_same_value_behind_any_chain_is_launched_once(name: str, kind: str, made: Program, x: fx.Node) -> None:
    ways = [way(made, x) for way in SAME[name]]
    if kind == "reduce" and ways[0].meta["val"].shape[0] % 2:
        ways = [made.call(aten.cat.default, [way, way]) for way in ways]
    results = [made.neg(getattr(made, kind)(way)) for way in ways]
    found = changed(made, *results)
    assert len(found.launches) == (1 if name != "behind other waits" else 2)
    assert all(text.endswith(": 2 launches are 1") for text in found.transformed.done)
    assert len(found.transformed.done) == len(found.launches)
    assert found.transformed.left == ()


Launches = tuple[fx.Node, fx.Node]


def _exchanged(made: Program, x: fx.Node, *sizes: list[int]) -> fx.Node:
    return made.call(c10d.all_to_all_single.default, x, *sizes, "0")


def _strided(made: Program, x: fx.Node) -> fx.Node:
    return made.launch_gather(made.call(aten.as_strided.default, x, [2], [1], 2))


def _of(operator: Any, *args: Any) -> Callable[[Program, fx.Node], fx.Node]:
    return lambda made, x: made.launch_gather(made.call(operator, x, *args))


OTHERS: dict[str, Callable[[Program, fx.Node], Launches]] = {
    "value": lambda m, x: (m.launch_gather(x), m.launch_gather(m.given("y", 2, 3))),
    "dtype": lambda m, x: (m.launch_gather(x), _of(torch.ops.prims.convert_element_type.default, BF16)(m, x)),
    "bits": lambda m, x: (m.launch_gather(x), _of(aten.view.dtype, torch.int32)(m, x)),
    "kind": lambda m, x: (m.launch_reduce(x), m.launch_all_reduce(x)),
    "op": lambda m, x: (m.launch_reduce(x, "sum"), m.launch_reduce(x, "avg")),
    "op of all": lambda m, x: (m.launch_all_reduce(x, "sum"), m.launch_all_reduce(x, "max")),
    "group": lambda m, x: (m.launch_gather(x), m.launch_gather(x, "again")),
    "order": lambda m, x: (m.launch_gather(x), _of(aten.flip.default, [0])(m, x)),
    "source": lambda m, x: (m.call(c10d.broadcast.default, x, 0, "0"), m.call(c10d.broadcast.default, x, 1, "0")),
    "parts": lambda m, x: (_exchanged(m, x, [1, 1], [1, 1]), _exchanged(m, x, [2, 0], [1, 1])),
    "drawn": lambda m, x: (_of(aten.rand_like.default)(m, x), _of(aten.rand_like.default)(m, x)),
    "undefined": lambda m, x: (_of(aten.empty_like.default)(m, x), _of(aten.empty_like.default)(m, x)),
    "zero": lambda m, x: (_of(aten.mul.Tensor, 0.0)(m, x), _of(aten.mul.Tensor, -0.0)(m, x)),
    "memory": lambda m, x: (_strided(m, x), _strided(m, m.call(aten.clone.default, x))),
    "strides": lambda m, x: (
        _of(aten.exp.default)(m, m.call(aten.t.default, x)),
        _of(aten.exp.default)(m, m.call(aten.clone.default, m.call(aten.t.default, x), memory_format=torch.contiguous_format)),
    ),
    "sums": lambda m, x: (_of(aten.cumsum.default, 0)(m, x), _of(aten.cumsum.default, 0)(m, x)),
}
"""Two launches that differ in one thing; the last in nothing, but sums are not taken to be the same each time. Nor is what goes
element by element in another order of memory: some of it is computed several at once, and other bits come out."""


@pytest.mark.parametrize("what", list(OTHERS))
def test_what_differs_in_anything_is_launched_twice_without_a_word(what: str) -> None:
    made = Program(2, {"again": [[0, 1]]})
    wanted = OTHERS[what](made, made.given("x", 2, 3))
    found = changed(made, *(made.neg(made.wait(launch)) for launch in wanted), runs=False)
    assert found.is_same
    assert (found.transformed.left, found.transformed.done) == ((), ())
