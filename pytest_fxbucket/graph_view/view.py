"""GraphView: the modules of a traced graph, to be asked and printed as the model itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph.modules import ModuleStackFn, module_path
from pytest_fxbucket.graph_view.find import (
    DIRECTIONS,
    KINDS,
    NoAttributeError,
    NoIndexError,
    NoKeyError,
    around,
    chosen,
    matching,
)
from pytest_fxbucket.graph_view.stacks import tree_of
from pytest_fxbucket.graph_view.tree import ROOT, HeldParameter, KnownParameter, Tree
from pytest_fxbucket.words import counted, human_bytes, one_or_other

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph_view.subgraph import SubGraph
    from pytest_fxbucket.step.roles import Direction, Phase, StepGraph


def _graph(given: fx.Graph | fx.GraphModule) -> fx.Graph:
    return given.graph if isinstance(given, torch.fx.GraphModule) else given


class GraphView:
    """A module of a graph: its children, nodes and parameters. The view of a graph is that of its root module.

    A child is had by name, by index or as an attribute: ``view["layers.0.attention"]``, ``view.layers[0].attention``; several
    by :meth:`find`. What wraps all modules of a graph, as a trainer's module wraps the model, may be left out of a name that is
    asked of the root. Names are read off ``nn_module_stack``, ``fwd_nn_module_stack`` or annotations (``module_fqn`` or
    ``module_path``); variables that hold the model, and what torch wraps modules in, are no part of them.

    A view is of its graph as it was: nodes that come later are not in it. ``copy.copy`` gives a view of the same graph,
    ``copy.deepcopy`` one of a deep copy of it. Pickling carries modules, parameters, and nodes by name, direction and kind, but
    no graph: :meth:`bound_to` gives it one again.
    """

    __slots__ = ("_number", "_tree")

    def __init__(
        self,
        graph: fx.Graph | fx.GraphModule,
        module_stack_fn: ModuleStackFn | None = None,
        *,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        """View ``graph``; its nodes are walked over once.

        ``module_stack_fn(node)`` gives a node's modules as (FQN, class), outermost first, instead of the tracer's metadata.
        ``parameters`` names the graph's inputs that are parameters, by the name of their node (what an exported program's
        ``graph_signature.inputs_to_parameters`` is). Left out, they are what the tracer says they are; where it says nothing,
        the inputs of floats that one module alone reads, or that are gathered, through data that is moved and cast. A batch
        that one module alone reads looks the same, unless the inputs were traced with and without grad.

        Raises :class:`GraphError` if ``module_stack_fn`` gives no module stack.
        """
        given = None if parameters is None else {name: KnownParameter((fqn,)) for name, fqn in parameters.items()}
        self._tree = tree_of(_graph(graph), module_stack_fn, given=given)
        self._number = ROOT

    @classmethod
    def of_step(
        cls, step: StepGraph, phase: Phase = "joint", graph_module: fx.GraphModule | fx.Graph | None = None
    ) -> GraphView:
        """View one graph of ``step``, or ``graph_module``, which a pass made of it: parameters by role and FQN.

        Every module of the model is there, in order of registration. A graph of one phase is of that direction altogether.
        Raises :class:`GraphError` if ``step`` has no such graph.
        """
        from pytest_fxbucket.step.mesh import Mesh

        if phase not in step.graphs:
            raise GraphError(f"the step has no {phase} graph, but {one_or_other([*step.graphs])}")
        graph = _graph(graph_module or step.graphs[phase])
        others: dict[str, tuple[str, ...]] = {parameter.fqn: parameter.aliases for parameter in step.parameters}
        inputs = graph.find_nodes(op="placeholder")
        given = {
            node.name: KnownParameter((value.fqn, *others.get(value.fqn, ())), value.shape, value.dtype)
            for node, value in zip(inputs, step.inputs[phase], strict=True)
            if value.role == "param"
        }
        tree = tree_of(
            graph,
            given=given if step.has_roles else None,
            modules=step.modules,
            direction="forward" if phase == "forward" else "backward" if phase == "backward" else None,
            mesh=Mesh(step.mesh),
        )
        return cls._of(tree, ROOT)

    @classmethod
    def _of(cls, tree: Tree, number: int) -> GraphView:
        made = object.__new__(cls)
        made._tree, made._number = tree, number
        return made

    # What it is

    @property
    def fqn(self) -> str:
        """Names on the way from the root, joined by dots; empty for the root."""
        return ".".join(self._tree.path(self._number))

    @property
    def name(self) -> str:
        """Last part of :attr:`fqn`."""
        return self._tree.name[self._number]

    @property
    def class_name(self) -> str:
        """Name of the module's class; ``Module`` where no node says it, as of a ModuleList, which is never called."""
        return self._tree.cls[self._number]

    @property
    def graph(self) -> fx.Graph:
        """The graph. Raises :class:`GraphError` in a view that was pickled."""
        return self._bound()

    # Its children

    @property
    def children(self) -> Mapping[str, GraphView]:
        """Modules in this one by name, in order of registration where that is known, else of the graph; numbers count up."""
        return MappingProxyType({name: self._view(n) for name, n in self._tree.children[self._number].items()})

    def find(self, glob: str) -> list[GraphView]:
        """Modules that ``glob`` names, in order of registration where it is known, else of the graph; none is an empty list.

        A part of ``glob`` is a name, with ``*`` and ``?`` for any characters, ``[0-31]`` for those numbers, or ``**``
        for any number of names: ``layers.*.attention``, ``layers.[0-3]``, ``**.wq``.
        """
        # From the root the glob is tried on each module that wraps all others, outermost first; the first that matches counts.
        starts = self._tree.wrapped() if self._number == ROOT else (self._number,)
        found = next((found for start in starts if (found := matching(self._tree, start, glob))), [])
        return [self._view(number) for number in found]

    def __getitem__(self, name: str | int) -> GraphView:
        if isinstance(name, int):
            children = list(self._tree.children[self._number].values())
            if not -len(children) <= name < len(children):
                raise NoIndexError(self._tree, self._number, name)
            return self._view(children[name])
        found = self._tree.at(self._number, module_path(name)) if isinstance(name, str) else None
        if found is None:
            raise NoKeyError(self._tree, self._number, name)
        return self._view(found)

    def __getattr__(self, name: str) -> GraphView:
        # A copy that is still being built asks here for its slots, which must not recurse. Names with two underscores are
        # Python's own questions, such as those of ``copy`` and ``pickle``, never modules.
        if name in GraphView.__slots__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        found = self._tree.at(self._number, (name,))
        if found is None:
            raise NoAttributeError(self._tree, self._number, name)
        return self._view(found)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, GraphView):
            return name._tree is self._tree and self._number in self._tree.outward(name._number)
        return isinstance(name, str) and self._tree.at(self._number, module_path(name)) is not None

    def __iter__(self) -> Iterator[GraphView]:
        return iter(self.children.values())

    def __len__(self) -> int:
        return len(self._tree.children[self._number])

    def __bool__(self) -> bool:
        return True  # By ``__len__`` alone a module without children would be false.

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self._tree.children[self._number] if name.isidentifier())]

    # Its nodes and parameters

    def nodes(self, direction: Direction | None = None, kind: str | None = None, *, own: bool = False) -> list[fx.Node]:
        """Nodes that ran in this module and in those that it called, in graph order; those that call nothing are left out.

        ``direction`` is forward or backward, by the marks that tracers leave; ``kind`` is compute, wait, or a collective's:
        all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, other. ``own`` leaves out what ran in another module.
        Raises :class:`GraphError` for an unknown direction or kind, and in a view that was pickled.
        """
        self._bound()
        return [run.nodes[i] for run, i in chosen(self._tree, self._number, direction, kind, own=own)]

    def node_names(self, direction: Direction | None = None, kind: str | None = None, *, own: bool = False) -> list[str]:
        """Names of :meth:`nodes`, which a view that was pickled has too."""
        return [
            run.names[i] if run.names else run.nodes[i].name
            for run, i in chosen(self._tree, self._number, direction, kind, own=own)
        ]

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Number of nodes by direction and kind."""
        found: dict[tuple[str, str], int] = {}
        for run, i in chosen(self._tree, self._number):
            mark = self._tree.marked(run)[i]
            found[mark] = found.get(mark, 0) + 1
        return {(d, k): found[d, k] for d in DIRECTIONS for k in KINDS if (d, k) in found}

    @property
    def parameters(self) -> list[HeldParameter]:
        """Parameters of this module and of those in it, each once, in order of the graph's inputs."""
        held = self._tree.parameters_below[self._number]
        return [self._tree.parameters[index] for index in held]

    @property
    def bytes(self) -> int:
        """Bytes of :attr:`parameters` as the graph holds them: of a sharded one its local shard, padded."""
        return sum(parameter.bytes for parameter in self.parameters)

    def subgraph(self, direction: Direction | None = None) -> SubGraph:
        """What ran in this module, in one direction or both, as a graph of its own with inputs and outputs.

        Raises :class:`GraphError` if nothing ran in it, or if a graph of its own would compute something else; see
        :func:`pytest_fxbucket.graph_view.subgraph.extract`.
        """
        from pytest_fxbucket.graph_view.subgraph import extract

        what = f"{self.fqn or 'the root'}{f' in {direction}' if direction else ''}"
        code = around(self._tree, self._number, direction)
        return extract(self.graph, self.nodes(direction), code, self._tree.direction, what, self._tree.mesh)

    def bound_to(self, graph: fx.Graph | fx.GraphModule) -> GraphView:
        """The same view of ``graph``, in which nodes are found by name. Raises :class:`GraphError` if it lacks one."""
        graph = _graph(graph)
        names = {node.name: node for node in graph.nodes}
        # A tree after pickling has names for nodes, one that is bound has nodes: ``Tree.on`` looks up whichever it has.
        known: Any = names
        if self._tree.graph is not None:
            known = {n: names[n.name] for run in self._tree.runs for n in run.nodes if n.name in names}
        return self._of(self._tree.on(graph, known), self._number)

    # What Python asks of it

    def __repr__(self) -> str:
        return tree_text(self._tree, self._number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphView) and (self._tree, self._number) == (other._tree, other._number)

    def __hash__(self) -> int:
        return hash((id(self._tree), self._number))

    def __copy__(self) -> GraphView:
        return self._of(self._tree, self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphView._of, (self._tree, self._number)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphView:
        from copy import deepcopy

        return self._of(deepcopy(self._tree, memo), self._number)

    def _view(self, number: int) -> GraphView:
        return self._of(self._tree, number)

    def _bound(self) -> fx.Graph:
        if self._tree.graph is None:
            raise GraphError("a GraphView that was pickled has names of nodes and no graph; give it one with bound_to(graph)")
        return self._tree.graph


# A module tree as ``print(model)`` shows one: classes nested, with counts, equal neighbours by number folded into one.


def tree_text(tree: Tree, number: int) -> str:
    """The module ``number`` and all below it; lines as ``torch.nn.Module.__repr__`` and ``torch.nn.ModuleList`` write them."""
    alike = _same_text_numbers(tree, number)
    lines: list[str] = []
    # What is still to be written, last first: (depth, label, module), or None for the module in a line that closes one.
    left: list[tuple[int, str, int | None]] = [(0, "", number)]
    while left:
        depth, label, module = left.pop()
        indent = "  " * depth
        if module is None:
            lines.append(f"{indent})")
        elif not tree.children[module]:
            lines.append(f"{indent}{label}{tree.cls[module]}({_counts(tree, module)})")
        else:
            lines += [f"{indent}{label}{tree.cls[module]}(", f"{indent}  {_counts(tree, module)}"]
            left.append((depth, "", None))
            left += [(depth + 1, text, child) for text, child in reversed(list(_folded(tree, module, alike)))]
    return "\n".join(lines)


def _counts(tree: Tree, number: int) -> str:
    parts = [counted(sum(tree.calls[run] for run in tree.runs_of[number]), "node")]
    if held := tree.parameters_below[number]:
        parts += [counted(len(held), "parameter"), human_bytes(sum(tree.parameters[index].bytes for index in held))]
    return ", ".join(parts)


def _folded(tree: Tree, number: int, alike: dict[int, int]) -> Iterator[tuple[str, int]]:
    """Label and number of each child; neighbours that are alike and whose names count up are folded into the first."""
    children = list(tree.children[number].items())
    at = 0
    while at < len(children):
        name, child = children[at]
        end = at + 1
        while (
            end < len(children) and _follows(children[end - 1][0], children[end][0]) and alike[children[end][1]] == alike[child]
        ):
            end += 1
        yield (f"({name}): " if end - at == 1 else f"({name}-{children[end - 1][0]}): {end - at} x "), child
        at = end


def _follows(name: str, other: str) -> bool:
    return name.isdigit() and other.isdigit() and int(other) == int(name) + 1


def _same_text_numbers(tree: Tree, number: int) -> dict[int, int]:
    """A number for each module at and below ``number``: the same for those that would be written the same."""
    seen: dict[object, int] = {}
    found: dict[int, int] = {}
    # Children come before their parents, so that a module is told by its own line and the numbers of its children.
    for module in reversed(tree.inward(number)):
        below = tuple((name, found[child]) for name, child in tree.children[module].items())
        found[module] = seen.setdefault((tree.cls[module], _counts(tree, module), below), len(seen))
    return found
