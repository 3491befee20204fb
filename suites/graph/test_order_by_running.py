"""Small random programs full of writes, run in many orders that `before` allows: every one must give what the program gives.

A collective in flight may read its input, and write its buffer, at any time between launch and wait. So each order is run with
all of that done at the launch, and with all of it done at the wait. Programs for which these two differ are racy, and left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.fuzz.lockstep import run
from pytest_fxbucket.graph.order import Order, order_of

aten, c10d = torch.ops.aten, c10d_functional()
PROGRAMS, STEPS, ORDERS = 60, 14, 3


class Drawn:
    """A random program on 2x2 integers; ``hidden`` pairs of inputs are one storage, told by fake values alone."""

    def __init__(self, seed: int, fake: bool) -> None:
        self.random, self.graph, self.fake = random.Random(seed), fx.Graph(), fake
        self.mode = FakeTensorMode()
        self.given = [self.graph.placeholder(name) for name in "abc"]
        with self.mode:
            values = arguments(fake)
        for node, value in zip(self.given, values, strict=True):
            self.note(node, value)
        self.values, self.flying = list(self.given), []
        for _ in range(STEPS):
            self.random.choice([self.view, self.write, self.write, self.compute, self.launch, self.land])()
        while self.flying:
            self.land()
        self.graph.output([*self.random.sample(self.values, min(4, len(self.values))), *self.given[:1]])
        self.graph.lint()

    def note(self, node: fx.Node, value: object) -> None:
        if self.fake:
            node.meta["val"] = value

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        if self.fake:
            values, keywords = (torch.fx.node.map_arg(a, lambda n: n.meta["val"]) for a in (args, kwargs))
            with self.mode:
                self.note(node, target(*values, **keywords))
        return node

    def pick(self) -> fx.Node:
        return self.random.choice(self.values)

    def view(self) -> None:
        node = self.pick()
        kind = self.random.randrange(4)
        if kind == 0:
            self.values.append(self.call(aten.t.default, node))
        elif kind == 1:
            flat = self.call(aten.reshape.default, self.call(aten.t.default, node), [4])
            self.values.append(self.call(aten._unsafe_view.default, flat, [2, 2]))
        elif kind == 2:
            parts = self.call(aten.split.Tensor, node, 1)
            self.call(aten.mul_.Scalar, self.call(getitem, parts, self.random.randrange(2)), 5)
        else:
            row = self.call(aten.select.int, node, 0, self.random.randrange(2))
            self.call(aten.mul_.Scalar, row, 3)

    def write(self) -> None:
        """What is added or copied is a clone: torch refuses arguments that overlap in part."""
        one, other = self.pick(), self.call(aten.clone.default, self.pick())
        kind = self.random.randrange(5)
        if kind == 0:
            self.values.append(self.call(aten.add_.Tensor, one, other))
        elif kind == 1:
            self.call(aten.copy_.default, one, other)
        elif kind == 2:
            self.call(aten.add.out, other, other, out=one)
        elif kind == 3:
            self.call(aten._foreach_add_.List, [one, other], [other, other])
        else:
            self.call(aten.fill_.Scalar, self.call(aten.select.int, one, 1, 0), self.random.randrange(9))

    def compute(self) -> None:
        self.values.append(self.call(aten.sub.Tensor, self.pick(), self.pick()))

    def launch(self) -> None:
        kind = self.random.randrange(3)
        if kind == 0:
            launch = self.call(c10d.all_reduce.default, self.pick(), "sum", "0")
        elif kind == 1:
            launch = self.call(c10d.all_reduce_.default, self.pick(), "sum", "0")
        else:
            launch = self.call(c10d.all_gather_into_tensor_out.default, self.pick(), 1, "alone", out=self.pick())
        self.flying += [launch] * self.random.choice([1, 1, 2])

    def land(self) -> None:
        if self.flying:
            launch = self.flying.pop(self.random.randrange(len(self.flying)))
            self.values.append(self.call(c10d.wait_tensor.default, launch))


def arguments(hidden: bool) -> list[Tensor]:
    a, b = torch.arange(4).view(2, 2), torch.arange(10, 14).view(2, 2)
    return [a, b, a.t() if hidden else torch.arange(20, 24).view(2, 2)]


def result(nodes: Sequence[fx.Node], hidden: bool, late: bool) -> Any:
    """On two ranks that are given the same, so that a sum is twice of it; a gather is a copy."""
    groups = {"alone": [[0], [1]]}
    first, second = run(nodes, [arguments(hidden) for _ in range(2)], groups, late=late)[nodes[-1]]
    assert list(map(torch.equal, first, second)) == [True] * len(first)
    return [value.tolist() for value in first]


def shuffled(order: Order, choose: Callable[[list[int]], int]) -> list[fx.Node]:
    """An order that `before` allows; inputs first and the output last, as a graph has them."""
    missing = [len(before) for before in order.before]
    after: list[list[int]] = [[] for _ in order.nodes]
    for i, before in enumerate(order.before):
        for earlier in before:
            after[earlier].append(i)
    ready, found = [i for i, count in enumerate(missing) if not count], []
    last = len(order.nodes) - 1
    while ready:
        inputs = [i for i in ready if order.nodes[i].op == "placeholder"][:1]
        i = inputs[0] if inputs else choose([i for i in ready if i != last] or ready)
        ready.remove(i)
        found.append(order.nodes[i])
        for user in after[i]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    assert len(found) == len(order.nodes)
    return found


@pytest.mark.parametrize("fake", [True, False], ids=["fake values", "no fake values"])
def test_every_order_that_keeps_before_gives_what_the_program_gives(fake: bool) -> None:
    checked = moved = 0
    for seed in range(10 * PROGRAMS):
        if checked == PROGRAMS:
            break
        graph = Drawn(seed, fake).graph
        expected = result(list(graph.nodes), fake, late=False)
        if expected != result(list(graph.nodes), fake, late=True):
            continue
        checked += 1
        order, draw = order_of(graph), random.Random(seed)
        for choose in (max, *[draw.choice] * ORDERS):
            nodes = shuffled(order, choose)
            moved += nodes != list(order.nodes)
            for late in (False, True):
                assert result(nodes, fake, late) == expected, f"program {seed}:\n{graph}\nin order {nodes}"
    assert checked == PROGRAMS
    assert moved > checked
