"""Makes an order of nodes survive later compilers, which know of no order but that of inputs.

A later node reads one of its inputs through ``fxbucket::after``, which also takes what must come before it. A launch is read
by such an operator at its own place as well, so that nobody moves it down to its wait.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import is_control_deps, written_arguments
from pytest_fxbucket.graph.ops import is_view

if TYPE_CHECKING:
    from torch import fx

Pair = tuple["fx.Node", "fx.Node"]
AFTER = "pytest_fxbucket.compat.fx"
"""Module that registers the operator which keeps the order."""


def keep_order(graph: fx.Graph, pairs: Iterable[Pair], meta_of: Mapping[fx.Node, dict[str, Any]] = {}) -> list[Pair]:
    """Let ``graph`` itself say, for each (earlier, later) of ``pairs``, that ``later`` comes behind ``earlier``.

    Values stay the same. Each ``later`` must stand behind its ``earlier`` already. Gives the pairs of which it cannot be said:
    ``earlier`` is no tensor, or ``later`` reads none that it does not write or return. ``meta_of`` holds the
    metadata of what is made for a launch or a wait; one of each pair should be in it.
    """
    pins: dict[fx.Node, fx.Node] = {}
    wanted: dict[fx.Node, list[fx.Node]] = {}
    impossible: list[Pair] = []
    for earlier, later in dict.fromkeys(pairs):
        if collectives.tensors(earlier.meta.get("val")) and _input_of(later) is not None:
            wanted.setdefault(later, []).append(earlier)
        else:
            impossible.append((earlier, later))
    # Each later node reads its first input through one ``after``, which takes all that must come before that node.
    for later, needed in wanted.items():
        source = _input_of(later)
        assert source is not None
        meta = meta_of.get(later) or meta_of.get(needed[0], {})
        done = [_pinned(graph, earlier, pins, meta_of.get(earlier, meta)) for earlier in needed]
        start = _pinned(graph, source, pins, meta_of.get(source, meta))
        with graph.inserting_before(later):
            later.replace_input_with(source, _behind(graph, start, done, meta))
        if collectives.is_wait(later):
            _hold_what_is_sent(graph, source, later, meta)
    return impossible


def keeps_order(node: fx.Node) -> bool:
    """Whether ``node`` is there for order alone: one of :func:`keep_order`, or inductor's ``control_deps``."""
    return node.target is after or is_control_deps(node.target)


def forget_order(graph: fx.Graph) -> None:
    """Take out of ``graph`` what :func:`keep_order` put in, in place."""
    for node in graph.find_nodes(op="call_function", target=after):
        if any(item.target is not getitem or item.args[1:] != (0,) for item in node.users):
            continue  # somebody else's, who does more than to take the tensor: that is read as what it is
        source = held_back(node)
        done = [one for one in node.all_input_nodes if one is not source]
        for item in list(node.users):
            item.replace_all_uses_with(source)
            graph.erase_node(item)
        graph.erase_node(node)
        # Items that _pinned made, to have one tensor of a list.
        for item in done:
            if item.target is getitem and not item.users:
                graph.erase_node(item)


def without_kept_order(graph: fx.Graph) -> fx.Graph:
    """``graph``, or a copy of it (nodes of the same names) without what :func:`keep_order` put in: easier to read."""
    if not graph.find_nodes(op="call_function", target=after):
        return graph
    result = copy.deepcopy(graph)
    forget_order(result)
    return result


def _hold_what_is_sent(graph: fx.Graph, launched: fx.Node, wait: fx.Node, meta: dict[str, Any]) -> None:
    """Let readers of ``wait`` need what was sent, too, which a collective reads until its wait is over.

    Inductor frees that memory earlier where it does not see the launch right before the wait, but ``after`` in between.
    """
    # A coalesced launch is waited for item by item: a getitem stands between.
    launch = launched if collectives.launch_kind(launched) else next(iter(launched.all_input_nodes), launched)
    inputs = collectives.tensors_sent(launch)
    readers = list(wait.users)  # before ``held`` becomes one of them
    with graph.inserting_after(wait):
        held = _behind(graph, wait, inputs, meta)
    for reader in readers:
        reader.replace_input_with(wait, held)


def _input_of(later: fx.Node) -> fx.Node | None:
    """The tensor that ``later`` may read through an operator: what it waits for, or the first that it only reads."""
    if is_view(later) and not collectives.is_wait(later):
        return None
    written = set(written_arguments(later))
    sources = [source for source in later.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    return next((source for source in sources if source not in written), None)


def _pinned(graph: fx.Graph, node: fx.Node, pins: dict[fx.Node, fx.Node], meta: dict[str, Any]) -> fx.Node:
    """A tensor that is there once ``node`` has run: its own, or one of its list.

    For a launch it is an ``after`` right behind it, so that no compiler moves the launch down to its wait.
    """
    is_one = isinstance(node.meta["val"], torch.Tensor)
    if is_one and collectives.launch_kind(node) is None:
        return node
    if node not in pins:
        with graph.inserting_after(node):
            pins[node] = _behind(graph, node, [], meta) if is_one else _item(graph, node, meta)
    return pins[node]


def _behind(graph: fx.Graph, source: fx.Node, done: list[fx.Node], meta: dict[str, Any]) -> fx.Node:
    """A node at the graph's insertion point that gives ``source`` once all of ``done`` are computed."""
    node = graph.call_function(after, (source, done))
    node.meta = {**meta, "val": [source.meta["val"]]}
    with graph.inserting_after(node):
        return _item(graph, node, meta)


def _item(graph: fx.Graph, node: fx.Node, meta: dict[str, Any]) -> fx.Node:
    first = next(place for place, one in enumerate(node.meta["val"]) if isinstance(one, torch.Tensor))
    item = graph.call_function(getitem, (node, first))
    item.meta = {**meta, "val": node.meta["val"][first]}
    return item


def launch_of(wait: fx.Node) -> fx.Node:
    """The launch that ``wait`` waits for; ``after`` nodes, which keep the order, and ``getitem`` may lie between."""
    node = wait.all_input_nodes[0]
    while node.target is after or node.target is getitem:
        node = held_back(node) if node.target is after else node.all_input_nodes[0]
    return node


def held_back(node: fx.Node) -> fx.Node:
    """The tensor that an ``after`` gives on: its first argument, by place or by name."""
    source: Any = collectives.argument(node, "x")
    return source  # type: ignore[no-any-return]  # an argument of a node may be anything
