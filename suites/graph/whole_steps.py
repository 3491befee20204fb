"""Whole steps written by hand: layers of two parameters, gathered, run, gathered again, reduced, and updated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Literal

from torch import fx

from pytest_fxbucket.graph.buckets import GraphAnalysis
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.passes.targets import by_parameter
from pytest_fxbucket.step.roles import Value
from suites.graph.handmade import Handmade, aten

Kind = Literal["fused", "foreach", "plain", "in_place"]
ADAMW = {
    "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False,
}  # fmt: skip


@dataclass
class Held:
    """A parameter's shard, and the state that an optimizer has for it."""

    fqn: str
    shard: fx.Node
    state: dict[str, fx.Node] = field(default_factory=dict)
    gradient: fx.Node | None = None


class WholeStep(Handmade):
    """Parameters ``<layer>.w`` and ``<layer>.b`` of each layer. ``kind`` is the form of the update."""

    def __init__(self, layers: str = "abc", kind: Kind = "foreach", *, by_entry: bool = True, clips: bool = False) -> None:
        super().__init__()
        self.layers, self.kind = layers, kind
        self.held = [Held(f"{layer}.{name}", self.param(f"{layer}.{name}", 4)) for layer in layers for name in "wb"]
        for one in self.held:
            one.state = {key: self.given("state", f"{one.fqn}.{key}", *shape) for key, shape in self._state().items()}
        self.lr = self.given("hyper", "optimizers.0.groups.0.lr")
        self.x = self.batch(8)
        self.forward()
        for layer in reversed(layers):
            self.backward(layer)
        groups = [self.of(layer) for layer in layers] if by_entry else [self.held]
        scale = self.norm() if clips else None
        for group in groups:
            self.update(group, scale)

    def _state(self) -> dict[str, tuple[int, ...]]:
        adam: dict[str, tuple[int, ...]] = {"exp_avg": (4,), "exp_avg_sq": (4,), "step": ()}
        return adam if self.kind in ("fused", "in_place") else {"momentum": (4,)}

    def of(self, layer: str) -> list[Held]:
        return [one for one in self.held if one.fqn.startswith(f"{layer}.")]

    def forward(self) -> None:
        x = self.x
        for layer in self.layers:
            for one in self.of(layer):
                x = self.call(aten.mul.Tensor, x, self.gathered(one.shard))
        self.loss(x)

    def backward(self, layer: str) -> None:
        for one in reversed(self.of(layer)):
            self.x = self.call(aten.mul.Tensor, self.x, self.gathered(one.shard))
            one.gradient = self.reduced(self.call(aten.mul.Tensor, self.x, 2.0))
            self.returns(one.gradient, "grad", one.fqn)

    def norm(self) -> fx.Node:
        """A scale by the global norm, with an all-reduce of one element."""
        norms = self.call(aten._foreach_norm.Scalar, [one.gradient for one in self.held])
        parts = [self.part(norms, i) for i in range(len(self.held))]
        total = self.call(aten.linalg_vector_norm.default, self.call(aten.stack.default, parts))
        return self.call(aten.reciprocal.default, self.summed(self.call(aten.pow.Tensor_Scalar, total, 2)))

    def update(self, group: Sequence[Held], scale: fx.Node | None) -> None:
        gradients = [one.gradient for one in group]
        if scale is not None and self.kind == "in_place":
            self.call(aten._foreach_mul_.Tensor, gradients, scale)
        elif scale is not None:
            scaled = self.call(aten._foreach_mul.Tensor, gradients, scale)
            gradients = [self.part(scaled, i) for i in range(len(group))]
        UPDATES[self.kind](self, group, gradients)

    def gives(self, one: Held, key: str, node: fx.Node) -> None:
        """Return a new parameter (no key) or a new state."""
        self.returns(node, "state" if key else "param", f"{one.fqn}.{key}" if key else one.fqn)

    def read_as(self, graph: fx.Graph) -> GraphAnalysis:
        """``graph``, made of this one, read."""
        return read_graph(graph, self.inputs, self.outputs)


def _fused(step: WholeStep, group: Sequence[Held], gradients: Sequence[fx.Node | None]) -> None:
    steps = step.call(aten._foreach_add.Scalar, [one.state["step"] for one in group], 1)
    counts = [step.part(steps, i) for i in range(len(group))]
    lists = [[one.shard for one in group], list(gradients), *([o.state[k] for o in group] for k in ("exp_avg", "exp_avg_sq"))]
    new = step.call(aten._fused_adamw.tensor_lr, *lists, [], counts, lr=step.lr, **ADAMW)
    for at, key in ((0, ""), (2, "exp_avg"), (3, "exp_avg_sq")):
        items = step.part(new, at)
        for i, one in enumerate(group):
            step.gives(one, key, step.part(items, i))
    for one, count in zip(group, counts, strict=True):
        step.gives(one, "step", count)


