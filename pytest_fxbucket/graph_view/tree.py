"""The modules of a graph as flat tables, and the parameters that each holds, as given, as named by the tracer, or guessed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fx import computed, parameter_named, requires_grad
from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.modules import Path, direction_of, module_path, shared_path, variable
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import held_by
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.words import nearest

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import Direction

ROOT = 0


@dataclass(frozen=True, slots=True)
class KnownParameter:
    """What the caller says about an input that is a parameter."""

    fqns: tuple[str, ...]
    """More than one if it is tied."""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """A parameter as the graph holds it: of a sharded one the local shard, padded."""

    fqn: str
    """Its FQN, or the name of its input if its FQN is not known."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None if the input has no fake value; it then counts as no bytes."""
    node: fx.Node | None
    """The input; None if the parameter is read by calling its module, and in a view that was pickled."""
    input: str
    """Name of that input."""
    owners: tuple[int, ...]
    """Numbers of the modules that hold it; several if it is tied."""

    @property
    def bytes(self) -> int:
        """Bytes of the input."""
        size = self.dtype.itemsize if self.dtype is not None else 0
        for length in self.shape:
            size *= length
        return size


def parameters_of(tree: Tree) -> list[HeldParameter]:
    """Parameters of ``tree``'s graph, in order of the graph's inputs.

    They are those that were given; else those that the tracer names (dynamo's sources, AOTAutograd's descriptors, attributes
    and called modules); else guessed by how inputs are read. Raises :class:`GraphError` for a given name that is no input.
    """
    graph = tree.graph
    if graph is None:
        return []
    if tree.known_parameters is not None:
        return list(_given_parameters(tree, graph, tree.known_parameters))
    return list(_stated_parameters(tree, graph)) or list(_guessed(tree, graph))


