"""What each updated parameter and state is made of: gradients and inputs; and which reductions brought those gradients.

Operators on lists (foreach, fused) are followed item by item: the third result is made of the third item of each list. A
gradient that went in element by element is told from one of which only a number went in, such as a norm to clip by: with a norm
over all gradients each parameter is made of the norms of all, but of its own gradient alone. Sets of names are bit masks. Each
gradient has two neighbouring bits, the lower one for its elements and the higher one for its norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph.collectives import REDUCTIONS, launch_kind, waits_of
from pytest_fxbucket.graph.compute import computes, is_reduced
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.graph.follow import FollowedValues, follow
from pytest_fxbucket.graph.gradients import Gradients
from pytest_fxbucket.graph.ops import operator_name, returned
from pytest_fxbucket.graph.storages import StoragePlace, is_part, place
from pytest_fxbucket.graph.updates import UPDATED, is_scalar
from pytest_fxbucket.graph.walks import ancestors, readers_of

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.step.roles import Value

_INPUTS = (*UPDATED, "hyper", "carried")
"""A learning rate that was carried from the call before has its own name still."""
ON_LISTS = ("aten::_foreach_", "aten::_fused_")
"""Beginnings of the names of operators on lists of tensors."""
Bits = int | list[int]
"""Bit mask of what a value is made of; for a list one mask for each item."""


@dataclass(frozen=True, slots=True)
class Update:
    """A parameter or an optimizer state that the step makes anew or writes in place."""

    role: str
    """param or state."""
    fqn: str
    gradients: frozenset[str]
    """FQNs of the parameters whose gradients go in element by element."""
    norms: frozenset[str]
    """FQNs of the parameters whose gradients go in as one number only: through a reduction to one element, as a norm is."""
    inputs: frozenset[str]
    """FQNs of the parameters, states and learning rates that go in."""


def updates_of(
    graph: fx.Graph,
    updating: Set[fx.Node],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    reduced: Mapping[tuple[fx.Node, fx.Node], Iterable[str]],
) -> Iterator[Update]:
    """Every parameter and state that ``updating`` nodes update, in order of the outputs, then of the inputs.

    ``reduced`` names, by (reader, value), the gradients that a reader finds in a value.
    """
    if not updating:
        return
    placeholders = graph.find_nodes(op="placeholder")
    roles = dict(zip(placeholders, inputs, strict=True))
    results = [(n, v) for n, v in zip(returned(graph.output_node()), outputs, strict=True) if hasattr(n, "users")]
    walk = _Walk(roles, {node: value.fqn for node, value in results if value.role == "grad"}, reduced)
    for node in graph.nodes:
        if node in updating:
            walk.visit(node)
    done = {value.key for _, value in results}
    written = [(node, value) for node, value in roles.items() if node in walk.written and value.key not in done]
    for node, value in [*results, *written]:
        is_new = node in updating or node in walk.written
        if value.role in UPDATED and is_new:
            yield Update(value.role, value.fqn, *walk.named(walk.total(node)))


class _Walk:
    def __init__(
        self,
        roles: Mapping[fx.Node, Value],
        gradients: Mapping[fx.Node, str],
        reduced: Mapping[tuple[fx.Node, fx.Node], Iterable[str]],
    ) -> None:
        self.roles, self.gradients, self.reduced = roles, gradients, reduced
        self.known: dict[fx.Node, Bits] = {}
        self.written: dict[fx.Node, dict[tuple[Any, ...], tuple[StoragePlace, int]]] = {}
        """Masks of in-place writes, by storage and then by part of it: gradients that were reduced together share a storage."""
        self.bit: dict[tuple[bool, str], int] = {}
        """The bit of each (is a gradient, FQN)."""
        self.labels: list[str] = []
        """FQN of each bit."""
        self.gradient_bits = 0
        self.norm_bits = 0
        """Each is the next higher bit above that of a gradient."""
        self.sets: dict[int, frozenset[str]] = {}

    def visit(self, node: fx.Node) -> None:
        if node.target is getitem:
            self.known[node] = self._item(node)
            return
        lists = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, (list, tuple)) and _has_nodes(arg)]
        if lists and operator_name(node).startswith(ON_LISTS):
            self._visit_lists(node, lists)
            return
        bits = self._of(node, node.all_input_nodes)
        bits = self._as_norm(bits) if is_reduced(node) else bits
        self.known[node] = bits
        for target in written_arguments(node):
            self._write(target, bits)

    def total(self, node: fx.Node) -> int:
        """Mask of all that ``node``'s value is made of by now, writes in place included."""
        bits = self.known.get(node, 0)
        bits = bits if isinstance(bits, int) else _union(bits)
        return bits | self._written_to(node)

    def named(self, bits: int) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """(gradients, norms, inputs) that ``bits`` stand for. Equal sets are the same object: with clipping they are large."""
        gradients, norms = bits & self.gradient_bits, bits & self.norm_bits
        return self._set(gradients), self._set(norms), self._set(bits ^ gradients ^ norms)

    def _as_norm(self, bits: int) -> int:
        """``bits`` with each gradient replaced by its norm."""
        gradients = bits & self.gradient_bits
        return bits ^ gradients | gradients << 1

    def _set(self, bits: int) -> frozenset[str]:
        if bits not in self.sets:
            self.sets[bits] = frozenset(self.labels[at] for at in _ones(bits))
        return self.sets[bits]

    def _visit_lists(self, node: fx.Node, lists: Sequence[Sequence[Any]]) -> None:
        # One lane for each item of the longest lists. All else that the node is given, shorter lists included, goes into every
        # lane.
        length = max(map(len, lists))
        lists = [one for one in lists if len(one) == length]
        in_lists = {item for one in lists for item in one}
        whole = self._of(node, [source for source in node.all_input_nodes if source not in in_lists])
        lanes = [whole | self._of(node, [n for n in items if hasattr(n, "users")]) for items in zip(*lists, strict=True)]
        lanes = [self._as_norm(bits) for bits in lanes] if is_reduced(node) else lanes
        self.known[node] = lanes
        targets = set(written_arguments(node))
        for items, bits in zip(zip(*lists, strict=True), lanes, strict=True):
            for target in targets.intersection(items):
                self._write(target, bits)

    def _item(self, node: fx.Node) -> Bits:
        source, index = node.args
        assert isinstance(source, torch.fx.Node)
        bits = self.known.get(source, 0)
        is_one = isinstance(node.meta.get("val"), torch.Tensor)
        return bits[index] if isinstance(bits, list) and is_one and isinstance(index, int) else bits

    def _of(self, reader: fx.Node, sources: Iterable[fx.Node]) -> int:
        bits = 0
        for source in sources:
            bits |= self.total(source) if source in self.known else self._outside_mask(reader, source)
        return bits

    def _outside_mask(self, reader: fx.Node, source: fx.Node) -> int:
        """Mask of a value that comes into the update from outside: an input, or a gradient."""
        bits = self._written_to(source)
        value = self.roles.get(source)
        if value is not None:
            return bits | self._bit(False, value.fqn) if value.role in _INPUTS else bits
        if source in self.gradients:
            return bits | self._bit(True, self.gradients[source])
        for fqn in self.reduced.get((reader, source), ()):
            bits |= self._bit(True, fqn)
        return bits

    def _bit(self, is_gradient: bool, fqn: str) -> int:
        known = self.bit.get((is_gradient, fqn))
        if known is None:
            known = self.bit[is_gradient, fqn] = 1 << len(self.labels)
            self.labels.append(fqn)
            if is_gradient:
                self.labels.append(fqn)
                self.gradient_bits |= known
                self.norm_bits |= known << 1
        return known

    def _write(self, target: fx.Node, bits: int) -> None:
        to = place(target)
        parts = self.written.setdefault(to.storage, {})
        key = tuple(to.parts.items())
        parts[key] = to, (parts[key][1] if key in parts else 0) | bits

    def _written_to(self, node: fx.Node) -> int:
        """Mask of all that was written to the place where ``node`` lies."""
        if not self.written:
            return 0
        here = place(node)
        return _union(bits for there, bits in self.written.get(here.storage, {}).values() if here.meets(there))


