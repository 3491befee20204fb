"""One rank's graph before and after a pass: both are walked with one table, then their ends are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.graph.effects import PURE, effects_of
from pytest_fxbucket.graph.ops import operator_name, overload
from pytest_fxbucket.same.exact import Ranks
from pytest_fxbucket.same.table import ExpressionTable
from pytest_fxbucket.same.walk import Walk

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.roles import Value

_ROLES = {"grad": "the gradient of", "param": "parameter", "loss": "the loss", "held": "attribute", "value": "value"}


@dataclass(frozen=True, slots=True)
class GraphSide:
    """One of two graphs that are compared, with the module that holds its constants, its inputs and its outputs."""

    graph: fx.Graph
    root: torch.nn.Module
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    members: Mapping[str, Ranks]
    """Ranks of each process group that it names."""


@dataclass
class GraphComparison:
    """The result of comparing two graphs."""

    differences: list[ExpressionDifference] = field(default_factory=list)
    waste: list[WastedCompute] = field(default_factory=list)
    outputs: int = 0
    """Number of outputs that stand for the same expression as before."""
    written: int = 0
    """Number of inputs that the graph before writes."""
    left: dict[str, str] = field(default_factory=dict)
    """Names of what cannot be shown to be the same, each with the reason."""
    added: list[str] = field(default_factory=list)
    """Names of inputs and outputs that only one of the graphs has."""
    sent: tuple[list[tuple[Ranks, int]], list[tuple[Ranks, int]]] = ((), ())  # type: ignore[assignment]  # two empty ones
    """For the graph before and the one after: the ranks of each launch, and the expression of what it sends."""


Walked = dict[object, Walk]
"""Walks that were done already with a table, by identity and groups of their graphs."""


def compared(table: ExpressionTable, before: GraphSide, after: GraphSide, known: Walked) -> GraphComparison:
    """``after`` compared with ``before``, which is walked once for all calls that share ``known``.

    Raises PassError for a graph that cannot be run.
    """
    # Which inputs share a storage is read off the graph before, for both. Then numbers are compared: of outputs, of what inputs
    # and attributes hold at the end, of the random state, of effects on the world.
    homes = _homes(before)
    # A walk that is known holds the nodes of its graph, so no other graph gets that id.
    key = id(before.graph), tuple(sorted(before.members.items()))
    if key not in known:
        known[key] = _walked(table, before, homes)
    one, other = known[key], _walked(table, after, homes)
    ends = [_pairs(before.outputs, one.outputs(), after.outputs, other.outputs())]
    ends.append(_pairs(before.inputs, one.left_in_inputs(), after.inputs, other.left_in_inputs()))
    outputs, inputs = ([PairedMeaning(_text(name), a, b) for name, (a, b) in end.items() if a and b] for end in ends)
    inputs = [PairedMeaning(f"{pair.name} as the step leaves it", pair.before, pair.after) for pair in inputs]
    others = [
        PairedMeaning("the random state", one.draws, other.draws),
        PairedMeaning("what is done to the world", one.world, other.world),
    ]
    kept = one.left_in_attributes(), other.left_in_attributes()
    names = dict.fromkeys([*kept[0], *kept[1]])
    others += [PairedMeaning(f"attribute {n} as the step leaves it", kept[0].get(n, 0), kept[1].get(n, 0)) for n in names]
    found = GraphComparison(added=[_text(name) for end in ends for name, (a, b) in end.items() if not (a and b)])
    found.sent = one.sent, other.sent
    shaky = _shaky(table)
    parted = differences(table, other, [*outputs, *inputs, *others])
    found.left = {name: _why(table, d.after) for d in parted if _is_excused(table, shaky, d) for name in d.names}
    found.differences = [d for d in parted if not _is_excused(table, shaky, d)]
    differing = {name for d in parted for name in d.names}
    equal = [pair for pair in (*outputs, *inputs, *others) if pair.name not in differing]
    # Equal numbers prove nothing if part of the expression cannot be followed.
    found.left |= {pair.name: _why(table, pair.after) for pair in equal if shaky and shaky[pair.after]}
    found.outputs = sum(pair.name not in differing and pair.name not in found.left for pair in outputs)
    # An input that nobody writes still stands for itself at the end.
    found.written = sum(table.keys[number][0] != "input" for number in one.left_in_inputs())
    found.waste = waste(one, other, table.within([*other.outputs(), *other.left_in_inputs(), other.draws, other.world]))
    return found


def _walked(table: ExpressionTable, side: GraphSide, homes: Mapping[str, Any]) -> Walk:
    names = [_input(name) for name in _names(side.inputs)]
    places = {place: homes[name] for place, name in enumerate(names) if name in homes}
    return Walk(side.graph, side.root, table, names, side.members, places)


Name = tuple[str, str, int]


def _names(values: Iterable[Value]) -> list[Name]:
    """Role, FQN, and a count among equal ones. Values of two graphs are paired by these, since one may have more of them."""
    seen: Counter[tuple[str, str]] = Counter()
    found: list[Name] = []
    for value in values:
        seen[value.role, value.fqn] += 1
        found.append((value.role, value.fqn, seen[value.role, value.fqn]))
    return found


def _text(name: Name) -> str:
    role, fqn, _ = name
    return " ".join(filter(None, (_ROLES.get(role, role), fqn)))


def _input(name: Name) -> str:
    role, fqn, number = name
    return f"{fqn or role}{'' if role == 'param' else f' ({role})'} {number}"


def _pairs(
    before: Sequence[Value], numbers: Sequence[int], after: Sequence[Value], others: Sequence[int]
) -> dict[Name, tuple[int, int]]:
    """By name the expressions before and after; 0 where a graph has no value of that name."""
    one, other = (dict(zip(_names(v), n, strict=True)) for v, n in ((before, numbers), (after, others)))
    return {name: (one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def _homes(side: GraphSide) -> dict[str, Any]:
    """The storage of each input that shares one with another input, by the fake values of the graph."""
    nodes = [node for node in side.graph.nodes if node.op == "placeholder"]
    keys = {}
    for name, node in zip(_names(side.inputs), nodes, strict=True):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            try:
                keys[_input(name)] = ("input", storage_key(value))
            except (NotImplementedError, RuntimeError):
                continue
    often = Counter(keys.values())
    return {name: key for name, key in keys.items() if often[key] > 1}


def _shaky(table: ExpressionTable) -> bytearray:
    """For each expression whether any part of it is not followed; empty if all are. Parts have lower numbers than wholes."""
    if not table.left:
        return bytearray()
    found = bytearray(len(table))
    for number in range(len(table)):
        found[number] = number in table.left or any(found[part] for part in table.parts(number))
    return found


def _is_excused(table: ExpressionTable, shaky: bytearray, one: ExpressionDifference) -> bool:
    """Whether the difference ``one`` has something that is not followed and that the graph before does not have there."""
    if not shaky or not shaky[one.after]:
        return False
    # What both graphs have unfollowed is one expression in both, and cannot be the reason for the difference.
    new = {number for number in table.within([one.after]) if number in table.left}
    return not new <= table.within([one.before])


def _why(table: ExpressionTable, number: int) -> str:
    return next((table.left[one] for one in sorted(table.within([number])) if one in table.left), "")


# Differences of two graphs, number by number: values that stand for another expression, and compute in vain.


@dataclass(frozen=True, slots=True)
class PairedMeaning:
    """The expressions that one value stands for in the graph before and in the graph after."""

    name: str
    """Its name in messages."""
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class ExpressionDifference:
    """Two expressions that differ in themselves, not only in their parts."""

    before: int
    after: int
    node: fx.Node | None
    """Node of the graph after at which the expression ``after`` is met first."""
    names: tuple[str, ...]
    """Names of the values that differ because of it, for messages."""


@dataclass(frozen=True, slots=True)
class WastedCompute:
    """Compute that changes no value."""

    node: fx.Node
    number: int
    times: tuple[int, int]
    """How often the expression is computed before and after."""


def differences(table: ExpressionTable, after: Walk, pairs: Sequence[PairedMeaning]) -> list[ExpressionDifference]:
    """The innermost differences of all ``pairs`` that are not equal, in order of the graph after."""
    place = {node: index for index, node in enumerate(after.nodes)}
    found: dict[tuple[int, int], list[str]] = {}
    for pair in pairs:
        if pair.before != pair.after:
            for parting in _partings(table, pair.before, pair.after):
                found.setdefault(parting, []).append(pair.name)
    made = [ExpressionDifference(b, a, after.node_of.get(a), tuple(names)) for (b, a), names in found.items()]
    return sorted(made, key=lambda one: len(place) if one.node is None else place[one.node])


def _partings(table: ExpressionTable, before: int, after: int) -> Iterator[tuple[int, int]]:
    """The innermost pairs of expressions that differ in themselves, not only in what they are made of."""
    # Go down both expressions at once as long as they differ in parts alone. Each pair is met once: expressions share parts, so
    # there are exponentially more paths than pairs.
    queue, met = [(before, after)], {(before, after)}
    while queue:
        one, other = queue.pop()
        inner = _inner(table, one, other)
        if not inner:
            yield one, other
        for pair in inner:
            if pair not in met:
                met.add(pair)
                queue.append(pair)


def _inner(table: ExpressionTable, one: int, other: int) -> list[tuple[int, int]]:
    """Pairs of differing parts of two expressions that are alike except for these; empty if they are not alike."""
    parts, others = table.parts(one), table.parts(other)
    if len(parts) != len(others) or _shape(table, one) != _shape(table, other):
        return []
    return [(a, b) for a, b in zip(parts, others, strict=True) if a != b]


def _shape(table: ExpressionTable, number: int) -> object:
    """An expression with the numbers of its parts blanked out."""

    def blank(key: object) -> object:
        if type(key) is int:
            return None
        return tuple(map(blank, key)) if type(key) is tuple else key

    return blank(table.keys[number])


def waste(before: Walk, after: Walk, read: set[int]) -> list[WastedCompute]:
    """What the graph after computes in vain: again though the graph before has it, or anew though nobody reads it.

    ``read`` are all expressions that the outputs are made of. New compute that they are made of is a difference, not waste.
    Sizes are not looked at: they cost nothing, and stand for numbers wherever they are read.
    """
    # More often than before is waste, unless the graph before does not have it at all and an output needs it.
    more = [n for n, count in after.computed.items() if count > before.computed.get(n, 0)]
    return [
        WastedCompute(after.node_of[n], n, (before.computed.get(n, 0), after.computed[n]))
        for n in more
        if (before.computed.get(n, 0) or n not in read) and not _is_size(after.node_of[n])
    ]


def _is_size(node: fx.Node) -> bool:
    # By what is called, never by what the pass says that it gives.
    return operator_name(node).startswith("aten::sym_") if overload(node) is not None else effects_of(node) is PURE


def crosswise(sent: Mapping[int, Sequence[tuple[Ranks, int]]]) -> dict[Ranks, tuple[int, dict[int, int]]]:
    """Groups whose ranks somewhere send what does not belong together; each with (number of the launch, what each rank sends).

    The launch is the first such one.
    """
    # Expressions name inputs, which are called alike on all ranks: ranks that each send their own part of one thing agree.
    on: dict[Ranks, dict[int, list[int]]] = {}
    for rank, launches in sent.items():
        for group, number in launches:
            on.setdefault(group, {}).setdefault(rank, []).append(number)
    found = {}
    for group, rows in on.items():
        # If one rank launches more often than another, ``collectives`` says so.
        for place, numbers in enumerate(zip(*rows.values(), strict=False)):
            if len(set(numbers)) > 1:
                found[group] = place, dict(zip(rows, numbers, strict=True))
                break
    return found
