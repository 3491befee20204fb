"""Names of nodes in a graph that a pass copied or traced again: it counts names anew, and others then have those of before.

Nodes are told by their names in many places: which of them stayed, what their metadata said, where gradients begin. Here those
that a pass took over get the names back that they had, so that nobody else has to ask.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from itertools import pairwise

import torch
from torch import fx
from torch.fx.node import map_arg

from pytest_fxbucket.graph.collectives import communicates
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.ops import operator_name

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
_SAME_DATA = frozenset({"aten::alias", "aten::clone", "aten::detach"})
_VIEWS = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view"})


def with_names_of_before(before: fx.Graph, after: fx.Graph) -> fx.Graph:
    """``after``, or a copy of it in which nodes that were in ``before`` have the names of then, if names were counted anew.

    Inputs are told by their places, compute by its operator, what it gives and its number, all else by what it is made of.
    A node that is told by none of these gets a name that ``before`` does not have.
    """
    if not _is_counted_anew(before, after):
        return after
    names = dict(_inputs(before, after))
    names |= _matched(before, after, names, lambda node, _: _call(node) if computes(node) else "")
    names |= _matched(before, after, names, _recipe)
    taken = {node.name for node in before.nodes}
    own = {node: f"{node.name}_of_pass" for node in after.nodes if node.name in taken and node.op != "output"}
    return renamed(after, own | names)


def renamed(graph: fx.Graph, names: Mapping[fx.Node, str]) -> fx.Graph:
    """A copy of ``graph`` whose nodes have ``names``, and the names that they have where none is given."""
    made, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), of.__getitem__)
        name = names.get(node, node.name)
        of[node] = made.create_node(node.op, name if node.op == "placeholder" else node.target, args, kwargs, name, node.type)
        of[node].meta = dict(node.meta)
    return made


def _is_counted_anew(before: fx.Graph, after: fx.Graph) -> bool:
    """Whether inputs have other names, or equal calls do, and the numbers in all names that changed ascend with the graph.

    A pass that changes a graph takes names away and puts new ones, of higher numbers, between those that stay.
    """
    if any(node.name != name for node, name in _inputs(before, after)):
        return True
    was, now = _numbers(before), _numbers(after)
    changed = [numbers for word, numbers in now.items() if numbers != was.get(word)]
    if not all(one < other for numbers in changed for one, other in pairwise(numbers)):
        return False
    old, new = _names_by_call(before), _names_by_call(after)
    return any(len(names) == len(old.get(call, ())) and names != old[call] for call, names in new.items())


def _names_by_call(graph: fx.Graph) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for node in graph.nodes:
        if node.op == "call_function" and not communicates(node):
            found[_call(node)].add(node.name)
    return found


def _numbers(graph: fx.Graph) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and (parts := _NUMBERED.fullmatch(node.name)) is not None:
            found[parts[1]].append(int(parts[2] or 0))
    return found


def _inputs(before: fx.Graph, after: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    # A pass that takes or adds inputs is refused elsewhere.
    pairs = zip(before.find_nodes(op="placeholder"), after.find_nodes(op="placeholder"), strict=False)
    yield from ((node, old.name) for old, node in pairs)


_Names = dict[fx.Node, str]
"""By node of either graph: the name of before, as far as it is known."""


def _matched(
    before: fx.Graph, after: fx.Graph, known: _Names, told_by: Callable[[fx.Node, Mapping[fx.Node, str]], str]
) -> _Names:
    """Names of nodes of ``after`` that are not ``known``: by what ``told_by`` says, where both graphs have as many of it."""
    named = set(known.values())
    old = _alike(before, {node: node.name for node in before.nodes if node.name in named}, told_by)
    new = _alike(after, known, told_by)
    found = (zip(nodes, old[key], strict=True) for key, nodes in new.items() if len(old.get(key, ())) == len(nodes))
    return {node: one.name for pairs in found for node, one in pairs}


def _alike(
    graph: fx.Graph, known: _Names, told_by: Callable[[fx.Node, Mapping[fx.Node, str]], str]
) -> dict[str, list[fx.Node]]:
    """Nodes of ``graph`` that are not ``known``, in order, by what is said of each; what is said as "" is left out."""
    said: dict[fx.Node, str] = {}
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        said[node] = known.get(node) or told_by(node, said)
        if node not in known and said[node] and node.op != "placeholder":
            found[said[node]].append(node)
    return found


def _call(node: fx.Node) -> str:
    """Operator of ``node``, its arguments but for nodes, dtype and shape of its result."""
    given = map_arg((node.args, node.kwargs), lambda _: None)
    return f"{node.target} {given} {_shape(node)}"


def _recipe(node: fx.Node, said: Mapping[fx.Node, str]) -> str:
    """What ``node`` is made of, as a digest: texts of nodes that are read twice would double with each step.

    What moves no data counts for what it is given, and all views that keep the order of elements are one.
    """
    name = operator_name(node)
    if name in _SAME_DATA | _VIEWS:
        return f"{said[node.all_input_nodes[0]]} as {_shape(node)}"
    given = map_arg((node.args, node.kwargs), lambda one: said[one])
    return sha256(f"{node.op} {node.target} {given} {_shape(node)}".encode()).hexdigest()


def _shape(node: fx.Node) -> str:
    made = node.meta.get("val")
    return f"{made.dtype} {tuple(made.shape)}" if isinstance(made, torch.Tensor) else ""
