"""A model of two dtypes and a packer of its own, for the keys that need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem

import torch
from torch import Tensor, fx, nn

from fixtures.models import traced
from pytest_fxbucket.capture import StepGraph
from pytest_fxbucket.capture.given_graphs import TracedStep
from pytest_fxbucket.passes import packers
from pytest_fxbucket.passes.new_nodes import NodeMaker
from pytest_fxbucket.passes.packers import Packing, Unpack
from suites.checks.bitwise_models import WIDTH, Mlp, batch


class Halved(nn.Linear):
    """Computes in bfloat16 what comes in and goes out as float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


def of_two_dtypes(used: float = 1.0) -> Mlp:
    """``down`` has bfloat16 parameters, ``scale`` and ``up`` have float32."""
    model = Mlp(used)
    model.down = Halved(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    return model


class Shifted(Mlp):
    """Adds a second input to the first."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return super().forward(x if shift is None else x + shift)


def shifted(used: float = 1.0) -> Mlp:
    return Shifted(used)


def two_inputs(rank: int, step: int) -> tuple[Tensor, Tensor]:
    (x,) = batch(rank, step)
    return x, x.abs()


def scaled(module: nn.Module, by: float = 1.0) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
    """A sub-graph for ``scale``."""
    return lambda tensors, x: x * tensors["weight"] * by


def unmoved() -> TracedStep:
    """A traced step whose first gradient is zero."""
    found = traced.step()
    graph = found.graphs["joint"].graph
    loss, first, *others = graph.output_node().args[0]
    with graph.inserting_before(graph.output_node()):
        zero = graph.call_function(torch.ops.aten.mul.Tensor, (first, 0.0))
    zero.meta = dict(first.meta)
    graph.output_node().args = ([loss, zero, *others],)
    found.graphs["joint"].recompile()
    return found


def trainer(mesh: Mapping[str, int], word: str = "nothing") -> None:
    """No trainer."""
    raise ValueError(f"a trainer of {word}")


def turned(module: nn.Module, x: Tensor) -> Tensor:
    """Promises other strides than those of its input."""
    return torch.empty_like(x.T.contiguous()).T


def joined(make: NodeMaker, bucket: Packing) -> tuple[fx.Node, Unpack]:
    """Gathers are packed by ``cat`` of views; anything else as by default."""
    if bucket.kind != "all_gather":
        return packers.pack(make, bucket)
    aten = torch.ops.aten
    parts = [make(aten.reshape.default, tensor, [-1]) for tensor in bucket.inputs]

    def unpack(arrived: fx.Node) -> list[fx.Node]:
        rows = make(aten.view.default, arrived, [bucket.ranks, -1])
        pieces = make(aten.split_with_sizes_copy.default, rows, list(bucket.numels), 1)
        found = [make(getitem, pieces, i) for i in range(len(bucket.inputs))]
        return [make(aten.view.default, part, list(shape)) for part, shape in zip(found, bucket.shapes, strict=True)]

    return make(aten.cat.default, parts), unpack


def doubled(step: StepGraph, state: dict[str, Tensor], factor: float = 2.0) -> StepGraph:
    """A transformation that gives another loss."""
    graph = step.graphs["joint"].graph
    output = graph.output_node()
    loss, *others = output.args[0]  # type: ignore[misc]  # a list of nodes
    with graph.inserting_before(output):
        more = graph.call_function(torch.ops.aten.mul.Tensor, (loss, factor))
        more.meta["val"] = loss.meta["val"]
    output.args = ([more, *others],)
    return step


def a_second_each(node: fx.Node) -> float:
    """A cost model of a plan's own."""
    return 1.0
