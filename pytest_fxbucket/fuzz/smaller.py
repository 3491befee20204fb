"""Makes a trial smaller where steps cannot: outputs, inputs, nodes that nobody reads, and options that it does not need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.fuzz.program import copied
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.ops import operator_name
from pytest_fxbucket.graph.storages import base

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.fuzz.finds import Find
    from pytest_fxbucket.fuzz.trial import Trial

Same = Callable[["Trial", "Find"], "Find | None"]


def smaller(trial: Trial, find: Find, same: Same) -> tuple[Trial, Find]:
    """The smallest trial that still shows ``find``, as ``same`` says, and what is found there.

    A program stays legal: a launch goes with all of its waits, and only if nobody reads them.
    """
    went_on = True
    while went_on:
        went_on = False
        for less in _less(trial):
            found = same(less, find)
            if found is not None:
                trial, find, went_on = less, found, True
                break
    return trial, find


def _less(trial: Trial) -> Iterator[Trial]:
    """Trials that are one thing smaller, those that lose most first."""
    yield from _without_options(trial)
    graph = trial.graph_module.graph
    outputs = list(_returned(graph))
    if len(outputs) > 2:
        yield from (_returning(trial, half) for half in (outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]))
    for number in reversed(range(len(outputs))):
        if len(outputs) > 1:
            yield _returning(trial, outputs[:number] + outputs[number + 1 :])
    unread = [node for node in graph.nodes if node.op == "placeholder" and not node.users]
    if unread:
        yield _without(trial, unread)
    for node in reversed(graph.nodes):
        going = _going(node)
        if going:
            yield _without(trial, going)


def _without_options(trial: Trial) -> Iterator[Trial]:
    for name in trial.options:
        yield replace(trial, options={key: value for key, value in trial.options.items() if key != name})
    if isinstance(trial.plan, list) and len(trial.plan) > 1 and not trial.wrong:
        for number in range(len(trial.plan)):
            yield replace(trial, plan=trial.plan[:number] + trial.plan[number + 1 :])


def _returned(graph: fx.Graph) -> list[fx.Node]:
    found: Any = graph.output_node().args[0]
    return list(found)


def _returning(trial: Trial, outputs: list[fx.Node]) -> Trial:
    """Only ``outputs``, without what only others needed."""
    names = [node.name for node in outputs]
    made = copied(trial.graph_module)
    graph = made.graph
    nodes = {node.name: node for node in graph.nodes}
    graph.output_node().args = ([nodes[name] for name in names],)
    again = True
    while again:
        again = False
        for node in reversed(graph.nodes):
            if going := _going(node, writes=False):
                _erase(graph, going)
                again = True
                break
    made.recompile()
    return trial.of(made)


def _going(node: fx.Node, writes: bool = True) -> list[fx.Node]:
    """What goes with ``node``, readers first, if nobody reads it: of a wait its launch too, with all others of its waits.

    Without ``writes`` nothing that writes goes.
    """
    if node.op in ("placeholder", "output") or node.users or _fills(node):
        return []
    if not collectives.is_wait(node):
        writing = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        return [] if writing and not writes else [node]
    source = node.all_input_nodes[0]
    launch = source if collectives.launch_kind(source) else source.all_input_nodes[0]
    waits = collectives.waits_of(launch)
    if _fills(launch):
        return []
    if any(wait.users for wait in waits) or (not writes and launch.target._schema.is_mutable):  # type: ignore[union-attr]
        return [node] if len([wait for wait in source.users if collectives.is_wait(wait)]) > 1 else []
    return [*waits, *(user for user in launch.users if user not in waits), launch]


def _fills(node: fx.Node) -> bool:
    """Whether others would read what nobody has written, if ``node`` went."""
    new = [base(written) for written in written_arguments(node)]
    return any(operator_name(one) == "aten::empty" and len(one.users) > 1 for one in new)


def _without(trial: Trial, nodes: list[fx.Node]) -> Trial:
    names = [node.name for node in nodes]
    made = copied(trial.graph_module)
    found = {node.name: node for node in made.graph.nodes}
    _erase(made.graph, [found[name] for name in names])
    made.recompile()
    return trial.of(made)


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in nodes:
        graph.erase_node(node)
