"""Nodes of a graph as a graph of their own: values from outside are its inputs, values that others read its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import arguments_of, effects_of
from pytest_fxbucket.graph.groups import join
from pytest_fxbucket.graph.modules import direction_of
from pytest_fxbucket.graph.order import Order, order_of
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.step.portable import PortableGraph, decode, encode_module

if TYPE_CHECKING:
    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import Direction

_COPIED = ("get_attr",)


@dataclass(frozen=True)
class SubGraph:
    """Part of a graph that runs by itself: calling it with the values of ``inputs`` gives a tuple, the values of ``outputs``.

    If it launches collectives, it runs on the ranks of a process group, all of which call it alike. It can be sent there, as
    the value of a fixture of a test marked ``fxbucket_ranks``, or as the payload of a job. Nodes of the whole graph do not
    travel. On a rank ``nodes``, ``inputs`` and ``outputs`` are nodes of its own graph, ``meta["val"]`` of an input is a tensor
    on device ``meta``, and ``between`` is empty.
    """

    graph_module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    """Nodes of the whole graph that are in it, in graph order."""
    inputs: tuple[fx.Node, ...]
    """Nodes of the whole graph whose values it takes, in order, as they are before the first of ``nodes`` that reads them."""
    outputs: tuple[fx.Node, ...]
    """Nodes of the whole graph whose values it gives, in order, as they are behind the last of ``nodes`` that writes them."""
    between: tuple[fx.Node, ...]
    """Other nodes that need an output and that an input needs, such as all between a module's forward and its backward.
    If there are any, inputs must come from a run of the whole graph."""
    what: str = "the sub-graph"
    """Name of the sub-graph in errors."""
    mesh: Mesh | None = None
    """Mesh of the step; process groups along it are made on a rank that has none yet."""

    @property
    def graph(self) -> fx.Graph:
        """The graph that runs by itself."""
        return self.graph_module.graph

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Values of :attr:`outputs`, given those of :attr:`inputs`.

        Raises :class:`GraphError` if it launches collectives on process groups that this process is not in.
        """
        join(self.graph, self.mesh, self.what)
        results: tuple[Any, ...] = self.graph_module(*values)
        return results

    def __copy__(self) -> SubGraph:
        return replace(self)

    def __reduce__(self) -> tuple[Any, ...]:
        described = [_described(node) for node in self.graph.find_nodes(op="placeholder")]
        return _received, (encode_module(self.graph_module), described, self.what, self.mesh)


def extract(
    graph: fx.Graph,
    own: Sequence[fx.Node],
    around: Iterable[fx.Node],
    direction: Direction | None,
    what: str,
    mesh: Mesh | None = None,
) -> SubGraph:
    """A graph of the ``own`` nodes of ``graph``, and of those nodes ``around`` that lie between them in one direction.

    Parts of an operator's several results go with that operator, waits with their launch; attributes are copied. Random numbers
    are drawn anew. ``direction`` is that of all nodes, if known; ``what`` names the nodes in errors; ``mesh`` is that of the
    step.

    Raises :class:`GraphError` if there are no nodes, and for writes in place that would show: others write between two of the
    nodes what those read, or read between two what those write, or two inputs share memory that the nodes write.
    """
    if not own:
        raise GraphError(f"no node ran in {what}, so there is no graph of it")
    order = order_of(graph)
    members = _with_parts(order, set(own))
    members |= _between(order, members, set(around), direction)
    members = _with_parts(order, members)  # Once more: nodes between may be launches or give several results, too.
    nodes = [node for node in order.nodes if node in members]
    given = {source for node in nodes for source in node.all_input_nodes if source not in members}
    inputs = [node for node in order.nodes if node in given and node.op not in _COPIED]
    outputs = [node for node in nodes if any(user not in members for user in node.users)]
    if why := why_not_alone(order, nodes, inputs):
        raise GraphError(f"{what} has no graph of its own: {why}")
    made = _new_graph(graph, nodes, inputs, outputs, what)
    between = _circle(order, members, inputs, outputs)
    return SubGraph(made, tuple(nodes), tuple(inputs), tuple(outputs), tuple(between), what, mesh)


Shape = tuple[tuple[int, ...], torch.dtype]


