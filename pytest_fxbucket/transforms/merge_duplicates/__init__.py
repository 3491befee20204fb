"""``merge_duplicates``: what is gathered or reduced twice is gathered or reduced once; never across a write to that value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import getitem
from typing import get_args

import torch
from torch import fx

from pytest_fxbucket.compat.fake_tensors import fresh_like
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.new_nodes import LAUNCHES, fake_value, view_of
from pytest_fxbucket.process import collector
from pytest_fxbucket.step.roles import Phase, StepGraph, Transformed
from pytest_fxbucket.transforms.merge_duplicates.choosing import Again, Duplicates, UnmergedLaunch
from pytest_fxbucket.transforms.merge_duplicates.mergeable import Labels, MergeableLaunch
from pytest_fxbucket.transforms.merge_duplicates.values import form_of
from pytest_fxbucket.transforms.transformation import transformation
from pytest_fxbucket.words import some

_clone, _view = torch.ops.aten.clone.default, torch.ops.aten.view.default


def merge(graph: fx.Graph, kept: fx.Node, again: MergeableLaunch, copied: bool) -> None:
    """Let the readers of ``again`` read what the launch ``kept`` before it brings, or with ``copied`` a copy of that.

    Both bring the same elements, so a reader that had another shape gets a view; results of another shape are contiguous.
    ``kept`` stays where it is, and its wait too unless ``again`` was waited for earlier: then the wait moves up to there.
    ``again`` is erased, with every node that only it needed.
    """
    for part, waits in again.waits.items():
        taken = again.parts.get(part)
        holders = [kept] if taken is None else [n for n in kept.users if n.target is getitem and n.args[1] == part]
        own = [user for holder in holders for user in holder.users if collectives.is_wait(user)]
        if not own and taken is not None:  # nobody had taken this part of the first one yet
            taken.replace_input_with(again.launch, kept)
            continue
        wait = min(own)
        # Readers of ``again`` may stand before the wait of ``kept``: the wait moves up to theirs, and so does the ``getitem``
        # that picks its part of a coalesced launch, if that stands too late.
        if waits[0] < wait:
            (source,) = wait.all_input_nodes
            if waits[0] < source:
                waits[0].prepend(source)
            waits[0].prepend(wait)
        # A wait may be waited for again; from the last to the first, each has no reader left when it is erased.
        for other in reversed(waits):
            with graph.inserting_before(other):
                other.replace_all_uses_with(_result(graph, wait, other, copied))
            graph.erase_node(other)
        if taken is not None:
            graph.erase_node(taken)
    brings_too(kept, again.launch)
    erase(graph, again.launch)


def brings_too(kept: fx.Node, gone: fx.Node) -> None:
    """Note at the launch ``kept``, in the graph's order, that it also stands for ``gone``, which must still be in the graph."""
    first, second = sorted((kept, gone))
    kept.meta[LAUNCHES] = tuple(name for node in (first, second) for name in node.meta.get(LAUNCHES, (node.name,)))


def erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase ``node``, which nobody reads, and every node that only it needed and that has no effect besides its result."""
    queue = [node]
    for gone in queue:
        sources = gone.all_input_nodes
        graph.erase_node(gone)
        queue.extend(source for source in sources if not source.users and _is_idle(source))


def _is_idle(node: fx.Node) -> bool:
    does = effects_of(node)
    return node.op == "get_attr" or (node.op == "call_function" and not does.acts and not does.flight)


def _result(graph: fx.Graph, wait: fx.Node, other: fx.Node, copied: bool) -> fx.Node:
    """What the readers of the wait ``other`` are to read: what ``wait`` gives, or a copy of it, in the shape of ``other``."""
    # Fake values are kept in step by hand: a copy has a storage of its own, a view shares that of what it views.
    is_same = form_of(wait) == form_of(other)
    result = wait
    if copied and other.users:
        result = graph.call_function(_clone, (wait,))
        result.meta = {**other.meta, "val": other.meta.get("val") if is_same else fresh_like(fake_value(wait))}
    if not is_same:
        value = view_of(fake_value(result), other.meta["val"].shape)
        result = graph.call_function(_view, (result, list(value.shape)))
        result.meta = {**other.meta, "val": value}
    return result


NAME = "merge_duplicates"


@transformation(before=("bucket",), keeps_collectives=False)
def merge_duplicates(step: StepGraph, state: dict[str, torch.Tensor], *, again: Again = False) -> StepGraph:
    """Merge launches of ``step``'s graphs that bring the same, each into the first of them; all bits stay the same.

    Two launches bring the same if operator, arguments and ranks are the same and so is the value that they send. That value is
    one node, or the same elements in the same order behind views, copies, casts, waits and pointwise operators. Launches are
    not merged if anything may have written that value between both, or if anybody writes what one of them brings.

    A merged result lives until its last reader, which costs memory. So what is launched again on purpose is left alone: in
    backward what forward launched, and the launches of each microbatch. ``again`` merges that, too: True all of it,
    ``"backward"`` across forward and backward of one microbatch, ``"microbatches"`` across microbatches, within forward and
    within backward. Raises :class:`PlanError` for another ``again``.
    """
    if not any(again is known or (isinstance(known, str) and again == known) for known in get_args(Again)):
        raise PlanError(f'{NAME}: again is {again!r}, expected true, false, "backward" or "microbatches"')
    done: list[str] = []
    left: list[tuple[str, str]] = []
    with collector.paused():
        for phase in step.graphs:
            did, did_not = _merge(step, phase, again)
            done += did
            left += did_not
    return replace(step, transformed=(*step.transformed, Transformed(NAME, tuple(done), tuple(left))))


def _merge(step: StepGraph, phase: Phase, again: Again) -> tuple[list[str], list[tuple[str, str]]]:
    """What was merged in the graph of ``phase``, and what was not, with why."""
    graph_module = step.graphs[phase]
    graph = graph_module.graph
    kept, not_merged = Duplicates(order_of(graph), step.outputs[phase], again).chosen()
    # Everything that is said is said before the first launch is merged: labels are read off the graph as it was.
    labels = Labels(graph, step.inputs[phase], step.outputs[phase])
    done, left = [], list(_left(not_merged, labels))
    for one in kept:
        copies = sum(copied for _, copied in one.merged)
        said = f", copied {copies} times as the graph gives it out" if copies > 1 else ""
        said = ", copied once as the graph gives it out twice" if copies == 1 else said
        done.append(f"{labels.of(one.sent.launch)}: {len(one.merged) + 1} launches are 1{said}")
    for one in kept:
        for sent, copied in one.merged:
            merge(graph, one.sent.launch, sent, copied)
    if kept:
        graph_module.recompile()
    return done, left


def _left(left: Sequence[UnmergedLaunch], labels: Labels) -> Iterator[tuple[str, str]]:
    """(launch, reason) of each one left; those left on purpose, maybe hundreds, are one for each kind, direction and reason."""
    on_purpose: dict[tuple[str, str, str], list[fx.Node]] = {}
    for one in left:
        if not one.on_purpose:
            yield labels.of(one.launch), one.why
            continue
        key = (str(collectives.launch_kind(one.launch)), labels.direction(one.launch), one.why)
        on_purpose.setdefault(key, []).append(one.launch)
    for (kind, direction, why), launches in on_purpose.items():
        yield f"{kind} of {some(list(dict.fromkeys(map(labels.carried, launches))))} ({direction})", why
