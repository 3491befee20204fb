"""The tree of modules, made from the module stacks of nodes in one walk over the nodes; equal stacks are read once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import GraphError
from pytest_fxbucket.graph.modules import (
    MERGED,
    ModuleStackFn,
    Path,
    annotated,
    merged_parts,
    module_path,
    variable,
    wraps,
    wrong_stack,
)
from pytest_fxbucket.graph_view.tree import ROOT, UNKNOWN, KnownParameter, ModuleRun, Tree

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.mesh import Mesh
    from pytest_fxbucket.step.roles import Direction


def tree_of(
    graph: fx.Graph,
    module_stack_fn: ModuleStackFn | None = None,
    *,
    given: Mapping[str, KnownParameter] | None = None,
    modules: Iterable[str] = (),
    direction: Direction | None = None,
    mesh: Mesh | None = None,
) -> Tree:
    """The modules that the nodes of ``graph`` name, in order of first appearance; modules named by numbers in numeric order.

    ``modules`` are FQNs that come first, whether a node names them or not; ``direction`` is that of all nodes, ``mesh``
    that of the step. Raises :class:`GraphError` if ``module_stack_fn`` gives no module stack.
    """
    tree = Tree(graph, given, direction, mesh)
    for fqn in modules:
        tree.module(module_path(fqn))
    found = _by_stack(graph) if module_stack_fn is None else _by_function(graph, module_stack_fn)
    _Naming(tree, found).add_runs()
    for children in tree.children:
        if len(children) > 1 and all(map(str.isdigit, children)):
            ordered = sorted(children.items(), key=lambda item: int(item[0]))
            children.clear()
            children.update(ordered)
    return tree


@dataclass(slots=True)
class _Found:
    """Nodes by their module stack or, if a pass merged them, by the modules of their plan entry."""

    by_stack: dict[Any, list[fx.Node]]
    by_entry: dict[tuple[Path, ...], list[fx.Node]]


def _by_stack(graph: fx.Graph) -> _Found:
    """The walk; most nodes cost it a few dictionary reads."""
    found = _Found({}, {})
    by_stack = found.by_stack
    key: Any
    for node in graph.nodes:
        meta = node.meta
        if MERGED in meta:
            found.by_entry.setdefault(merged_parts(node), []).append(node)
            continue
        stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
        if stack:
            key = tuple(stack.values())
            try:
                nodes = by_stack.get(key)
            except TypeError:  # A stack that was read back from JSON has lists for pairs, which cannot be hashed.
                key = tuple(map(tuple, key))
                nodes = by_stack.get(key)
        else:
            key = tuple(annotated(node)) if "custom" in meta else ()
            nodes = by_stack.get(key)
        if nodes is None:
            by_stack[key] = [node]
        else:
            nodes.append(node)
    return found


def _by_function(graph: fx.Graph, stack_of: ModuleStackFn) -> _Found:
    found = _Found({}, {})
    for node in graph.nodes:
        stack = stack_of(node)
        if wrong := wrong_stack(stack):
            raise GraphError(f"{wrong} (of node {node.name})")
        found.by_stack.setdefault(tuple((item[0], *item[1:2]) for item in stack), []).append(node)
    return found


_SPECIAL = re.compile(r"\[|(^|\.)(_|\.|$)")
"""Found in a name that needs a full parse: brackets, empty parts, or parts with a leading underscore, as torch's own have."""


class _Naming:
    """Turns module names in tracers' spelling into modules of the tree; each spelling is parsed once."""

    def __init__(self, tree: Tree, found: _Found) -> None:
        self.tree, self.found = tree, found
        self.number_of: dict[str, int] = {}
        self.wraps: dict[int, int] = {}
        # Two models in one graph are told apart by the variables that hold them.
        self.several = len({variable(stack[-1][0]) for stack in found.by_stack if stack} - {""}) > 1

    def add_runs(self) -> None:
        """Add a run for each stack and entry."""
        for stack, nodes in self.found.by_stack.items():
            on_stack = self._numbers(stack) or [ROOT]
            self._add(on_stack, on_stack[-1:], nodes)
        for parts, nodes in self.found.by_entry.items():
            known = [number for part in parts if (number := self.tree.at(ROOT, part)) is not None] or [ROOT]
            self._add(known, known, nodes)

    def _numbers(self, stack: Sequence[Sequence[Any]]) -> list[int]:
        found: list[int] = []
        around = ""
        for item in stack:
            name = item[0]
            number = self.number_of.get(name)
            if number is None:
                number = self._number(name, around, found[-1] if found else ROOT)
                self._note_class(number, name, item)
            found.append(number)
            around = name
        return found

    def _number(self, name: str, around: str, outer: int) -> int:
        """Number of the module ``name``; ``outer`` is that of the module around it, which is spelled ``around``."""
        # Most names are the name around them, a dot, and plain names: those need no parsing, and no walk from the root.
        rest = name[len(around) + 1 :]
        if around and name.startswith(around) and name[len(around) :][:1] == "." and not _SPECIAL.search(rest):
            number = self.tree.module(rest.split("."), outer)
        else:
            held_by = variable(name) if self.several else ""
            path = module_path(name)
            number = self.tree.module((held_by, *path) if held_by else path)
        self.number_of[name] = number
        return number

    def _note_class(self, number: int, name: str, item: Sequence[Any]) -> None:
        """Note the class of a module. A wrapper and what it wraps are one module here, and the inner one's class counts."""
        wrappers = wraps(name)
        if len(item) > 1 and item[1] is not None and wrappers > self.wraps.get(number, -1):
            self.wraps[number] = wrappers
            self.tree.cls[number] = _class_name(item[1])

    def _add(self, on_stack: Sequence[int], innermost: Sequence[int], nodes: list[fx.Node]) -> None:
        parent, runs_of, run = self.tree.parent, self.tree.runs_of, len(self.tree.runs)
        # The run is noted once for each module on the stack and each module around those. The walk goes outwards until it meets
        # a module that has it.
        within = {ROOT}
        runs_of[ROOT].append(run)
        for number in reversed(on_stack):
            while number not in within:
                within.add(number)
                runs_of[number].append(run)
                number = parent[number]
        self.tree.runs.append(ModuleRun(tuple(innermost), nodes))


def _class_name(cls: object) -> str:
    """``Linear`` of a class, or of the name that export gives it: ``torch.nn.modules.linear.Linear``."""
    return getattr(cls, "__name__", None) or str(cls).rpartition(".")[2] or UNKNOWN
