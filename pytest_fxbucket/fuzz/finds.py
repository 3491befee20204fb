"""A find: a fault of a pass, its kind and sentence, and what tells it from other finds.

Two finds with one signature are taken for one if the trial of the second has all features that the first one's has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.effects import effects_of, written_arguments
from pytest_fxbucket.graph.modules import direction_of, module_stack
from pytest_fxbucket.graph.ops import is_view, operator_name
from pytest_fxbucket.graph.walks import reached

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.fuzz.trial import Trial

RAISED, HANG, VALUES, PLAN, TWICE = KINDS = (
    "exception",
    "would hang",
    "wrong values",
    "plan silently not kept",
    "not idempotent",
)
"""In the order in which they are looked for; the first that is found ends the search in a trial."""

DIFFERS = " differs in "
"""Part of each sentence that says that values differ."""


@dataclass(frozen=True)
class Find:
    """One thing that is not well."""

    kind: str
    says: str
    """A sentence."""
    lines: tuple[str, ...] = ()
    """What else there is to say."""
    features: frozenset[str] = field(default_factory=frozenset)
    """Features of program, plan and options, as :func:`features_of` names them."""

    @property
    def signature(self) -> tuple[str, str]:
        """Kind, and sentence without names and numbers; if values differ the kind alone, whichever they are."""
        return self.kind, "" if DIFFERS in self.says else stripped(self.says)

    @property
    def text(self) -> str:
        """All of it, as a test shows it."""
        return "\n".join([f"{self.kind}: {self.says}", *self.lines])

    def is_of(self, known: Iterable[Find]) -> bool:
        """Whether one of ``known`` has the same signature, and needs no more than this one has."""
        return any(one.signature == self.signature and one.features <= self.features for one in known)


_SAID = re.compile(
    r"\{[^}]*\}|'[^']*'|\"[^\"]*\"|\[[^\]]*\]"  # what is quoted, and lists
    r"|\b\w+(?:\.\w+)+(?: \(\w+\))?"  # operators, with their nodes
    r"|%?\b\w*\d\w*\b|%\w+"
)


def stripped(text: str) -> str:
    """``text`` without what differs from graph to graph: names in quotes, lists, operators, and words with numbers."""
    return " ".join(_SAID.sub("...", text).split())[:160]


# What a trial has that a pass may trip over, in words.


_CASTS = ("aten::_to_copy", "prims::convert_element_type")


def features_of(trial: Trial) -> frozenset[str]:
    """Words for all that the program, plan and options have and that a pass may trip over."""
    if trial.wrong:
        return frozenset([trial.wrong])
    graph = trial.graph_module.graph
    launches = [one for node in graph.nodes if (one := collectives.read_launch(node)) is not None]
    return frozenset([*_of_launches(trial, launches), *_of_nodes(graph), *_of_plan(trial)])


def _of_launches(trial: Trial, launches: list[collectives.Launch]) -> Iterator[str]:
    for one in launches:
        yield one.operator
        if one.group != "0":
            yield "a group of one" if trial.program.ranks(one.group) == 1 else "another group"
        # The parts of a launch of several tensors are waited for one by one.
        if any(len([user for user in part.users if collectives.is_wait(user)]) > 1 for part in (one.node, *one.node.users)):
            yield "waited for twice"
        yield from _of_sent(one)
        buffer = collectives.argument(one.node, "out")
        if isinstance(buffer, torch.fx.Node) and len(buffer.users) > 1:
            yield "a buffer that is read"
    kinds = {(one.kind, value.dtype) for one in launches for value in _values(one.node)}
    # More pairs than kinds: one kind comes in two dtypes, which a pass may put into one bucket.
    if len({kind for kind, _ in kinds}) < len(kinds):
        yield "several dtypes"
    directions = {(one.kind, direction_of(one.node)) for one in launches}
    if len({kind for kind, _ in directions}) < len(directions):
        yield "both directions"
    for kind in collectives.REDUCTIONS:
        yield from _reductions([one for one in launches if one.kind == kind])


def _of_sent(one: collectives.Launch) -> Iterator[str]:
    for source in collectives.tensors_sent(one.node):
        before = reached([source], lambda node: node.all_input_nodes)
        others = [launch for node in before if (launch := collectives.read_launch(node)) is not None]
        if any(other.group == one.group for other in others):
            yield "a launch of what was launched"
        elif others:
            yield "a launch of what was launched on another group"
    for value in _values(one.node):
        if value.dim() == 0:
            yield "a scalar"
        elif any(isinstance(size, torch.SymInt) for size in value.shape):
            yield "a symbolic size"
        elif value.numel() == 0:
            yield "no elements"


def _reductions(launches: list[collectives.Launch]) -> Iterator[str]:
    """Compute on what launches of one kind reduce."""
    read = Counter[torch.fx.Node]()
    for one, following in zip_longest(launches, launches[1:]):
        readers = {reader for wait in collectives.waits_of(one.node) for reader in wait.users if reader.op != "output"}
        read.update(readers)
        if following is not None and any(reader < following.node for reader in readers):
            yield "a reduction that is read before the next"
    if read:
        yield "a reduction that is read"
    if max(read.values(), default=0) > 1:
        yield "reductions that are added"


def _of_nodes(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op != "call_function" or collectives.communicates(node):
            continue
        for written in written_arguments(node):
            yield "a write through an alias" if is_view(written) else "a write"
        if is_view(node):
            yield "a view"
        elif operator_name(node) in _CASTS:
            yield "a cast"
        elif effects_of(node).random:
            yield "random numbers"


def _of_plan(trial: Trial) -> Iterator[str]:
    names = {name for node in trial.graph_module.graph.nodes for name, _ in module_stack(node)}
    if any("['" in name and not name.startswith("L['self']") for name in names):
        yield "a model of another name"
    elif any("." in name for name in names if "[" not in name):
        yield "a model inside another module"
    if isinstance(trial.plan, (list, tuple)) and len(trial.plan) > 1:
        yield "several entries"
    for name, value in trial.options.items():
        yield f"{name} = {value}" if isinstance(value, (str, bool)) else name


def _values(node: fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    return collectives.tensors(value)
