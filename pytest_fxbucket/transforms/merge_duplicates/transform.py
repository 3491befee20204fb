"""The same value gathered or reduced twice is gathered or reduced once; never across a write to that value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from pytest_fxbucket import collector
from pytest_fxbucket.capture.roles import Told
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.transforms.merge_duplicates.choosing import Again, Choice, Left, choose
from pytest_fxbucket.transforms.merge_duplicates.labels import Labels, labelled
from pytest_fxbucket.transforms.merge_duplicates.merging import merge
from pytest_fxbucket.transforms.traits import transformation

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.capture.roles import Phase, StepGraph

NAME = "merge_duplicates"


@transformation(before=("bucket",), keeps_collectives=False)
def merge_duplicates(step: StepGraph, state: dict[str, torch.Tensor], *, again: Again = False) -> StepGraph:
    """Merge launches of ``step``'s graphs that bring the same, each into the first of them; all bits stay the same.

    Two bring the same if operator, arguments and ranks are the same and so is the value that they send: a node itself, or the
    same elements in the same order behind views, copies, casts, waits and what computes element by element. Not if anything may
    have written that value between both, or if anybody writes what one of them brings. What arrived lives until its last
    reader, which costs memory, so what is launched again on purpose is left alone: in backward what forward launched, and in
    each microbatch. ``again`` merges that, too: True all of it, ``"backward"`` within a microbatch, ``"microbatches"`` within
    forward and within backward. Raises :class:`PlanError` for another ``again``.
    """
    if not any(again is known or (isinstance(known, str) and again == known) for known in _choices()):
        raise PlanError(f'{NAME}: again is {again!r}, expected true, false, "backward" or "microbatches"')
    done: list[str] = []
    left: list[tuple[str, str]] = []
    with collector.paused():
        for phase in step.graphs:
            did, did_not = _merge(step, phase, again)
            done += did
            left += did_not
    return replace(step, told=(*step.told, Told(NAME, tuple(done), tuple(left))))


def _choices() -> Sequence[object]:
    return get_args(Again)


def _merge(step: StepGraph, phase: Phase, again: Again) -> tuple[list[str], list[tuple[str, str]]]:
    """What was merged in the graph of ``phase``, and what was not, with why."""
    graph_module = step.graphs[phase]
    graph = graph_module.graph
    choice = choose(order_of(graph), step.outputs[phase], again)
    labels = Labels(graph, step.inputs[phase], step.outputs[phase])
    done, left = list(_done(choice, labels)), list(_left(choice.left, labels))
    for kept in choice.kept:
        for sent, copied in kept.merged:
            merge(graph, kept.sent.launch, sent, copied)
    if choice.kept:
        graph_module.recompile()
    return done, left


def _done(choice: Choice, labels: Labels) -> Iterator[str]:
    for kept in choice.kept:
        copies = sum(copied for _, copied in kept.merged)
        copied = f", copied {copies} times as the graph gives it out" if copies > 1 else ""
        copied = copied or (", copied once as the graph gives it out twice" if copies else "")
        yield f"{labels.of(kept.sent.launch)}: {len(kept.merged) + 1} launches are 1{copied}"


def _left(left: Sequence[Left], labels: Labels) -> Iterator[tuple[str, str]]:
    """An entry for each launch; for those left on purpose, maybe hundreds, one for each kind, direction and reason."""
    on_purpose: dict[tuple[str, str, str], list[fx.Node]] = {}
    for one in left:
        if not one.on_purpose:
            yield labels.of(one.launch), one.why
            continue
        key = (str(collectives.launch_kind(one.launch)), labels.direction(one.launch), one.why)
        on_purpose.setdefault(key, []).append(one.launch)
    for (kind, direction, why), launches in on_purpose.items():
        yield labelled(kind, list(dict.fromkeys(map(labels.carried, launches))), direction), why