def _has_nodes(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, torch.fx.Node) for item in items)


def _union(bits: Iterable[int]) -> int:
    total = 0
    for one in bits:
        total |= one
    return total


def _ones(bits: int) -> Iterator[int]:
    """Places of the ones in ``bits``, ascending."""
    while bits:
        low = bits & -bits  # The lowest one alone.
        yield low.bit_length() - 1
        bits ^= low


# The reductions of a graph: whose gradients each brings, and which nodes made those gradients.
#
# A gradient is named after the output that returns it or, if none does, after the parameter that is updated with it.


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """A launch that reduces gradients."""

    launch: fx.Node
    level: int
    """How many reductions its members went through before, as in hybrid sharding; the most of any member."""
    fqns: tuple[str, ...]
    """Parameters whose gradients it brings, in byte order; an empty name for a member that is no parameter's gradient."""
    makers: tuple[fx.Node, ...]
    """For each member the node that computed the gradient, before anything moved or packed it."""


def reductions_of(graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value]) -> list[GradientReduction]:
    """All reductions of ``graph``, in order of launch."""
    found = follow(graph, {node for node in graph.nodes if is_result(node)})
    reducing = [node for node, sent in found.sent.items() if sent.launch.kind in REDUCTIONS]
    placeholders = graph.find_nodes(op="placeholder")
    roles = {node: value.role for node, value in zip(placeholders, inputs, strict=True)}
    gradients = Gradients(found, graph.output_node(), outputs, roles, inputs)
    _name_by_updates(graph, inputs, outputs, [node for node in reducing if _is_last(node)], gradients)
    return [_reduction(node, [piece.source for piece in found.sent[node].content], found, gradients) for node in reducing]


