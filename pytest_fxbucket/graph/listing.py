"""Every node of a graph as a line: what ``fxbucket show --full`` prints.

Nodes are numbered by position, constants and graphs within the graph by first use. No node name, process-group name, path,
address or device number: equal graphs give the same bytes on every rank, hash seed and platform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.modules import direction_of, module_path, module_stack
from pytest_fxbucket.graph.ops import dtype_name, held_by

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.roles import Value

_GROUP = "group_name"


def listing(
    graph: fx.Graph,
    root: torch.nn.Module,
    *,
    inputs: Sequence[Value] = (),
    notes: Mapping[str, str] | None = None,
    dims_of: Mapping[str, str] | None = None,
    indent: str = "",
) -> list[str]:
    """A line for each node of ``graph``, in order; the graphs that a node calls stand below its line, indented.

    ``root`` holds the attributes that ``get_attr`` nodes name, ``inputs`` are the graph's in order, ``notes`` has the text
    behind a node by its name, ``dims_of`` the mesh dimension of each process group.
    """
    return list(_Listing(graph, root, iter(inputs), notes or {}, dims_of or {}, indent).lines())


def notes_of(graph: fx.Graph, labels: Mapping[str, str]) -> dict[str, str]:
    """A note for each launch and wait of ``graph``, by the name of its node; ``labels`` names launches."""
    notes: dict[str, str] = {}
    for node in graph.nodes:
        kind = collectives.launch_kind(node)
        if kind is not None:
            label = labels.get(node.name, kind)
            notes[node.name] = f"launch {label}"
            notes |= {wait.name: f"wait {label}" for wait in collectives.waits_of(node)}
    return notes


@dataclass
class _Listing:
    graph: fx.Graph
    root: torch.nn.Module
    inputs: Iterator[Value]
    notes: Mapping[str, str]
    dims_of: Mapping[str, str]
    indent: str
    held: dict[str, str] = field(default_factory=dict)
    graphs_below: list[fx.GraphModule] = field(default_factory=list)
    names: dict[int, tuple[object, str]] = field(default_factory=dict)
    """Names of targets by their id, since hashing an operator is slow."""

    def __post_init__(self) -> None:
        self.number = {node: f"%{i}" for i, node in enumerate(self.graph.nodes)}
        self.is_backward = any(direction_of(node) == "backward" for node in self.graph.nodes)

    def lines(self) -> Iterator[str]:
        for node in self.graph.nodes:
            module, note = self.module(node), self.notes.get(node.name)
            kind = _described(node.meta.get("val"))
            ends = [kind, module and f"in {module}", note and f"# {note}"]
            yield "  ".join([f"{self.indent}{self.number[node]} = {self.call(node)}", *filter(None, ends)])
            while self.graphs_below:
                below = self.graphs_below.pop(0)
                yield from listing(below.graph, below, dims_of=self.dims_of, indent=self.indent + "  ")

    def call(self, node: fx.Node) -> str:
        """Operator and arguments; role and FQN of an input."""
        if node.op == "placeholder":
            value = next(self.inputs, None)
            return f"input {value.role} {value.fqn}".rstrip() if value else "input"
        if node.op == "output":
            return f"output {self.written(node.args[0])}"
        if node.op == "get_attr":
            return self.attribute(str(node.target))
        args = [self.written(item) for item in node.args]
        args += [f"{name}={self.written(item)}" for name, item in node.kwargs.items()]
        self.name_groups(node, args)
        return f"{self.operator(node)}({', '.join(args)})"

    def name_groups(self, node: fx.Node, args: list[str]) -> None:
        """Put the mesh dimension in place of the process group's name."""
        group = collectives.argument(node, _GROUP)
        if not isinstance(group, str):
            return
        shown = self.dims_of.get(group, "unknown group")
        for i, (name, value) in enumerate([*((None, v) for v in node.args), *node.kwargs.items()]):
            if value == group and name in (None, _GROUP):
                args[i] = shown if name is None else f"{name}={shown}"

    def operator(self, node: fx.Node) -> str:
        found = self.names.get(id(node.target))
        if found is None:
            found = self.names[id(node.target)] = node.target, _operator(node.target)
        return found[1]

    def attribute(self, name: str) -> str:
        """``constant 0`` or ``graph 0``, numbered by first use: tracers name attributes as they like."""
        value = held_by(self.root, name)
        if name not in self.held:
            kind = "graph" if isinstance(value, torch.fx.GraphModule) else "constant"
            self.held[name] = f"{kind} {sum(shown.startswith(kind) for shown in self.held.values())}"
            if isinstance(value, torch.fx.GraphModule):
                self.graphs_below.append(value)
        return self.held[name] + (f" {_described(value)}" if isinstance(value, torch.Tensor) else "")

    def module(self, node: fx.Node) -> str:
        """Module of the node, with its direction if the graph has a backward; for a node that a pass made, the pass's entry."""
        entry = node.meta.get("fxbucket_entry")
        stack = module_stack(node)
        where = entry if isinstance(entry, str) else ".".join(module_path(str(stack[-1][0]))) if stack else ""
        if not self.is_backward or node.op != "call_function":
            return where
        return f"{direction_of(node)} {where}".strip()

    def written(self, value: Any) -> str:
        """An argument as text."""
        number = self.number.get(value) if isinstance(value, torch.fx.Node) else None
        if number is not None:
            return number
        if isinstance(value, (tuple, list)):
            inside = ", ".join(map(self.written, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self.written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return ":".join("" if part is None else self.written(part) for part in (value.start, value.stop, value.step))
        writer = _WRITERS.get(type(value))
        if writer is not None:
            return writer(value)
        return f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else _operator(value)


_WRITERS: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((type(None), type(...), bool, int, float, complex, str), repr),
    **dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), dtype_name),
    torch.device: lambda device: str(device.type),  # its number is the rank's
}


def _operator(target: Any) -> str:
    """Name of an operator or a function; of anything else the type alone, since a repr may contain an address."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name).replace("::", ".")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{target.namespace}.{target.__name__}"
    name = getattr(target, "__qualname__", None)
    if name is None:
        return type(target).__name__
    module = str(getattr(target, "__module__", None) or "")
    return f"{module}.{name}".removeprefix("_operator.").removeprefix("builtins.").lstrip(".")


def _described(value: Any) -> str:
    """``float32[2, 8]`` of a tensor, ``(..., ...)`` of several values, empty for anything else."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(item) or '?' for item in value)})"
    return ""