def _foreach(step: WholeStep, group: Sequence[Held], gradients: Sequence[fx.Node | None]) -> None:
    kept = step.call(aten._foreach_mul.Scalar, [one.state["momentum"] for one in group], 0.9)
    momenta = step.call(aten._foreach_add.List, [step.part(kept, i) for i in range(len(group))], list(gradients))
    parts = [step.part(momenta, i) for i in range(len(group))]
    moves = step.call(aten._foreach_mul.Tensor, parts, step.call(aten.neg.default, step.lr))
    new = step.call(aten._foreach_add.List, [one.shard for one in group], [step.part(moves, i) for i in range(len(group))])
    for i, one in enumerate(group):
        step.gives(one, "", step.part(new, i))
        step.gives(one, "momentum", parts[i])


def _plain(step: WholeStep, group: Sequence[Held], gradients: Sequence[fx.Node | None]) -> None:
    for one, gradient in zip(group, gradients, strict=True):
        kept = step.call(aten.mul.Tensor, one.state["momentum"], 0.9)
        momentum = step.call(aten.add.Tensor, kept, gradient)
        move = step.call(aten.mul.Tensor, momentum, step.call(aten.neg.default, step.lr))
        step.gives(one, "", step.call(aten.add.Tensor, one.shard, move))
        step.gives(one, "momentum", momentum)


def _in_place(step: WholeStep, group: Sequence[Held], gradients: Sequence[fx.Node | None]) -> None:
    """As other tracers leave it: nothing is returned."""
    steps = [one.state["step"] for one in group]
    step.call(aten._foreach_add_.Scalar, steps, 1)
    step.call(aten._foreach_mul_.Scalar, [one.shard for one in group], 0.999)
    lists = [[one.shard for one in group], list(gradients), *([o.state[k] for o in group] for k in ("exp_avg", "exp_avg_sq"))]
    step.call(aten._fused_adamw_.tensor_lr, *lists, [], steps, lr=step.lr, **ADAMW)


UPDATES: dict[str, Callable[[WholeStep, Sequence[Held], Sequence[fx.Node | None]], None]] = {
    "fused": _fused, "foreach": _foreach, "plain": _plain, "in_place": _in_place,
}  # fmt: skip


@dataclass(frozen=True)
class Passed:
    """A whole step before and after our pass."""

    step: WholeStep
    before: GraphAnalysis
    graph: fx.Graph
    report: PassReport

    @property
    def graph_names(self) -> list[str]:
        return [node.name for node in self.graph.nodes]

    @property
    def after(self) -> GraphAnalysis:
        return self.step.read_as(self.graph)


def entries(step: WholeStep) -> dict[str, str]:
    return {one.fqn: one.fqn.partition(".")[0] for one in step.held}


def passed(step: WholeStep, **options: object) -> Passed:
    """``step`` through our pass, an entry a layer."""
    before = step.read()
    graph = fx.Graph()
    graph.output(graph.graph_copy(step.graph, {}), None)
    values: list[Value] = step.inputs
    targets = by_parameter(graph, before, values, entries(step), list(step.layers), step.outputs)
    report = ManualPass.of(**{"updates": "ready", **options}).run(graph, targets)  # type: ignore[arg-type]
    return Passed(step, before, graph, report)


def updating(graph: fx.Graph, step: WholeStep) -> list[str]:
    """Launches and waits of reductions, and updates by entry, in a few words; of equal ones in a row one."""
    reading = step.read_as(graph)
    waits = {where: f"wait {bucket.fqns[0][:1]}" for bucket in reading.buckets for where in bucket.waits if bucket.fqns}
    launches = {b.launch: f"launch {b.fqns[0][:1]}" for b in reading.buckets if b.fqns}
    reductions = [b for b in reading.buckets if b.kind == "reduce_scatter"]
    own = {b.launch for b in reductions} | {where for b in reductions for where in b.waits}
    events = [(where, what) for where, what in {**launches, **waits}.items() if where in own]
    events += [(where, f"update {fqn[:1]}") for where, direction, fqn in reading.computes if direction == "optimizer"]
    told = [what for _, what in sorted(events)]
    return [what for at, what in enumerate(told) if at == 0 or told[at - 1] != what]


def item(graph: fx.Graph, target: object, number: int = 0) -> fx.Node:
    """The ``number``-th node of ``graph`` that calls ``target``."""
    return [node for node in graph.nodes if node.target is target][number]


__all__ = ["Passed", "WholeStep", "entries", "getitem", "item", "passed", "updating"]