def _reduction(launch: fx.Node, numbers: Sequence[int], found: FollowedValues, gradients: Gradients) -> GradientReduction:
    known = [number for number in numbers if found.sources[number] is not None]
    levels = [gradients.level(number) for number in known]
    fqns = tuple(gradients.names.get(number, "") for number in known)
    return GradientReduction(launch, max(levels, default=0), fqns, tuple(found.table.known(number).node for number in known))


def is_result(node: fx.Node) -> bool:
    """Whether ``node`` is one of several tensors that an operator computed."""
    if not is_part(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return computes(node.all_input_nodes[0])


def _name_by_updates(
    graph: fx.Graph, inputs: Sequence[Value], outputs: Sequence[Value], launches: Sequence[fx.Node], gradients: Gradients
) -> None:
    """Name the pieces of ``launches`` that no output named: each after the one parameter that is updated with it alone."""
    # Numbers of unnamed pieces go into the walk over the updates as if they were names of gradients. An update that is made of
    # exactly one of them tells whose gradient that piece is.
    found = gradients.found
    unnamed = {piece.source for node in launches for piece in found.sent[node].content if piece.source not in gradients.names}
    if not unnamed:
        return
    behind = readers_of(wait for node in launches for wait in waits_of(node))
    labels = {
        (use.reader, use.value): numbers
        for use in found.uses
        if use.reader in behind and (numbers := [str(one.source) for one in use.content if one.source in unnamed])
    }
    updating = behind - ancestors([value for _, value in labels])
    for update in updates_of(graph, updating, inputs, outputs, labels):
        if update.role == "param" and len(update.gradients) == 1:
            (label,) = update.gradients
            if label.isdecimal():
                gradients.name(int(label), update.fqn)


def _is_last(launch: fx.Node) -> bool:
    """Whether the result of ``launch`` leads to no other launch but of norms.

    So a gradient is told from an activation: what the sum of an activation leads to is sent again.
    """
    behind = readers_of(waits_of(launch))
    return not any(launch_kind(node) is not None and not is_scalar(node) for node in behind)
