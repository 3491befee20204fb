"""Which reduction made which returned gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.graph.collectives import is_reduce_scatter
from pytest_fxbucket.graph.contents import LENGTH, RANK, SOURCE, START, Runs

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.capture.roles import Role, Value
    from pytest_fxbucket.graph.follow import Followed, Use


def returned(output: fx.Node) -> list[Any]:
    """What the graph returns, a single value as one."""
    values: Any = output.args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]


class Gradients:
    """The gradients that a graph returns, each traced back to the reduction that it is a piece of.

    Compute between the reduction and the output, a scaling say, is passed through; a gradient of which that leaves no single
    whole piece is a problem.
    """

    def __init__(self, found: Followed, output: fx.Node, outputs: Sequence[Value], role: Mapping[fx.Node, Role]) -> None:
        self.found, self.role = found, role
        self.read_by: dict[fx.Node, list[Use]] = {}
        for use in found.uses:
            self.read_by.setdefault(use.reader, []).append(use)
        self.names: dict[int, str] = {}
        """FQN of the parameter, by the number of the reduced source."""
        self.problems: list[str] = []
        whole = {use.value: use.content for use in self.read_by.get(output, ())}
        for node, value in zip(returned(output), outputs, strict=True):
            if value.role == "grad" and hasattr(node, "all_input_nodes"):
                self._name(node, value.fqn, [whole[node]] if node in whole else self._reduced_before(node))

    def _name(self, node: fx.Node, fqn: str, contents: Sequence[Runs]) -> None:
        pieces = sorted({int(number) for runs in contents for number in runs[:, SOURCE] if self._is_reduced(int(number))})
        if not pieces:
            return
        if len(pieces) == 1 and all(self._is_whole(runs) for runs in contents):
            self.names[pieces[0]] = fqn
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
            gathered = any(bool((use.content[:, RANK] >= 0).any()) for use in uses)
            if gathered or current in self.found.sent or self.role.get(current) == "batch":
                return []
            found += [use.content for use in uses]
            read = {use.value for use in uses}
            fresh = [source for source in current.all_input_nodes if source not in seen and source not in read]
            seen.update(fresh)
            queue.extend(fresh)
        return found

    def _is_reduced(self, number: int) -> bool:
        source = self.found.sources[number]
        return source is not None and source.launch is not None and is_reduce_scatter(source.launch)

    def _is_whole(self, runs: Runs) -> bool:
        source = self.found.sources[int(runs[0, SOURCE])] if len(runs) == 1 else None
        return source is not None and int(runs[0, START]) == 0 and int(runs[0, LENGTH]) == source.numel

    def _maker(self, number: int) -> str:
        """Operator and node that computed what a reduction sent."""
        source = self.found.sources[number]
        return f"{source.node.target} ({source.node.name})" if source is not None else ""
