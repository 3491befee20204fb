"""Training steps of every parallel mode, traced with make_fx from a few lines, with roles.

A model of equal layers, relu(x @ weight + bias), sharded by hand: what a capture would give, without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from pytest_fxbucket.capture.reshard import gather_again_in_backward
from pytest_fxbucket.checks.promises.expectations import Expectations
from pytest_fxbucket.checks.promises.kept import audit
from pytest_fxbucket.compat.c10d import c10d_functional
from pytest_fxbucket.fuzz.program import HALVES, Groups, copied, fake_groups
from pytest_fxbucket.golden.schedule import schedule_of
from pytest_fxbucket.golden.text import schedule_lines
from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.graph.walks import ancestors
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.targets import Targets, by_parameter
from pytest_fxbucket.step.roles import Value
from suites.checks.promising import promise_by
from suites.passes.programs import Passed

WORLD, SHARD, REPLICATE = "0", "halves", "strided"
WIDTH, ROWS = 8, 4
Reduction = tuple[str, str, str]
"""Kind, operation and process group."""


@dataclass(frozen=True)
class Way:
    """How parameters travel: gathered over a group (none: whole already), gradients reduced one way after the other."""

    gather: str = ""
    reductions: tuple[Reduction, ...] = ()


FULLY = Way(WORLD, (("reduce_scatter", "avg", WORLD),))
DDP = Way("", (("all_reduce", "avg", WORLD),))
SCATTER_FIRST = Way(SHARD, (("reduce_scatter", "sum", SHARD), ("all_reduce", "avg", REPLICATE)))
REPLICATE_FIRST = Way(SHARD, (("all_reduce", "sum", REPLICATE), ("reduce_scatter", "avg", SHARD)))


@dataclass(frozen=True)
class Step:
    """What is traced."""

    way: Way = FULLY
    world: int = 2
    layers: int = 3
    microbatches: int = 1
    frozen: frozenset[str] = frozenset()
    recompute: bool = False
    """Every layer's forward runs again in backward."""
    reshard: bool = True
    ways: tuple[tuple[str, Way], ...] = ()
    """Of parameters that travel another way."""
    activations: str = ""
    """Process group on which each layer's output is summed, as tensor parallelism does."""
    scaled: bool = False
    """What each reduction brought is divided by two."""

    @property
    def groups(self) -> Groups:
        return HALVES.get(self.world, {})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"layers.{i}.{n}": s for i in range(self.layers) for n, s in (("w", (WIDTH, WIDTH)), ("b", (WIDTH,)))}

    @property
    def trainable(self) -> list[str]:
        return [fqn for fqn in self.shapes if fqn not in self.frozen]

    def way_of(self, fqn: str) -> Way:
        return dict(self.ways).get(fqn, self.way)

    def ranks(self, group: str) -> int:
        return len(self.groups[group][0]) if group in self.groups else self.world

    def shard_shape(self, fqn: str) -> tuple[int, ...]:
        rows, *rest = self.shapes[fqn]
        gather = self.way_of(fqn).gather
        return (rows // self.ranks(gather) if gather else rows, *rest)


class _Whole(torch.autograd.Function):
    """A shard made whole; in backward its gradient, added to that of earlier microbatches, is reduced in the last one."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, run: _Run, fqn: str) -> Tensor:
        ctx.run, ctx.fqn = run, fqn
        return run.gathered(shard, run.step.way_of(fqn).gather)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.run.accumulated(ctx.fqn, gradient), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        c10d = c10d_functional()
        return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Run:
    """One trace of a step."""

    def __init__(self, step: Step) -> None:
        self.step, self.sums, self.last = step, dict[str, Tensor](), False

    def gathered(self, shard: Tensor, group: str) -> Tensor:
        c10d = c10d_functional()
        if not group:
            return shard.view_as(shard)
        return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, self.step.ranks(group), group))

    def accumulated(self, fqn: str, gradient: Tensor) -> Tensor | None:
        total = self.sums[fqn] + gradient if fqn in self.sums else gradient
        self.sums[fqn] = total
        if not self.last:
            return None
        for kind, op, group in self.step.way_of(fqn).reductions:
            total = self._reduced(total, kind, op, group)
            total = total / 2 if self.step.scaled else total
        return total

    def _reduced(self, tensor: Tensor, kind: str, op: str, group: str) -> Tensor:
        c10d = c10d_functional()
        if kind == "all_reduce":
            return c10d.wait_tensor(c10d.all_reduce(tensor, op, group))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(tensor, op, self.step.ranks(group), group))

    def forward(self, shards: Mapping[str, Tensor], x: Tensor) -> Tensor:
        for i in range(self.step.layers):
            whole = [self._whole(f"layers.{i}.{name}", shards) for name in "wb"]
            if self.step.recompute:
                x = checkpoint(self._layer, x, *whole, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._layer(x, *whole)
        return x.sum()

    def _whole(self, fqn: str, shards: Mapping[str, Tensor]) -> Tensor:
        whole: Tensor = _Whole.apply(shards[fqn], self, fqn)
        return whole

    def _layer(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = x @ weight
        if self.step.activations:
            y = _Summed.apply(y, self.step.activations)
        return torch.relu(y + bias)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        shards = dict(zip(self.step.shapes, inputs, strict=False))
        trainable = [shards[fqn] for fqn in self.step.trainable]
        losses = []
        for number, x in enumerate(inputs[len(shards) :], 1):
            self.last = number == self.step.microbatches
            losses.append(self.forward(shards, x))
            gradients = torch.autograd.grad(losses[-1], trainable, allow_unused=True)
        return [sum(losses[1:], losses[0]), *(gradient for gradient in gradients if gradient is not None)]


@dataclass
class Traced:
    """A step's graph, and what its inputs and outputs are."""

    step: Step
    graph_module: fx.GraphModule
    inputs: list[Value]
    outputs: list[Value]

    @property
    def entry_of(self) -> dict[str, str]:
        return {fqn: fqn.rpartition(".")[0] for fqn in self.step.shapes}

    def text(self, graph: fx.Graph | None = None) -> list[str]:
        """Lines of the schedule as goldens have them, nothing folded."""
        dims = {WORLD: "world", SHARD: "dp_shard", REPLICATE: "dp_replicate"}
        return schedule_lines(schedule_of(self.read(graph), self.entry_of, dims), folded=False)

    def read(self, graph: fx.Graph | None = None) -> GraphAnalysis:
        return read_graph(graph or self.graph_module.graph, self.inputs, self.outputs)

    def passed(self, breaking: Callable[[Targets], Targets] = lambda targets: targets, **options: Any) -> Passed:
        """The graph through our pass, given what ``breaking`` makes of its targets."""
        after = copied(self.graph_module)
        with fake_groups(self.step.world, self.step.groups):
            targets = breaking(by_parameter(after.graph, self.read(), self.inputs, self.entry_of))
            report = ManualPass.of(**options).run(after.graph, targets)
        after.recompile()
        return Passed(self.graph_module, after, report)

    def problems(self, after: fx.GraphModule, **promised: Any) -> list[str]:
        """What the audit says of ``after``."""
        return audit(self.promise(**promised), self.read(), self.read(after.graph))

    def promise(self, **change: Any) -> Expectations:
        dtypes = dict.fromkeys(self.step.shapes, torch.float32)
        registration = tuple(self.step.shapes)
        plain = {"registration": registration, "reshard_after_forward": self.step.reshard}
        return promise_by(self.entry_of, dtypes, **{**plain, **change})


def traced(step: Step) -> Traced:
    """``step``, traced on fake process groups as rank 0."""
    shards = [torch.zeros(step.shard_shape(f), requires_grad=f not in step.frozen) for f in step.shapes]
    batches = [torch.zeros(ROWS, WIDTH) for _ in range(step.microbatches)]
    with fake_groups(step.world, step.groups):
        graph_module = make_fx(_Run(step), tracing_mode="fake")(*shards, *batches)
    inputs = [Value("param", fqn, step.shard_shape(fqn), torch.float32) for fqn in step.shapes]
    inputs += [Value("batch", f"[{i}]", (ROWS, WIDTH), torch.float32) for i in range(step.microbatches)]
    outputs = [Value("loss", "", (), torch.float32)]
    outputs += [Value("grad", fqn, step.shard_shape(fqn), torch.float32) for fqn in step.trainable]
    _mark_backward(graph_module.graph)
    if step.reshard:
        gather_again_in_backward(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return Traced(step, graph_module, inputs, outputs)


def _mark_backward(graph: fx.Graph) -> None:
    """Marks that tracers leave."""
    loss = graph.output_node().args[0][0]  # type: ignore[index]
    forward = ancestors([loss])  # type: ignore[list-item]
    for node in graph.nodes:
        if node.op == "call_function" and node not in forward:
            node.meta["autograd_backward"] = True