def _given_parameters(tree: Tree, graph: fx.Graph, given: Mapping[str, KnownParameter]) -> Iterator[HeldParameter]:
    inputs = {node.name: node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    for name, parameter in given.items():
        if name not in inputs:
            raise GraphError(f"the graph has no input {name!r} that could be {parameter.fqns[0]}{nearest(name, list(inputs))}")
        value = _value(inputs[name])
        shape, dtype = (parameter.shape, parameter.dtype) if parameter.shape is not None else _sizes(value)
        owners = tuple(dict.fromkeys(_owner(tree, fqn) for fqn in parameter.fqns))
        yield HeldParameter(parameter.fqns[0], shape or (), dtype, inputs[name], name, owners)


def _stated_parameters(tree: Tree, graph: fx.Graph) -> Iterator[HeldParameter]:
    found: dict[object, tuple[list[str], fx.Node | None, str, Any]] = {}
    inputs = graph.find_nodes(op="placeholder")
    named = {node: name for node in inputs if (name := parameter_named(node)) is not None}
    # Two models in one graph may have parameters of one name: then the variables that hold the models are part of the FQNs.
    variables = {variable(name) for name in named.values()} - {""}
    for node, name in named.items():
        path = module_path(name)
        path = (variable(name), *path) if len(variables) > 1 else path
        found[node] = ([".".join(path)], node, node.name, _value(node))
    for target, node, value in _attributes(graph):
        # By identity: one tensor under several names is one tied parameter.
        found.setdefault(id(value), ([], node, node.name if node else target, value))[0].append(target)
    for fqns, node, name, value in found.values():
        owners = tuple(dict.fromkeys(_owner(tree, fqn) for fqn in fqns))
        shape, dtype = _sizes(value)
        yield HeldParameter(fqns[0], shape, dtype, node, name, owners)


def _attributes(graph: fx.Graph) -> Iterator[tuple[str, fx.Node | None, torch.nn.Parameter]]:
    """Parameters that the graph reads as attributes, and those of modules that it calls, by FQN."""
    owner = graph.owning_module
    for node in graph.find_nodes(op="get_attr") if owner is not None else ():
        value = held_by(owner, str(node.target))
        if isinstance(value, torch.nn.Parameter):
            yield str(node.target), node, value
    called = {str(node.target): None for node in graph.find_nodes(op="call_module")} if owner is not None else {}
    for target in called:
        assert owner is not None
        for name, value in owner.get_submodule(target).named_parameters():
            yield f"{target}.{name}", None, value


def _guessed(tree: Tree, graph: fx.Graph) -> Iterator[HeldParameter]:
    """Inputs of floats that are gathered, or that one module alone reads; only those that require grad, if any does."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if _holds_floats(node) and not computed(node)]
    trained = [node for node in inputs if requires_grad(node)]
    innermost = {node: run.innermost for run in tree.runs for node in run.nodes}
    # A gathered input is a parameter even if several modules read it (tied or read by parents): its owner is what they share.
    for node in trained or inputs:
        readers, gathered = _readers(node)
        modules = {number for reader in readers for number in innermost.get(reader, ())} - {ROOT}
        if len(modules) == 1 or (gathered and modules):
            owner = tree.module(shared_path(tree.path(number) for number in modules))  # A module that the tree has already.
            yield HeldParameter(node.name, *_sizes(_value(node)), node, node.name, (owner,))


def _readers(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """(readers of ``node`` behind nodes that only move, cast or gather it, whether anything gathers it)."""

    def passes_on(one: fx.Node) -> bool:
        return collectives.is_all_gather(one) or collectives.is_wait(one) or moves_data(one)

    through = reached([node], lambda one: filter(passes_on, one.users))
    readers = dict.fromkeys(user for one in through for user in one.users if user.op != "output" and not passes_on(user))
    return list(readers), any(map(collectives.is_all_gather, through))


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


# The modules of a graph as flat tables: names, classes, children, and which nodes ran in each.
#
# Tables instead of objects that hold each other: copying, pickling and printing a tree of any depth needs no recursion.


UNKNOWN = "Module"
"""Class name of a module that no node's stack names, such as a ModuleList, which is never called."""
_NO_CALLS = ("placeholder", "get_attr", "output")
Mark = tuple[str, str]
"""Direction and kind of a node; ("", "") for a node that calls nothing."""


@dataclass(slots=True)
class ModuleRun:
    """All nodes with one module stack."""

    innermost: tuple[int, ...]
    """The module whose code the nodes are; several for nodes that a pass merged for several modules."""
    nodes: list[fx.Node]
    """In graph order; empty after pickling."""
    marks: list[Mark] | None = None
    """Mark of each node; None until somebody asks."""
    indices: list[int] | None = None
    """Index in the graph of each node; None until somebody asks."""
    names: list[str] | None = None
    """Name of each node, after pickling; else None."""


@dataclass(eq=False)
class Tree:
    """Modules by number; 0 is the root. Every list but ``runs`` has an item for each module."""

    graph: fx.Graph | None
    """None after pickling."""
    known_parameters: Mapping[str, KnownParameter] | None = None
    """Parameters by the name of their input, if the caller said which they are."""
    direction: Direction | None = None
    """Direction of all nodes, if it is one and known."""
    mesh: Mesh | None = None
    """Mesh of the step that the graph is of, if known."""
    runs: list[ModuleRun] = field(default_factory=list)
    parent: list[int] = field(default_factory=lambda: [ROOT])
    name: list[str] = field(default_factory=lambda: [""])
    cls: list[str] = field(default_factory=lambda: [UNKNOWN])
    children: list[dict[str, int]] = field(default_factory=lambda: [{}])
    runs_of: list[list[int]] = field(default_factory=lambda: [[]])
    """Indices in ``runs`` of the runs in each module or below it."""

    def module(self, path: Sequence[str], number: int = ROOT) -> int:
        """The module ``path`` in module ``number``, made if there is none yet."""
        for name in path:
            child = self.children[number].get(name)
            if child is None:
                child = self.children[number][name] = len(self.parent)
                self.parent.append(number)
                self.name.append(name)
                self.cls.append(UNKNOWN)
                self.children.append({})
                self.runs_of.append([])
            number = child
        return number

    def outward(self, number: int) -> Iterator[int]:
        """``number`` and the modules around it, the root last."""
        while number != ROOT:
            yield number
            number = self.parent[number]
        yield ROOT

    def path(self, number: int) -> Path:
        """Names on the way to ``number``."""
        return tuple(self.name[outer] for outer in self.outward(number) if outer != ROOT)[::-1]

    def wrapped(self) -> Iterator[int]:
        """The root, and the modules below it that have all others in them (a trainer's module, say), from the outside in."""
        number = ROOT
        yield number
        while len(self.children[number]) == 1:
            (number,) = self.children[number].values()
            yield number

    def at(self, number: int, path: Path) -> int | None:
        """The module ``path`` below ``number``, or None; from the root, modules that wrap all others may be left out."""
        for start in self.wrapped() if number == ROOT else (number,):
            found: int | None = start
            for name in path:
                found = self.children[found].get(name) if found is not None else None
            if found is not None:
                return found
        return None

    def inward(self, number: int) -> list[int]:
        """``number`` and every module below it, each before its children."""
        found, left = [], [number]
        while left:
            found.append(left.pop())
            left.extend(reversed(self.children[found[-1]].values()))
        return found

    def marked(self, run: ModuleRun) -> list[Mark]:
        """Direction and kind of each node of ``run``."""
        if run.marks is None:
            run.marks = [self._mark(node) for node in run.nodes]
        return run.marks

    def placed(self, run: ModuleRun) -> list[int]:
        """Index in the graph of each node of ``run``."""
        if run.indices is None:
            run.indices = [self._index[node] for node in run.nodes]
        return run.indices

    @cached_property
    def calls(self) -> list[int]:
        """How many nodes of each run call something."""
        return [sum(kind != "" for _, kind in self.marked(run)) for run in self.runs]

    @cached_property
    def parameters(self) -> list[HeldParameter]:
        """Parameters, each with the modules that hold it."""
        return parameters_of(self)

    @cached_property
    def parameters_below(self) -> list[list[int]]:
        """Indices of the parameters in each module or below it."""
        found: list[dict[int, None]] = [{} for _ in self.parent]
        for index, parameter in enumerate(self.parameters):
            for owner in parameter.owners:
                for outer in self.outward(owner):
                    found[outer][index] = None
        return [list(indices) for indices in found]

    def _mark(self, node: fx.Node) -> Mark:
        if node.op in _NO_CALLS:
            return ("", "")
        kind = self._kinds.get(id(node.target))
        if kind is None:
            kind = "wait" if collectives.is_wait(node) else collectives.launch_kind(node) or "compute"
            self._kinds[id(node.target)] = kind
        return (self.direction or direction_of(node), kind)

    @cached_property
    def _index(self) -> dict[fx.Node, int]:
        """Index in the graph of each node of the runs, by their order at the first question."""
        # Nodes may have moved since the tree was made. Those that were removed get places behind all others.
        index = {node: place for place, node in enumerate(self.graph.nodes if self.graph is not None else ())}
        gone = [node for run in self.runs for node in run.nodes if node not in index]
        return index | {node: len(index) + i for i, node in enumerate(gone)}

    @cached_property
    def _kinds(self) -> dict[int, str]:
        """Kinds by ``id`` of targets, which the nodes keep alive."""
        return {}

    def on(self, graph: fx.Graph, counterpart: Mapping[Any, fx.Node]) -> Tree:
        """The same tree for ``graph``; ``counterpart`` maps each node of this tree, or its name, to the node there.

        Raises :class:`GraphError` if a node has no counterpart.
        """
        known = set(counterpart)
        gone = [str(node) for run in self.runs for node in run.nodes or run.names or () if node not in known]
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise GraphError(
                f"the graph has no node {gone[0]}{more}, which was there when its GraphView was made; make a new one"
            )
        index = {node: place for place, node in enumerate(graph.nodes)}
        # Nodes may stand in another order in ``graph``. Marks and places are left out, and asked for anew.
        runs = [
            ModuleRun(
                run.innermost, sorted((counterpart[node] for node in run.nodes or run.names or ()), key=index.__getitem__)
            )
            for run in self.runs
        ]
        found = replace(self, graph=graph, runs=runs)
        inputs = {node.name: node for node in index if node.op in _NO_CALLS}
        # Put where the cached property looks: after pickling, how parameters were found out is gone, and they must not change.
        found.__dict__["parameters"] = [replace(held, node=inputs.get(held.input)) for held in self.parameters]
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        if self.graph is None:
            return self
        # A graph in a module is copied with the module, which holds the attributes that its nodes name.
        owner = self.graph.owning_module
        graph = copy.deepcopy(self.graph, memo) if owner is None else copy.deepcopy(owner, memo).graph
        return self.on(graph, dict(zip(self.graph.nodes, graph.nodes, strict=True)))

    def __getstate__(self) -> dict[str, Any]:
        # Nodes would pickle their whole graph. Whatever is asked of them lazily is asked now.
        runs = [
            ModuleRun(run.innermost, [], self.marked(run), self.placed(run), run.names or [node.name for node in run.nodes])
            for run in self.runs
        ]
        parameters = [replace(held, node=None) for held in self.parameters]
        state = {key: value for key, value in self.__dict__.items() if key not in ("_kinds", "_index", "calls")}
        return {**state, "graph": None, "runs": runs, "parameters": parameters}
