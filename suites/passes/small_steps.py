"""Training steps written by hand, node by node, with integers for numbers: layers of a weight and a bias, sharded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from suites.passes.programs import SGD, Program, aten
from suites.passes.rank_jobs_of_passes import Groups


@dataclass
class Layer:
    """One layer: its shards, and its input once it ran."""

    name: str
    weight: fx.Node
    bias: fx.Node
    x: list[fx.Node] = field(default_factory=list)


class Step(Program):
    """A step under construction. The width of every layer is twice the number of ranks."""

    def __init__(self, world: int, layers: int = 3, groups: Groups | None = None, cast: torch.dtype | None = None) -> None:
        super().__init__(world, groups)
        self.width, self.cast = 2 * world, cast
        self.layers = [Layer(f"layers.{i}", self.given(f"w{i}", 2, self.width), self.given(f"b{i}", 2)) for i in range(layers)]
        self.x = self.given("x", 4, self.width)
        self.gradients: dict[fx.Node, fx.Node] = {}

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    def small(self, node: fx.Node) -> fx.Node:
        """``node`` as integers from 0 to 4."""
        return self.call(aten.remainder.Scalar, node, 5)

    def whole(self, shard: fx.Node) -> fx.Node:
        return self.gather(shard if self.cast is None else self.call(aten._to_copy.default, shard, dtype=self.cast))

    def product(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.small(self.call(aten.mm.default, a, b))

    def run(self, layer: Layer, x: fx.Node) -> fx.Node:
        """Forward of ``layer``."""
        self.module = layer.name
        layer.x.append(x)
        weight = self.call(aten.t.default, self.whole(layer.weight))
        return self.small(self.add(self.product(x, weight), self.whole(layer.bias)))

    def back(self, layer: Layer, gradient: fx.Node, x: fx.Node | None = None) -> fx.Node:
        """Backward of ``layer``: reduces its gradients, and gives that of its input. The weight is gathered again."""
        self.backward, self.module = True, layer.name
        x = x or layer.x.pop()
        self.give(layer.bias, self.call(aten.sum.dim_IntList, gradient, [0]))
        before = self.product(gradient, self.whole(layer.weight))
        self.give(layer.weight, self.product(self.call(aten.t.default, gradient), x))
        return before

    def give(self, shard: fx.Node, gradient: fx.Node) -> None:
        """Reduce a gradient, and add it to what the shard has."""
        if self.cast is not None:
            gradient = self.call(aten._to_copy.default, gradient, dtype=torch.float32)
        reduced = self.reduced(gradient)
        known = self.gradients.get(shard)
        self.gradients[shard] = reduced if known is None else self.add(known, reduced)

    def reduced(self, gradient: fx.Node) -> fx.Node:
        return self.reduce(gradient, "avg")

    def start(self) -> fx.Node:
        """The batch, in the dtype that is computed in."""
        return self.x if self.cast is None else self.call(aten._to_copy.default, self.x, dtype=self.cast)

    def forward(self, x: fx.Node | None = None) -> fx.Node:
        x = x or self.start()
        for layer in self.layers:
            x = self.run(layer, x)
        return x

    def backwards(self, y: fx.Node) -> None:
        """Backward of all layers, from a gradient made of the output."""
        self.backward = True
        gradient = self.small(self.neg(y))
        for layer in reversed(self.layers):
            gradient = self.back(layer, gradient)

    def updates(self) -> None:
        """An optimizer that writes the shards in place, and returns nothing."""
        shards = list(self.gradients)
        self.call(aten._fused_sgd_.default, shards, [self.gradients[shard] for shard in shards], [], **SGD)
