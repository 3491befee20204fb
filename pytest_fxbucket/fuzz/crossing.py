"""Work that crosses iterations: several calls of a drawn step as one graph, which is judged as any other program.

Parameters and state are inputs of that graph, and written after each call, as the caller of a step does. Each call has a
batch of its own, and learning rates change in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.compat.fake_tensors import fresh_like
from pytest_fxbucket.compat.pytree import tree_map
from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.fuzz.program import step_of
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.step.iterations import CROSSING
from pytest_fxbucket.step_runner import KEPT
from pytest_fxbucket.transforms.registry import BUILT_IN

if TYPE_CHECKING:
    from pytest_fxbucket.step.roles import Key, Phase, StepGraph, Value

NAME = "next_iteration"
"""The transformation, and the option that has its entries."""
CALLS = 3
"""So that what one call hands to the next is handed on once more."""
LATE = ("param", "state", "grad")
"""Roles of results that a call may give for the call before it; all others must be of the call itself."""
aten = torch.ops.aten


def refuses(error: BaseException) -> bool:
    """Whether ``error`` says in a sentence why entries may not move."""
    return isinstance(error, (PassError, PlanError)) and str(error).startswith(f"{NAME}: ")


def crossed(graph_module: fx.GraphModule, entries: Sequence[Any]) -> fx.GraphModule:
    """Calls of ``graph_module``, the step behind the pass, with reductions and updates of ``entries`` in the next call.

    Raises what the transformation raises.
    """
    step = step_of(graph_module)
    return over_calls(import_callable(BUILT_IN[NAME], NAME)(step, {}, entries=entries), step)


def over_calls(step: StepGraph, usual: StepGraph | None = None) -> fx.GraphModule:
    """:data:`CALLS` calls of ``step`` as one graph, with the inputs and outputs that as many calls of ``usual`` have.

    ``usual``: the step as a single graph; None: ``step`` is that. New parameters and state are written and not returned.
    """
    # A step whose work crosses iterations has three graphs: setup for the first call, steady for the others, and cleanup, which
    # ends what the last call left open. So a late result that comes from steady or cleanup belongs to the call before.
    one = usual or step
    calls = _Calls(one.inputs["joint"], one.graphs["joint"].graph)
    crosses = set(step.graphs) == set(CROSSING)
    phases = ["setup", *["steady"] * (CALLS - 1), "cleanup"] if crosses else ["joint"] * CALLS
    late = {value.key for value in step.outputs["cleanup"] if value.role in LATE} if crosses else set()
    given: dict[tuple[int, Key], Any] = {}
    for number, phase in enumerate(phases):
        # Cleanup is no call: it ends the last one, with its learning rates and its batch.
        if 0 < number < CALLS:
            calls.change_rates()
        results = calls.call(step, phase, min(number, CALLS - 1))
        before = late if phase in ("steady", "cleanup") else set()
        given.update({(number - (key in before), key): node for key, node in results.items()})
    keys = [value.key for value in one.outputs["joint"] if value.role not in KEPT]
    wanted = [(number, key) for number in range(CALLS) for key in keys]
    if missing := next((one for one in wanted if one not in given), None):
        raise PassError(f"call {missing[0] + 1} of {CALLS} does not give {' '.join(missing[1])}")
    calls.graph.output([given[one] for one in wanted])
    calls.graph.lint()
    return fx.GraphModule(torch.nn.Module(), calls.graph)


class _Calls:
    """The graph under construction."""

    def __init__(self, inputs: Sequence[Value], graph: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.carried: dict[Key, Any] = {}
        given = list(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        kept = [(node, value) for node, value in given if value.role in KEPT]
        self.kept: dict[Key, fx.Node] = {value.key: self._placeholder(node, node.name) for node, value in kept}
        self.batches: list[dict[Key, fx.Node]] = [
            {
                value.key: self._placeholder(node, f"{node.name}_of_{number + 1}")
                for node, value in given
                if value.role not in KEPT
            }
            for number in range(CALLS)
        ]

    def _placeholder(self, node: fx.Node, name: str) -> fx.Node:
        made = self.graph.placeholder(name)
        made.meta["val"] = fresh_like(node.meta["val"])
        return made

    def change_rates(self) -> None:
        """Change learning rates in place, as a scheduler does between steps."""
        for (role, _), node in self.kept.items():
            if role == "hyper":
                self._write(aten.add_.Tensor, node, 1)

    def call(self, step: StepGraph, phase: Phase, number: int) -> dict[Key, Any]:
        """The graph ``phase`` of ``step`` on batch ``number``; gives its results by role and name."""
        inputs, outputs = step.inputs[phase], step.outputs[phase]
        known: dict[Key, Any] = {**self.kept, **self.batches[number], **self.carried}
        graph = step.graphs[phase].graph
        env = {node: known[value.key] for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True)}
        for node in graph.nodes:
            if node.op == "call_function":
                env[node] = self._filled(self.graph.node_copy(node, env.__getitem__))
        pairs = zip(returned(graph.output_node()), outputs, strict=True)
        results: dict[Key, Any] = {value.key: env.get(item, item) for item, value in pairs}
        self.carried = {key: node for key, node in results.items() if key[0] == "carried"}
        told: dict[Key, Any] = {
            key: self._clone(node) for key, node in results.items() if key[0] not in KEPT and key[0] != "carried"
        }
        for key, node in self.kept.items():
            if results.get(key, node) is not node:
                self._write(aten.copy_.default, node, results[key])
        return told

    def _clone(self, node: Any) -> Any:
        """What a call gives, as it is then: it may be a parameter, which is written behind it."""
        return self._filled(self.graph.call_function(aten.clone.default, (node,))) if isinstance(node, fx.Node) else node

    def _write(self, target: Any, *args: Any) -> None:
        self._filled(self.graph.call_function(target, args))

    def _filled(self, node: fx.Node) -> fx.Node:
        """``node`` with a new fake value: copied from the step, those of two calls would seem to share memory."""
        args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
        mode = next(one.meta["val"] for one in self.kept.values()).fake_mode
        target: Any = node.target
        with mode:
            node.meta["val"] = target(*args, **kwargs)
        return node
