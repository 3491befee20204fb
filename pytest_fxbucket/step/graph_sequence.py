"""A step of several graphs that run one behind the other, each with what those before it hand on.

FSDP's collectives may stand in graphs of their own: ``unshard`` gathers parameters, forward and backward take them whole, and
``reduce`` reduces gradients. ``input`` and ``weight`` are backward in two parts. A schedule may call them apart; whoever needs
the whole step, to run it say, takes them as one graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import fx

from pytest_fxbucket.compat.fx import uncompiled
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.roles import Phase, Role, StepGraph, Value
from pytest_fxbucket.words import nearest

if TYPE_CHECKING:
    import torch

Sides = Mapping[Phase, tuple[Value, ...]]
_Key = tuple[str, ...]

HANDED: tuple[Role, ...] = ("whole", "unreduced", "crossing")
"""Roles of what a graph hands to a later one."""
ORDER: tuple[Phase, ...] = ("joint", "unshard", "forward", "backward", "input", "weight", "reduce")
"""The order in which the graphs of a step run."""
_WORDS = {"whole": "the whole parameter", "unreduced": "the unreduced gradient of", "crossing": "the value"}
_FIRST = ("param", "buffer", "held", "state", "hyper")


def is_handed_on(step: StepGraph) -> bool:
    """Whether graphs of ``step`` hand values to each other; pipeline stages do so by a schedule of their own."""
    return step.pipelined is None and any(value.role in HANDED for values in step.inputs.values() for value in values)


def refuse_unfitting(inputs: Sides, outputs: Sides, where: str) -> None:
    """Raise :class:`CaptureError`, beginning with ``where``, unless what a graph takes is given before, once and in that form.

    An unreduced gradient must be taken by some graph, too.
    """
    given: dict[_Key, tuple[Phase, Value]] = {}
    read: set[_Key] = set()
    for phase in inputs:
        # Graphs come in the order in which they run, so ``given`` has what those before this one hand on.
        for value in _handed(inputs[phase]):
            key, what = value.key, f"{_WORDS[value.role]} {value.fqn!r}"
            if key not in given:
                names = [fqn for role, fqn in given if role == value.role]
                raise CaptureError(
                    f"{where}: the {phase} graph takes {what}, which no graph before it gives{nearest(value.fqn, names)}"
                )
            giver, made = given[key]
            read.add(key)
            if made.dtype is not None and value.dtype is not None and _form(made) != _form(value):
                raise CaptureError(
                    f"{where}: the {phase} graph takes {what} as {_form(value)}, but the {giver} graph gives {_form(made)}"
                )
        for value in _handed(outputs[phase]):
            if (other := given.get(value.key)) is not None:
                raise CaptureError(
                    f"{where}: {_WORDS[value.role]} {value.fqn!r} is given twice, by {other[0]} and by {phase}; "
                    "add up in one graph what is one value, and give others names of their own"
                )
            given[value.key] = phase, value
    lost = next((key for key in given if key[0] == "unreduced" and key not in read), None)
    if lost is not None:
        raise CaptureError(
            f"{where}: the {given[lost][0]} graph gives {_WORDS[lost[0]]} {lost[1]!r}, which no graph reduces; "
            "let the reduce graph take it, or give it the role grad"
        )


def _handed(values: Sequence[Value]) -> Iterator[Value]:
    return (value for value in values if value.role in HANDED)


def _form(value: Value) -> str:
    return f"{list(value.shape)} in {str(value.dtype).removeprefix('torch.')}"


# All graphs of a step as one.


def as_one(step: StepGraph, modules: Mapping[Phase, tuple[torch.nn.Module, fx.Graph]] | None = None) -> StepGraph:
    """``step`` with one graph, ``joint``, which does what its graphs do in their order.

    ``modules``: instead of its own graphs others of the same inputs and outputs, each with what holds its constants. Nodes are
    named after their graph, and inputs are in the order of graphs, parameters and buffers first.
    """
    graphs = modules or {phase: (module, module.graph) for phase, module in step.graphs.items()}
    joined = _Joined(step)
    for phase in step.graphs:
        joined.add(phase, *graphs[phase])
    return joined.step()


class _Joined:
    def __init__(self, step: StepGraph) -> None:
        self.given, self.graph, self.constants = step, fx.Graph(), dict[str, Any]()
        self._names: dict[tuple[Phase, str], str] = {}
        self.handed: dict[_Key, Any] = {}
        self.results: list[tuple[Value, Any]] = []
        self.tensors: dict[_Key, torch.Tensor | None] = {}
        self.values: dict[_Key, Value] = {}
        for phase in step.graphs:
            tensors = iter(step.example_inputs.get(phase, ()))
            for key, value in _keyed(phase, step.inputs[phase]):
                if value.role not in HANDED:
                    self.tensors.setdefault(key, next(tensors, None))
                    self.values.setdefault(key, value)
        # Ranks refuse a graph that lists parameters and buffers behind other inputs (see step_runner.py).
        first = [key for key, value in self.values.items() if value.role in _FIRST]
        self.inputs = [*first, *(key for key in self.values if key not in first)]
        self.nodes = {key: self.graph.placeholder(f"input_{number}") for number, key in enumerate(self.inputs)}

    def add(self, phase: Phase, root: torch.nn.Module, source: fx.Graph) -> None:
        """Run the graph ``phase`` behind those that were added before."""
        copies: dict[fx.Node, Any] = {}
        for node, (key, value) in zip(
            source.find_nodes(op="placeholder"), _keyed(phase, self.given.inputs[phase]), strict=True
        ):
            copies[node] = self.handed[key] if value.role in HANDED else self.nodes[key]
            if not copies[node].meta:
                copies[node].meta = dict(node.meta)
        for node in source.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = self._copied(phase, root, node, copies)
        returned: Any = source.output_node().args[0]
        made = returned if isinstance(returned, (list, tuple)) else [returned]
        for node, value in zip(made, self.given.outputs[phase], strict=True):
            result = copies[node] if isinstance(node, fx.Node) else node
            if value.role in HANDED:
                self.handed[value.key] = result
            else:
                self.results.append((value, result))

    def _copied(self, phase: Phase, root: torch.nn.Module, node: fx.Node, copies: Mapping[fx.Node, Any]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        target = node.target
        if node.op == "get_attr":
            target = self._constant(phase, root, str(node.target))
        made = self.graph.create_node(node.op, target, args, kwargs, f"{phase}_{node.name}", node.type)
        made.meta = dict(node.meta)
        return made

    def _constant(self, phase: Phase, root: torch.nn.Module, target: str) -> str:
        """The name of the attribute ``target`` of ``root``; two graphs may have one name, and a dot reads as an underscore."""
        if (phase, target) not in self._names:
            name = f"{phase}_{target}".replace(".", "_")
            while name in self.constants:
                name += "_"
            self._names[phase, target] = name
            self.constants[name] = attrgetter(target)(root)
        return self._names[phase, target]

    def step(self) -> StepGraph:
        self.graph.output([result for _, result in self.results])
        examples = tuple(tensor for key in self.inputs if (tensor := self.tensors[key]) is not None)
        return replace(
            self.given,
            graphs={"joint": uncompiled(self.constants, self.graph)},
            inputs={"joint": tuple(self.values[key] for key in self.inputs)},
            outputs={"joint": tuple(value for value, _ in self.results)},
            example_inputs={"joint": examples},
        )


def _keyed(phase: Phase, values: Sequence[Value]) -> Iterator[tuple[_Key, Value]]:
    """Each value with the key of its tensor: graphs that take the same role and name take the same tensor."""
    # In one graph the same role and name stand for two tensors. Of role ``value`` nothing is known, so graphs share none.
    seen: Counter[_Key] = Counter()
    for value in values:
        key: _Key = value.key
        seen[key] += 1
        again = (str(seen[key]),) if seen[key] > 1 else ()
        own = (phase,) if value.role == "value" else ()
        yield (*key, *again, *own), value
