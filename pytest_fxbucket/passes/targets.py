"""Which launches belong to which entry: by parameter (plans) or by module metadata (the drop-in function)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.capture.roles import Value
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.graph.reading import Bucket, Direction, Reading, read_graph
from pytest_fxbucket.passes.report import LeftAlone

if TYPE_CHECKING:
    import torch
    from torch import fx

ModuleStackFn = Callable[[Any], Sequence[tuple[str, type]]]


@dataclass(frozen=True, slots=True)
class Target:
    """One launch that an entry names, and its only wait."""

    launch: fx.Node
    wait: fx.Node
    entry: str
    fqn: str
    rank_in_registration: int
    direction: Direction
    kind: collectives.Kind
    op: str
    group: str
    dtype: torch.dtype | None
    bytes: int

    @property
    def key(self) -> tuple[str, ...]:
        """What the members of one bucket agree in."""
        return (self.entry, self.direction, self.kind, self.group, self.op, str(self.dtype))


@dataclass(frozen=True, slots=True)
class Targets:
    """Every launch of a graph, sorted into what a plan names and what it does not."""

    planned: tuple[Target, ...]
    left_alone: tuple[LeftAlone, ...]
    launches: int


def by_parameter(graph: fx.Graph, reading: Reading, inputs: Sequence[Value], entry_of: Mapping[str, str]) -> Targets:
    """Sort the launches of ``graph`` by the parameter they carry; ``entry_of`` maps FQNs to entries.

    ``reading`` is of ``graph``, or of the graph it was copied from: nodes are found by name.
    """
    order = {value.fqn: i for i, value in enumerate(inputs) if value.role == "param"}
    return _sort(graph, reading, lambda node, fqn: entry_of.get(fqn), order)


def by_module(graph: fx.Graph, plans: Sequence[tuple[str, Sequence[str]]], module_stack_fn: ModuleStackFn | None) -> Targets:
    """Sort the launches of ``graph`` by the module that their nodes' metadata names.

    ``plans`` holds (entry, module FQNs). Raises :class:`PlanError` for an FQN that no launch belongs to.
    """
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    returned = graph.output_node().args[0]
    count = len(returned) if isinstance(returned, (list, tuple)) else 1
    inputs = [Value("param", name, (), None) for name in placeholders]
    outputs = [Value("grad", f"output {i}", (), None) for i in range(count)]
    order = {value.fqn: i for i, value in enumerate([*inputs, *outputs])}
    stack = module_stack_fn or module_stack
    modules = {node: _module_of(stack(node)) for node in graph.nodes if collectives.launch_kind(node)}

    def entry_of(node: fx.Node, fqn: str) -> str | None:
        module = modules[node]
        for entry, names in plans:
            if any(_within(module, name) for name in names):
                return entry
        return None

    targets = _sort(graph, read_graph(graph, inputs, outputs), entry_of, order)
    used = {modules[target.launch] for target in targets.planned}
    for entry, names in plans:
        for name in names:
            if not any(_within(module, name) for module in used):
                known = sorted(set(modules.values()) - {""})
                part = f"{name!r} in entry {entry!r}" if len(names) > 1 else f"entry {entry!r}"
                raise PlanError(f"{part} matches no collective; modules with collectives: {_few(known)}")
    return targets


def module_stack(node: fx.Node) -> list[tuple[str, type]]:
    """Module stack of a node as torch writes it: ``nn_module_stack`` forward, ``fwd_nn_module_stack`` backward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return list(stack.values())


def _module_of(stack: Sequence[tuple[str, type]]) -> str:
    """Innermost FQN of a stack, of plain FQNs or of dynamo's ``L['self']._modules['layers']['0']``."""
    if not stack:
        return ""
    name = stack[-1][0]
    if "[" not in name:
        return name
    parts = re.findall(r"[^\[\]'.]+", re.sub(r"^L\['[^']*'\]", "", name))
    return ".".join(part for part in parts if part != "_modules")


def _within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"


def _sort(
    graph: fx.Graph, reading: Reading, entry_of: Callable[[fx.Node, str], str | None], order: Mapping[str, int]
) -> Targets:
    nodes = {node.name: node for node in graph.nodes}
    planned: list[Target] = []
    left: list[LeftAlone] = []
    for bucket in reading.buckets:
        node = nodes[bucket.node]
        waits = collectives.waits_of(node)
        entry = entry_of(node, bucket.members[0].fqn) if len(bucket.members) == 1 else None
        reason = _not_plannable(bucket, node, waits)
        if reason or entry is None:
            left.append(LeftAlone(_describe(bucket), reason or "no entry names its parameter"))
            continue
        fqn = bucket.members[0].fqn
        planned.append(
            Target(
                launch=node,
                wait=waits[0],
                entry=entry,
                fqn=fqn,
                rank_in_registration=order[fqn],
                direction=bucket.direction,
                kind=bucket.kind,
                op=bucket.op,
                group=bucket.group,
                dtype=bucket.dtype,
                bytes=bucket.bytes,
            )
        )
    return Targets(tuple(planned), tuple(left), len(reading.buckets))


_MERGED = frozenset({"_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"})


def _not_plannable(bucket: Bucket, node: fx.Node, waits: Sequence[fx.Node]) -> str:
    op = overload(node)
    if op is None or op._schema.name not in _MERGED:
        return f"{node.target} is not bucketed"
    if len(bucket.members) > 1:
        return "it carries several parameters already"
    if not bucket.members or not bucket.members[0].fqn:
        return "it carries no parameter and no parameter's gradient"
    if len(waits) != 1:
        return f"it has {len(waits)} waits, expected one"
    early = next((user for user in node.users if user is not waits[0]), None)
    return f"{early.name} reads it before its wait" if early is not None else ""


def _describe(bucket: Bucket) -> str:
    names = ", ".join(fqn for fqn in bucket.fqns if fqn) or bucket.node
    return f"{bucket.kind} of {names} ({bucket.direction})"
