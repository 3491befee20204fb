"""Which reductions made which returned gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph.collectives import REDUCTIONS, launch_kind
from pytest_fxbucket.graph.contents import Runs, dtype_of
from pytest_fxbucket.graph.ops import operator_name

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Role, Value
    from pytest_fxbucket.graph.follow import Followed, Use


_SUMS = ("add", "mul", "div", "_to_copy", "view", "clone", "reshape", "detach", "alias")


def returned(output: fx.Node) -> list[Any]:
    """What the graph returns, a single value as one."""
    values: Any = output.args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]


class Gradients:
    """The gradients that a graph returns, each traced back to the reductions that it is a whole piece of.

    Compute between the reduction and the output, a scaling say, is passed through. A gradient may be the sum of several
    pieces, as that of a layer used twice is; one that is made of parts of pieces is a problem. What a reduction sends of
    another one's result (reduce-scatter, then all-reduce) has the name of what became of it. Of a gradient that is written in
    place, by clipping say, that counts which was first read.
    """

    def __init__(self, found: Followed, output: fx.Node, outputs: Sequence[Value], role: Mapping[fx.Node, Role]) -> None:
        self.found, self.role = found, role
        self.read_by: dict[fx.Node, list[Use]] = {}
        for use in found.uses:
            self.read_by.setdefault(use.reader, []).append(use)
        self.names: dict[int, str] = {}
        """FQN of the parameter, by the number of the reduced source."""
        self.before: dict[int, int] = {}
        """Of a reduced source that of an earlier reduction which it was made of, as in hybrid sharding; both by number."""
        self.behind: set[fx.Node] = set()
        """Compute on reduced pieces alone, as they are scaled: it goes where the waits for them go."""
        self.problems: list[str] = []
        whole = {use.value: use.content for use in self.read_by.get(output, ())}
        first = {use.value: use.content for use in reversed(found.uses) if use.value in whole}
        whole = {node: runs if any(self._is_reduced(r.source) for r in runs) else first[node] for node, runs in whole.items()}
        for node, value in zip(returned(output), outputs, strict=True):
            if value.role == "grad" and hasattr(node, "all_input_nodes"):
                self._name(node, value.fqn, [whole[node]] if node in whole else self._reduced_before(node))

    def _name(self, node: fx.Node, fqn: str, contents: Sequence[Runs]) -> None:
        pieces = sorted({one.source for runs in contents for one in runs if self._is_reduced(one.source)})
        if not pieces:
            return
        if all(self._is_whole(runs) for runs in contents) and (len(pieces) == 1 or self._adds(node, pieces)):
            for number in pieces:
                self.name(number, fqn)
            return
        makers = dict.fromkeys(self._maker(number) for number in pieces)
        self.problems.append(
            f"the gradient returned for {fqn} is not one whole piece of a reduction, but made by {node.target} ({node.name}) "
            f"from what was reduced of {', '.join(list(makers)[:4])}"
        )

    def _reduced_before(self, node: fx.Node) -> list[Runs]:
        """Reduced pieces that ``node`` is computed from; empty if anything gathered or any of the batch goes into it too."""
        queue, seen, found = [node], {node}, list[Any]()
        for current in queue:
            uses = self.read_by.get(current, [])
            gathered = any(one.rank >= 0 for use in uses for one in use.content)
            if gathered or current in self.found.sent or self.role.get(current) == "batch":
                return []
            found += [use.content for use in uses]
            read = {use.value for use in uses}
            fresh = [source for source in current.all_input_nodes if source not in seen and source not in read]
            seen.update(fresh)
            queue.extend(fresh)
        if any(self._is_reduced(one.source) for runs in found for one in runs):
            self.behind.update(queue)
        return found

    def name(self, number: int, fqn: str) -> None:
        """Name a piece, and the pieces of earlier reductions that it was made of, as they came or scaled."""
        while self._is_reduced(number):
            self.names[number] = fqn
            source = self.found.table.known(number)
            earlier = source.sent if self._is_reduced(source.sent) else self._scaled(source.node)
            if earlier < 0:
                return
            self.before[number] = earlier
            number = earlier

    def _scaled(self, node: fx.Node) -> int:
        """Number of the one whole piece that ``node`` scales; -1 if it is made of anything else."""
        contents = self._reduced_before(node)
        pieces = {one.source for runs in contents for one in runs if self._is_reduced(one.source)}
        whole = len(pieces) == 1 and all(self._is_whole(runs) for runs in contents)
        return pieces.pop() if whole and self._adds(node, list(pieces)) else -1

    def _adds(self, node: fx.Node, pieces: Sequence[int]) -> bool:
        """Whether ``node`` can be the sum of ``pieces``: all are as large, and whatever lies between adds or scales."""
        if len({self.found.table.known(number).numel for number in pieces}) > 1:
            return False
        queue, seen = [node], {node}
        for current in queue:
            if operator_name(current).removeprefix("aten::").rstrip("_") not in _SUMS:
                return False
            read = {use.value for use in self.read_by.get(current, [])}
            fresh = [source for source in current.all_input_nodes if source not in seen and source not in read]
            fresh = [source for source in fresh if source.op != "placeholder"]
            seen.update(fresh)
            queue.extend(fresh)
        return True

    def _is_reduced(self, number: int) -> bool:
        source = self.found.sources[number] if number >= 0 else None
        return source is not None and source.launch is not None and launch_kind(source.launch) in REDUCTIONS

    def _is_whole(self, runs: Runs) -> bool:
        source = self.found.sources[runs[0].source] if len(runs) == 1 else None
        if source is None or runs[0].start:
            return False
        return runs[0].length == source.numel * dtype_of(runs[0].form).itemsize

    def _maker(self, number: int) -> str:
        """Operator and node that computed what a reduction sent."""
        source = self.found.sources[number]
        return f"{source.node.target} ({source.node.name})" if source is not None else ""
