"""Which inputs of a graph are parameters, and which modules hold them: as somebody says, or as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.traced_inputs import computed, parameter_named, requires_grad
from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.modules import module_path, shared_path, variable
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.units import nearest

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.tree import Tree

ROOT = 0


@dataclass(frozen=True, slots=True)
class Given:
    """What somebody says of an input that is a parameter."""

    fqns: tuple[str, ...]
    """More than one if it is tied."""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as the graph holds it: a sharded one is its local shard, padded."""

    fqn: str
    """Its FQN, or the name of its input where nobody says it."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None, and no bytes, if nothing says what the input holds."""
    node: fx.Node | None
    """Input that it is; None if it is read by calling its module, and in a view that was pickled."""
    input: str
    """Name of that input."""
    owners: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the input."""
        size = self.dtype.itemsize if self.dtype is not None else 0
        for length in self.shape:
            size *= length
        return size


def parameters_of(tree: Tree) -> list[Held]:
    """Parameters of ``tree``'s graph, in order of the graph's inputs.

    Those that were given; or those that the tracer names (dynamo's sources, AOTAutograd's descriptors, attributes and called
    modules); or, where nobody says anything, by how inputs are read. Raises :class:`GraphError` for a name that is no input.
    """
    graph = tree.graph
    if graph is None:
        return []
    if tree.given is not None:
        return list(_given(tree, graph, tree.given))
    return list(_said(tree, graph)) or list(_guessed(tree, graph))


def _given(tree: Tree, graph: fx.Graph, given: Mapping[str, Given]) -> Iterator[Held]:
    inputs = {node.name: node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for name, parameter in given.items():
        if name not in inputs:
            raise GraphError(f"the graph has no input {name!r} that could be {parameter.fqns[0]}{nearest(name, list(inputs))}")
        value = _value(inputs[name])
        shape, dtype = (parameter.shape, parameter.dtype) if parameter.shape is not None else _sizes(value)
        owners = tuple(dict.fromkeys(_owner(tree, fqn) for fqn in parameter.fqns))
        yield Held(parameter.fqns[0], shape or (), dtype, inputs[name], name, owners)


def _said(tree: Tree, graph: fx.Graph) -> Iterator[Held]:
    found: dict[object, tuple[list[str], fx.Node | None, str, Any]] = {}
    inputs = graph.find_nodes(op="placeholder")
    named = {node: name for node in inputs if (name := parameter_named(node)) is not None}
    variables = {variable(name) for name in named.values()} - {""}
    for node, name in named.items():
        path = module_path(name)
        path = (variable(name), *path) if len(variables) > 1 else path
        found[node] = ([".".join(path)], node, node.name, _value(node))
    for target, node, value in _attributes(graph):
        found.setdefault(id(value), ([], node, node.name if node else target, value))[0].append(target)
    for fqns, node, name, value in found.values():
        owners = tuple(dict.fromkeys(_owner(tree, fqn) for fqn in fqns))
        shape, dtype = _sizes(value)
        yield Held(fqns[0], shape, dtype, node, name, owners)


def _attributes(graph: fx.Graph) -> Iterator[tuple[str, fx.Node | None, torch.nn.Parameter]]:
    """Parameters that the graph reads as attributes, and those of modules that it calls, by FQN."""
    owner = graph.owning_module
    for node in graph.find_nodes(op="get_attr") if owner is not None else ():
        value: Any = owner
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if isinstance(value, torch.nn.Parameter):
            yield str(node.target), node, value
    called = {str(node.target): None for node in graph.find_nodes(op="call_module")} if owner is not None else {}
    for target in called:
        assert owner is not None
        for name, value in owner.get_submodule(target).named_parameters():
            yield f"{target}.{name}", None, value


def _guessed(tree: Tree, graph: fx.Graph) -> Iterator[Held]:
    """Inputs of floats that are gathered, or that one module alone reads; those that require grad, if any is said to."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if _holds_floats(node) and not computed(node)]
    trained = [node for node in inputs if requires_grad(node)]
    innermost = {node: run.innermost for run in tree.runs for node in run.nodes}
    for node in trained or inputs:
        readers, gathered = _readers(node)
        modules = {number for reader in readers for number in innermost.get(reader, ())} - {ROOT}
        if len(modules) == 1 or (gathered and modules):
            owner = tree.module(shared_path(tree.path(number) for number in modules))  # which there is
            yield Held(node.name, *_sizes(_value(node)), node, node.name, (owner,))


def _readers(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """Who reads ``node`` through what only moves, casts and gathers, and whether anything gathers it."""
    readers: list[fx.Node] = []
    gathered = False
    queue, seen = [node], {node}
    for current in queue:
        for user in current.users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            gathers = collectives.is_all_gather(user)
            gathered = gathered or gathers
            through = gathers or collectives.is_wait(user) or moves_data(user)
            (queue if through else readers).append(user)
    return readers, gathered


def _owner(tree: Tree, fqn: str) -> int:
    """The module of the parameter ``fqn``, or the nearest one around it that the tree has."""
    path = module_path(fqn)[:-1]
    while path:
        found = tree.at(ROOT, path)
        if found is not None:
            return found
        path = path[:-1]
    return ROOT


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _sizes(value: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Shape and dtype; a symbolic size counts as the size that it was traced with."""
    if not isinstance(value, torch.Tensor):
        return (), None
    return tuple(n if isinstance(n, int) else int(n.node.hint or 0) for n in value.shape), value.dtype


def _holds_floats(node: fx.Node) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
