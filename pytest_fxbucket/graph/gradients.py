"""Which reductions brought which returned gradient, and which nodes made, added or moved the gradient before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.collectives import REDUCTIONS, launch_kind
from pytest_fxbucket.graph.contents import Runs, dtype_of
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.graph.ops import operator_name, returned
from pytest_fxbucket.graph.sending import UNEVEN
from pytest_fxbucket.graph.walks import walked

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.follow import FollowedValues, Use
    from pytest_fxbucket.step.roles import Role, Value

_SUMS = ("add", "mul", "div", "_to_copy", "view", "clone", "reshape", "detach", "alias")


class Gradients:
    """The gradients that a graph returns, each traced back to the reductions that brought it.

    A piece is what one reduction brought of one source. Compute between reduction and output, such as scaling, is passed
    through. A gradient may be one whole piece, or the sum of several, as that of a layer used twice. A gradient made of parts
    of pieces is a problem, unless only the padding of the parameter is cut off. If one reduction sends the result of another
    (reduce-scatter, then all-reduce), both get the name of the final gradient. Of a gradient that is written in place, by
    clipping say, the content at the first read counts.
    """

    def __init__(
        self,
        found: FollowedValues,
        output: fx.Node,
        outputs: Sequence[Value],
        role: Mapping[fx.Node, Role],
        inputs: Sequence[Value],
    ) -> None:
        self.found, self.role = found, role
        self.held = {value.fqn: prod(value.shape) for value in inputs if value.role == "param"}
        """Elements of each parameter, with padding."""
        self.read_by: dict[fx.Node, list[Use]] = {}
        for use in found.uses:
            self.read_by.setdefault(use.reader, []).append(use)
        self.names: dict[int, str] = {}
        """FQN of the parameter, by the number of the reduced source."""
        self.before: dict[int, int] = {}
        """From the number of a reduced source to that of the earlier reduction which it was made from, in hybrid sharding."""
        self.behind: set[fx.Node] = set()
        """Compute on reduced pieces alone, such as their scaling. A pass that moves waits moves it along."""
        self.problems: list[str] = []
        # What the output reads of each gradient; if that was overwritten since, what its first reader read.
        whole = {use.value: use.content for use in self.read_by.get(output, ())}
        first = {use.value: use.content for use in reversed(found.uses) if use.value in whole}
        whole = {node: runs if any(self._is_reduced(r.source) for r in runs) else first[node] for node, runs in whole.items()}
        for node, value in zip(returned(output), outputs, strict=True):
            if value.role == "grad" and hasattr(node, "all_input_nodes"):
                self._name(node, value, [whole[node]] if node in whole else self._reduced_before(node))

    def _name(self, node: fx.Node, value: Value, contents: Sequence[Runs]) -> None:
        fqn = value.fqn
        pieces = sorted({one.source for runs in contents for one in runs if self._is_reduced(one.source)})
        if not pieces:
            return
        if all(self._is_whole(runs, value) for runs in contents) and (len(pieces) == 1 or self._adds(node, pieces)):
            for number in pieces:
                self.name(number, fqn)
            return
        makers = dict.fromkeys(self._maker(number) for number in pieces)
        self.problems.append(
            f"the gradient returned for {fqn} is not one whole piece of a reduction, but made by {node.target} ({node.name}) "
            f"from what was reduced of {', '.join(list(makers)[:4])}"
        )

    def _reduced_before(self, node: fx.Node) -> list[Runs]:
        """Contents of followed values that ``node`` is computed from; empty if gathered data or the batch goes into it, too."""
        met: list[fx.Node] = []
        found: list[Any] = []
        for current in walked([node], self._computed_from):
            uses = self.read_by.get(current, [])
            gathered = any(one.rank >= 0 for use in uses for one in use.content)
            if gathered or current in self.found.sent or self.role.get(current) == "batch":
                return []
            met.append(current)
            found += [use.content for use in uses]
        if any(self._is_reduced(one.source) for runs in found for one in runs):
            self.behind.update(met)
        return found

    def _computed_from(self, node: fx.Node) -> list[fx.Node]:
        """What goes into ``node`` element by element, without followed values."""
        read = {use.value for use in self.read_by.get(node, [])}
        return [source for source in _carriers(node) if source not in read]

    def name(self, number: int, fqn: str) -> None:
        """Name the piece ``number`` and the pieces of earlier reductions that it was made from, unchanged or scaled."""
        while self._is_reduced(number):
            self.names[number] = fqn
            source = self.found.table.known(number)
            earlier = source.sent if self._is_reduced(source.sent) else self._scaled(source.node)
            if earlier < 0:
                return
            self.before[number] = earlier
            number = earlier

    def first(self, number: int) -> int:
        """The piece that the first reduction brought, of several in a row of which the last one brought ``number``."""
        while number in self.before:
            number = self.before[number]
        return number

    def level(self, number: int) -> int:
        """How many reductions the piece ``number`` went through before its own, as in hybrid sharding."""
        return 1 + self.level(self.before[number]) if number in self.before else 0

    def _scaled(self, node: fx.Node) -> int:
        """Number of the one whole piece that ``node`` scales; -1 if ``node`` is made from anything else."""
        contents = self._reduced_before(node)
        pieces = {one.source for runs in contents for one in runs if self._is_reduced(one.source)}
        whole = len(pieces) == 1 and all(self._is_whole(runs) for runs in contents)
        return pieces.pop() if whole and self._adds(node, list(pieces)) else -1

    def _adds(self, node: fx.Node, pieces: Sequence[int]) -> bool:
        """Whether ``node`` can be the sum of ``pieces``: all have one size, and all nodes between add, scale, cast or view."""
        if len({self.found.table.known(number).numel for number in pieces}) > 1:
            return False
        made = walked([node], lambda one: (source for source in self._computed_from(one) if source.op != "placeholder"))
        calls = (operator_name(_foreach_of(one) or one) for one in made)
        return all(name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_") in _SUMS for name in calls)

    def _is_reduced(self, number: int) -> bool:
        source = self.found.sources[number] if number >= 0 else None
        return source is not None and source.launch is not None and launch_kind(source.launch) in REDUCTIONS

    def _is_whole(self, runs: Runs, value: Value | None = None) -> bool:
        """Whether ``runs`` are one whole piece; without padding, if the gradient ``value`` is smaller than its parameter."""
        source = self.found.sources[runs[0].source] if len(runs) == 1 else None
        if source is None or runs[0].start:
            return False
        numel = source.numel
        if value is not None and prod(value.shape) < self.held.get(value.fqn, 0) == numel:
            numel = prod(value.shape)
        return runs[0].length == numel * dtype_of(runs[0].form).itemsize

    def _maker(self, number: int) -> str:
        """Operator and node that computed what a reduction sent."""
        source = self.found.sources[number]
        return f"{source.node.target} ({source.node.name})" if source is not None else ""


def _carriers(node: fx.Node) -> list[fx.Node]:
    """Inputs that go into ``node`` element by element.

    Of a foreach only the operands of this one result count. Scalars are left out: they only scale.
    """
    call = _foreach_of(node)
    if call is None:
        sources = node.all_input_nodes
    else:
        place: Any = node.args[1]
        lists = [arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, (list, tuple))]
        sources = [one[place] for one in lists if len(one) > place and hasattr(one[place], "all_input_nodes")]
    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor) or not made.dim():
        return sources
    return [one for one in sources if not isinstance(held := one.meta.get("val"), torch.Tensor) or held.dim()]


def _foreach_of(node: fx.Node) -> fx.Node | None:
    """The foreach operator of which ``node`` is one result; None if there is none."""
    source: Any = node.args[0] if node.target is getitem else None
    return source if source is not None and operator_name(source).startswith("aten::_foreach_") else None


# Gradients that the model itself assembles by moving data (joined, sliced, expanded, permuted) before they are sent.
#
# Backward of a weight that is read in chunks, or summed, makes such gradients. They count as new sources at the node where the
# gradient is whole: the pack reads it there, and all movement before is the model's, like compute. Those nodes are found in the
# graph that a pass is given, where each launch sends one gradient. In the graph that comes out they are known by their names.


_CASTS = ("aten::_to_copy", "prims::convert_element_type")


def begun_in(found: FollowedValues) -> set[fx.Node]:
    """Nodes that only move data and give a whole gradient, whose pieces cannot be followed from where they were computed."""
    return {
        node for launch, sent in found.sent.items() if sent.problem == UNEVEN for node in _gradient(launch) if moves_data(node)
    }


def named_in(graph: fx.Graph, names: Collection[str]) -> set[fx.Node]:
    """The nodes called ``names`` that are left in ``graph``."""
    return {node for node in graph.nodes if node.name in names} if names else set()


def _gradient(launch: fx.Node) -> Iterator[fx.Node]:
    """The one node that the reduce-scatter ``launch`` sends, before any cast; nothing for other launches."""
    node: Any = collectives.sent_by(launch)
    if collectives.launch_kind(launch) != "reduce_scatter" or isinstance(node, (list, tuple)):
        return
    while operator_name(node) in _CASTS:
        (node,) = node.all_input_nodes
    yield node


# Summands of a gradient that is reduced: the backward of each microbatch makes one.


_SCALES = ("mul", "div")


def contributions(made: fx.Node, position: Mapping[fx.Node, int], forward: Sequence[int]) -> list[fx.Node]:
    """Nodes that make the summands of ``made``, if these come from several microbatches; else ``made`` alone.

    ``forward`` holds the positions of forward compute, ascending. If some of it stands between two summands, they come from
    different microbatches. Summands of one backward, as of a layer that is used twice, are one gradient.
    """
    parts = [node for node in walked([made], _added) if not _added(node)]
    places = sorted(position[node] for node in parts)
    several = len(parts) > 1 and bisect_right(forward, places[0]) < bisect_right(forward, places[-1])
    return parts if several else [made]


def _added(node: fx.Node) -> list[fx.Node]:
    """The inputs that ``node`` adds, scales by a number, moves or casts; empty if it does none of these."""
    name = operator_name(node).removeprefix("aten::").rstrip("_") if node.op == "call_function" else ""
    sources = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    adds = name == "add" and len(sources) == 2 and len({one.meta["val"].shape for one in sources}) == 1
    scales = name in _SCALES and len(sources) == 1
    return sources if adds or scales or (len(sources) == 1 and node.op == "call_function" and moves_data(node)) else []
