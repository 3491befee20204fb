"""Small graphs on which our pass and torch's part; each function gives what its graph returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from pytest_fxbucket.fuzz.program import Program, aten

Build = Callable[[Program], list[fx.Node]]


def buffer_read_elsewhere(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    buffer, other = made.buffer_for(p), made.buffer_for(q)
    first, second = made.gather_into(p, buffer), made.gather_into(q, other)
    return [made.neg(first), made.neg(second), made.neg(buffer)]


def written_between(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    first = made.gather(p)
    made.call(aten.mul_.Tensor, q, 2.0)
    return [made.neg(first), made.neg(made.gather(q))]


def alias_written_between(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    alias = made.call(aten.view.default, q, [-1])
    first = made.gather(p)
    made.call(aten.mul_.Tensor, alias, 2.0)
    return [made.neg(first), made.neg(made.gather(q))]


def gradient_overwritten(made: Program) -> list[fx.Node]:
    x, y = made.fulls("xy")
    gradient = made.neg(x)
    first = made.reduce(gradient)
    made.call(aten.mul_.Tensor, gradient, 0.0)
    return [first, made.reduce(y)]


def reduced_twice(made: Program) -> list[fx.Node]:
    x, y = made.given("x", 8, 3), made.given("y", 4, 3)
    return [made.reduce(made.reduce(x)), made.reduce(y)]


def gathered_twice(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    return [made.neg(made.gather(made.gather(p))), made.neg(made.gather(q))]


def scattered_then_reduced(made: Program) -> list[fx.Node]:
    x, y = made.fulls("xy", "halves")
    return [made.all_reduce(made.reduce(g, "sum", "halves"), "sum", "strided") for g in (x, y)]


def gathered_on_two_groups(made: Program) -> list[fx.Node]:
    return [made.neg(made.gather(made.gather(p, "halves"), "strided")) for p in made.shards("pq")]


def nested_the_other_way(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    first = made.gather(made.gather(p, "halves"), "strided")
    second = made.gather(made.gather(q, "strided"), "halves")
    return [made.neg(first), made.neg(second)]


def read_early(made: Program) -> list[fx.Node]:
    x, y = made.fulls("xy")
    read = made.neg(made.reduce(x))
    return [read, made.reduce(made.neg(y))]


def two_waits(made: Program) -> list[fx.Node]:
    p, q = made.shards("pq")
    launch = made.launch_gather(p)
    return [made.neg(made.wait(launch)), made.neg(made.wait(launch)), made.neg(made.gather(q))]


def coalesced_before(made: Program) -> list[fx.Node]:
    p, q, r = made.shards("pqr")
    return [*map(made.neg, made.coalesced("all_gather", [p, q])), made.neg(made.gather(r))]


def odd_counts(made: Program) -> list[fx.Node]:
    p, q = made.given("p", 1, 3, dtype=torch.bfloat16), made.given("q", 1, 3)
    return [made.neg(made.gather(p)), made.neg(made.gather(q))]


def gathers(made: Program) -> list[fx.Node]:
    return [made.neg(made.gather(p)) for p in made.shards("pq")]


def gathers_without_names(made: Program) -> list[fx.Node]:
    nodes = gathers(made)
    for node in made.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    return nodes


def in_module(name: str) -> Build:
    def build(made: Program) -> list[fx.Node]:
        made.module = name
        return gathers(made)

    return build


def gradients_all_reduced(made: Program) -> list[fx.Node]:
    made.backward = True
    return [made.all_reduce(made.neg(x)) for x in made.shards("xy")]


def gradients_to_an_optimizer(made: Program) -> list[fx.Node]:
    made.backward = True
    x, y, p, q = *made.fulls("xy"), *made.shards("pq")
    return [made.call(aten.add.Tensor, p, made.reduce(g), alpha=-0.5) for g, p in ((x, p), (y, q))]


def gradients_added(made: Program) -> list[fx.Node]:
    made.backward = True
    u, v, x, y = made.fulls("uvxy")
    return [made.add(made.reduce(u), made.reduce(v)), made.add(made.reduce(x), made.reduce(y))]


def both_directions(made: Program) -> list[fx.Node]:
    x, p, q = made.given("x", 2 * made.world, 3), *made.shards("pq")
    for shard in (p, q):
        x = made.call(aten.mul.Tensor, x, made.gather(shard))
    made.backward = True
    for shard in (q, p):
        x = made.call(aten.mul.Tensor, x, made.gather(shard))
    return [x]


def two_layers(made: Program) -> list[fx.Node]:
    x = made.given("x", 2 * made.world, 3)
    for layer, shards in enumerate(("pq", "rs")):
        made.module = f"layers.{layer}"
        for shard in made.shards(shards):
            x = made.call(aten.mul.Tensor, x, made.gather(shard))
    return [x]