def _described(node: fx.Node) -> Shape | None:
    value = node.meta.get("val", node.meta.get("example_value"))
    return (tuple(map(int, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else None


def _received(graph: PortableGraph, inputs: Sequence[Shape | None], what: str, mesh: Mesh | None) -> SubGraph:
    """A sub-graph as it is on a rank that it was sent to."""
    made = decode(graph)
    placeholders = made.graph.find_nodes(op="placeholder")
    for node, described in zip(placeholders, inputs, strict=True):
        if described is not None:
            node.meta["val"] = torch.empty(described[0], dtype=described[1], device="meta")
    calls = [node for node in made.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    outputs: Any = made.graph.output_node().args[0]
    return SubGraph(made, tuple(calls), tuple(placeholders), tuple(outputs), (), what, mesh)


def _with_parts(order: Order, members: set[fx.Node]) -> set[fx.Node]:
    """``members``, changed so that parts of results are in exactly if their operator is, and waits if their launch is."""
    found = set(members)
    for node in order.nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is not None and (_is_part(node, source) or (collectives.is_wait(node) and _is_flying(source))):
            (found.add if source in found else found.discard)(node)
    return found


def _is_part(node: fx.Node, source: fx.Node) -> bool:
    value = source.meta.get("val", source.meta.get("example_value"))
    return node.target is getitem and isinstance(value, (list, tuple))


def _is_flying(node: fx.Node) -> bool:
    """Whether ``node`` is a launch, or a part of one."""
    if node.target is getitem:
        node = node.all_input_nodes[0]
    return collectives.launch_kind(node) is not None


def _between(order: Order, members: set[fx.Node], around: set[fx.Node], direction: Direction | None) -> set[fx.Node]:
    """Nodes of ``around`` on a path from member to member that runs through ``around`` and stays in one direction."""
    # One walk down finds what lies behind a member, one walk up what of that also lies before a member.
    candidates = [node for node in order.nodes if node in around and node not in members]
    way = {node: direction or direction_of(node) for node in (*candidates, *members)}
    behind: set[fx.Node] = set()
    for node in candidates:
        if any((s in members or s in behind) and way[s] == way[node] for s in node.all_input_nodes):
            behind.add(node)
    found: set[fx.Node] = set()
    for node in reversed(candidates):
        if node in behind and any((u in members or u in found) and way[u] == way[node] for u in node.users):
            found.add(node)
    return found


def _circle(order: Order, members: set[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes outside ``members`` that need an output and that an input needs."""
    after = set(reached(outputs, lambda node: (user for user in node.users if user not in members))) - members
    ahead = (node for node in inputs if node in after)
    found = set(reached(ahead, lambda node: (source for source in node.all_input_nodes if source in after)))
    return [node for node in order.nodes if node in found]


def _new_graph(
    graph: fx.Graph, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], what: str
) -> fx.GraphModule:
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    attributes = [s for node in nodes for s in node.all_input_nodes if s.op in _COPIED and s not in copies]
    for node in (*dict.fromkeys(attributes), *nodes):
        if graph.owning_module is None and node.op in (*_COPIED, "call_module"):
            raise GraphError(f"{what} has no graph of its own: {node.name} is an attribute, and the graph has no GraphModule")
        copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[node] for node in outputs))
    made.lint()
    return fx.GraphModule(graph.owning_module or torch.nn.Module(), made, "SubGraph")


# Can some nodes of a graph run by themselves, given what is written in place?


@dataclass(slots=True)
class _Storage:
    """What the nodes of a sub-graph have to do with one storage."""

    touches: list[int] = field(default_factory=list)
    """Indices of the nodes that read, write or make it, ascending."""
    made: list[fx.Node] = field(default_factory=list)
    """Nodes that make it, as their result."""
    fed: list[fx.Node] = field(default_factory=list)
    """Inputs of the sub-graph that live in it."""


def why_not_alone(order: Order, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> str:
    """Why ``nodes``, run in one go on ``inputs``, would compute something else than in the graph; empty if they would not."""
    members = {order.index[node] for node in nodes}
    storages = _storages(order, nodes, inputs)
    return next((why for number, storage in storages.items() if (why := _why(order, members, number, storage))), "")


def _storages(order: Order, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> dict[int, _Storage]:
    found: dict[int, _Storage] = {}
    for node in nodes:
        own, read = order.storages(node), {s for n in arguments_of(node) for s in order.storages(n)}
        for number in own | read:
            storage = found.setdefault(number, _Storage())
            storage.touches.append(order.index[node])
            if number not in read:
                storage.made.append(node)
    for node in inputs:
        for number in order.storages(node):
            found.setdefault(number, _Storage()).fed.append(node)
    return found


def _why(order: Order, members: set[int], number: int, storage: _Storage) -> str:
    writers = [i for i in order.writers(number) if _may_write(order.nodes[i])]
    touches = storage.touches
    foreign = next((i for i in writers if i not in members and touches and touches[0] < i < touches[-1]), None)
    if foreign is not None:
        first, last = order.nodes[touches[0]].name, order.nodes[touches[-1]].name
        return f"{_writes(order.nodes[foreign])} what {first} and {last} share, and stands between them"
    own = [i for i in writers if i in members]
    if not own:
        return ""
    # A run in one go only gives out the state behind the last write. An outside reader that stands before that, but behind the
    # first write (or behind the making, if the nodes make the storage), sees another state.
    begin, writer = own[0] if storage.fed else touches[0], order.nodes[own[-1]]
    reader = next((i for i in order.readers(number) if i not in members and begin < i < own[-1]), None)
    if reader is not None:
        return f"{order.nodes[reader].name} reads what {_writes(writer)} later"
    # A run by itself is given its inputs as tensors that need not share memory, so a write to one need not show in another.
    ways = [*storage.fed, *storage.made]
    if storage.fed and len(ways) > 1:
        return f"its inputs and nodes share memory ({ways[0].name} and {ways[1].name}), and {_writes(writer)} there"
    return ""


def _writes(node: fx.Node) -> str:
    return f"{node.name} {'may write' if effects_of(node).everything else 'writes in place'}"


def _may_write(node: fx.Node) -> bool:
    """Whether ``node`` may write in place; torch's functions, methods and modules are told by names, flags and ``out``."""
    # A graph before AOT tracing calls Python functions of torch, which no schema describes. Those that write in place have a
    # name that ends in _, or are given ``out`` or ``inplace``.
    target: Any = node.target
    if not effects_of(node).everything or isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return True
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
        return True
    if node.op == "call_module" and node.graph.owning_module is not None:
        module = node.graph.owning_module.get_submodule(target)
        return not type(module).__module__.startswith("torch.nn.") or bool(getattr(module, "inplace", False))
    name = target if node.op == "call_method" else getattr(target, "__name__", "_")
    if name.endswith("_") and not (name.startswith("__") and name != "__setitem__"):
        return True
    return node.op != "call_method" and not _is_of_torch(target)


def _is_of_torch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or getattr(getattr(target, "__self__", None), "__module__", None) or ""
    return module.partition(".")[0] == "torch"
