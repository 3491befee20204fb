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

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.collectives import communicates, is_wait, launch_kind
from pytest_fxbucket.graph.compute import computes
from pytest_fxbucket.graph.follow import follow
from pytest_fxbucket.graph.modules import direction_of, module_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
_SAME_DATA = frozenset({"aten::alias", "aten::clone", "aten::detach"})
_VIEWS = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view"})
_Names = Mapping[fx.Node, str]
"""By node of either graph the name of before, as far as it is known."""
_Told = Callable[[fx.Node, Mapping[fx.Node, str]], str]
"""What is said of a node, given what was said of those before it; nodes of which the same is said are alike."""


def with_names_of_before(before: fx.Graph, after: fx.Graph) -> fx.Graph:
    """``after``, or a copy of it in which nodes that were in ``before`` have the names of then, if names were counted anew.

    Inputs are told by their places. Compute is told by its operator, the shape of its result, and its module; else by the
    inputs whose data it reads, gathered or not; else by its number. All else is told by what it is made of. A node that is told
    by none of these gets a name that ``before`` does not have.
    """
    names = dict(_inputs(before, after))
    if not _is_counted_anew(before, after):
        return renamed(after, names) if any(node.name != name for node, name in names.items()) else after
    read = _inputs_read(before, {}) | _inputs_read(after, names)
    for told in (
        _in_module,
        lambda node, _: _reading(node, read),
        lambda node, _: _call(node) if computes(node) else "",
        _recipe,
    ):
        names |= _matched(before, after, names, told)
    taken = {node.name for node in before.nodes}
    own = {node: f"{node.name}_of_pass" for node in after.nodes if node.name in taken and node.op != "output"}
    return renamed(after, own | names)


def renamed(graph: fx.Graph, names: _Names) -> fx.Graph:
    """A copy of ``graph`` whose nodes have ``names``, and the names that they have where none is given."""
    made, of = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), of.__getitem__)
        name = names.get(node, node.name)
        of[node] = made.create_node(node.op, name if node.op == "placeholder" else node.target, args, kwargs, name, node.type)
        of[node].meta = dict(node.meta)
    return made


# Were names counted anew? A pass that changes a graph takes names away and puts new ones, of higher numbers, between others.


def _is_counted_anew(before: fx.Graph, after: fx.Graph) -> bool:
    """Whether equal calls have other names, and the numbers in all names that changed ascend with the graph.

    Launches, waits, and what is moved before and behind them are left out: buckets change that.
    """
    old, new = _outside_buckets(before), _outside_buckets(after)
    was, now = _numbers(old), _numbers(new)
    changed = [numbers for word, numbers in now.items() if numbers != was.get(word)]
    if not changed or not all(one < other for numbers in changed for one, other in pairwise(numbers)):
        return False
    known = _names_by_call(old)
    return any(len(names) == len(known.get(call, ())) and names != known[call] for call, names in _names_by_call(new).items())


def _outside_buckets(graph: fx.Graph) -> list[fx.Node]:
    behind, leading = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if is_wait(node) or (moves_data(node) and not behind.isdisjoint(node.all_input_nodes)):
            behind.add(node)
    for node in reversed(graph.nodes):
        if moves_data(node) and any(user in leading or launch_kind(user) for user in node.users):
            leading.add(node)
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and not communicates(node) and node not in behind and node not in leading
    ]


def _numbers(nodes: list[fx.Node]) -> dict[str, list[int]]:
    """Numbers in names, in order, by the word before the number."""
    found: dict[str, list[int]] = defaultdict(list)
    for node in nodes:
        if (parts := _NUMBERED.fullmatch(node.name)) is not None:
            found[parts[1]].append(int(parts[2] or 0))
    return found


def _names_by_call(nodes: list[fx.Node]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        found[_call(node)].add(node.name)
    return found


# Which node is which?


def _inputs(before: fx.Graph, after: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    # A pass that takes or adds inputs is refused elsewhere.
    pairs = zip(before.find_nodes(op="placeholder"), after.find_nodes(op="placeholder"), strict=False)
    yield from ((node, old.name) for old, node in pairs)


def _matched(before: fx.Graph, after: fx.Graph, known: _Names, told: _Told) -> dict[fx.Node, str]:
    """Names of nodes of ``after`` that are not ``known``, where ``told`` says the same of as many nodes of both graphs."""
    named = set(known.values())
    old = _alike(before, {node: node.name for node in before.nodes if node.name in named}, told)
    new = _alike(after, known, told)
    found = (zip(nodes, old[key], strict=True) for key, nodes in new.items() if len(old.get(key, ())) == len(nodes))
    return {node: one.name for pairs in found for node, one in pairs}


def _alike(graph: fx.Graph, known: _Names, told: _Told) -> dict[str, list[fx.Node]]:
    """Nodes of ``graph`` that are not ``known``, in order, by what is said of each; what is said as "" is left out."""
    said: dict[fx.Node, str] = {}
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        said[node] = known.get(node) or told(node, said)
        if node not in known and said[node] and node.op != "placeholder":
            found[said[node]].append(node)
    return found


def _call(node: fx.Node) -> str:
    """Operator of ``node``, its arguments but for nodes, dtype and shape of its result."""
    given = map_arg((node.args, node.kwargs), lambda _: None)
    return f"{node.target} {given} {_shape(node)}"


def _in_module(node: fx.Node, _: object) -> str:
    module = module_of(node) if computes(node) else ""
    return f"{_call(node)} of {module} in {direction_of(node)}" if module else ""


def _reading(node: fx.Node, read: Mapping[fx.Node, list[str]]) -> str:
    return f"{_call(node)} of {read[node]}" if node in read and computes(node) else ""


def _inputs_read(graph: fx.Graph, names: _Names) -> dict[fx.Node, list[str]]:
    """Names of the inputs whose data each compute node reads, moved or gathered; ``names`` are those of before."""
    try:
        found = follow(graph)
    except PassError:  # which a reading of the graph says, too
        return {}
    read: dict[fx.Node, list[str]] = {}
    for use in found.uses:
        sources = (found.sources[number] for number in dict.fromkeys(one.source for one in use.content))
        nodes = [source.node for source in sources if source is not None and source.node.op == "placeholder"]
        if nodes:
            read.setdefault(use.reader, []).extend(names.get(node, node.name) for node in nodes)
    return read


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
