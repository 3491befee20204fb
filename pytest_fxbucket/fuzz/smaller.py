"""Makes a trial smaller where leaving out steps cannot: fewer outputs, inputs, nodes and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.compat.fake_tensors import fresh_like
from pytest_fxbucket.fuzz.program import copied, roles_of, with_roles
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.ops import is_view, operator_name, returned
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
    # Greedy: the first smaller trial that still shows the find is kept, and all reductions are tried again on that one.
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
    # Options; half of the outputs, then single ones; all unread inputs; single nodes that nobody reads; and last computed
    # values that become inputs, after which what computed them is read by nobody.
    yield from _without_options(trial)
    graph = trial.graph_module.graph
    places = list(range(len(returned(graph.output_node()))))
    if len(places) > 2:
        yield from (_returning(trial, half) for half in (places[: len(places) // 2], places[len(places) // 2 :]))
    for place in reversed(places):
        if len(places) > 1:
            yield _returning(trial, places[:place] + places[place + 1 :])
    unread = [node for node in graph.nodes if node.op == "placeholder" and not node.users]
    if unread:
        yield _without(trial, unread)
    for node in reversed(graph.nodes):
        going = _going(node)
        if going:
            yield _without(trial, going)
    for node in graph.nodes:
        if _can_be_given(node):
            yield _given_instead(trial, node)


def _without_options(trial: Trial) -> Iterator[Trial]:
    for name in trial.options:
        yield replace(trial, options={key: value for key, value in trial.options.items() if key != name})
    if isinstance(trial.plan, list) and len(trial.plan) > 1 and not trial.wrong:
        for number in range(len(trial.plan)):
            yield replace(trial, plan=trial.plan[:number] + trial.plan[number + 1 :])


def _returning(trial: Trial, places: list[int]) -> Trial:
    """``trial`` with only the outputs ``places``, and without nodes that only the other outputs needed."""
    made = copied(trial.graph_module)
    graph = made.graph
    output = graph.output_node()
    outputs, roles = returned(output), roles_of(output)
    output.args = ([outputs[place] for place in places],)
    with_roles(output, [roles[place] for place in places] if roles else [])
    _erase_unread(graph)
    made.recompile()
    return trial.of(made)


def _erase_unread(graph: fx.Graph) -> None:
    again = True
    while again:
        again = False
        for node in reversed(graph.nodes):
            # Writes stay: inputs are compared as a run leaves them, so a write counts though nobody reads it.
            if going := _going(node, writes=False):
                _erase(graph, going)
                again = True
                break


def _can_be_given(node: fx.Node) -> bool:
    """Whether what ``node`` computes, in a storage of its own, could as well be an input."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not node.users or is_view(node):
        return False
    if collectives.launch_kind(node) or written_arguments(node) or operator_name(node) == "aten::empty":
        return False
    if any(collectives.is_wait(user) for user in node.users):
        return False
    launch = node.all_input_nodes[0] if collectives.is_wait(node) else None
    if launch is not None and (operator_name(launch).endswith("_out") or operator_name(launch).endswith("_")):
        return False  # the result is a buffer that was there before, and not a storage of its own
    return value.is_contiguous() and all(isinstance(size, int) for size in value.shape)


def _given_instead(trial: Trial, node: fx.Node) -> Trial:
    made = copied(trial.graph_module)
    graph = made.graph
    old = next(one for one in graph.nodes if one.name == node.name)
    last = graph.find_nodes(op="placeholder")[-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before():
        new = graph.placeholder(f"given_{node.name}")
    new.meta["val"] = fresh_like(old.meta["val"])
    old.replace_all_uses_with(new)
    _erase_unread(graph)
    made.recompile()
    return trial.of(made)


def _going(node: fx.Node, writes: bool = True) -> list[fx.Node]:
    """What is erased together with ``node``, readers first; empty if something reads it.

    With a wait go its launch and all other waits of that. Without ``writes``, nodes that write in place stay.
    """
    if node.op in ("placeholder", "output") or node.users or _fills(node):
        return []
    if not collectives.is_wait(node):
        writing = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        return [] if writing and not writes else [node]
    source = node.all_input_nodes[0]
    launch = source if collectives.launch_kind(source) else source.all_input_nodes[0]  # else a part of a launch of several
    assert isinstance(launch.target, torch._ops.OpOverload)
    waits = collectives.waits_of(launch)
    if _fills(launch):
        return []
    if any(wait.users for wait in waits) or (not writes and launch.target._schema.is_mutable):
        # The launch has to stay, so the wait may go only if there is another one: each launch must be waited for.
        return [node] if len([wait for wait in source.users if collectives.is_wait(wait)]) > 1 else []
    return [*waits, *(user for user in launch.users if user not in waits), launch]


def _fills(node: fx.Node) -> bool:
    """Whether ``node`` writes into a new empty buffer that others read: without ``node`` that would be uninitialised memory."""
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
