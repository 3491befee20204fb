"""Which parameters stay gathered from forward to backward, told from the plan and from the step that was traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import is_all_gather, is_wait
from pytest_fxbucket.graph.movement import moves_data
from pytest_fxbucket.plan.reshard import Asked, kept_entries
from pytest_fxbucket.plan.resolved import entries_of

if TYPE_CHECKING:
    from torch import fx, nn

    from pytest_fxbucket.plan.schema import Plan


@dataclass(frozen=True, slots=True)
class Resharding:
    """What a plan asks for, and the entry of each planned parameter."""

    asked: Asked = None
    entry_of: Mapping[str, str] = field(default_factory=dict)

    def kept(self, graph: fx.Graph, parameters: Mapping[fx.Node, str]) -> set[str]:
        """FQNs of those of ``parameters``, inputs of the joint ``graph``, whose gathers backward reads too."""
        if isinstance(self.asked, bool):
            return set() if self.asked else set(parameters.values())
        planned = {node: fqn for node, fqn in parameters.items() if fqn in self.entry_of}
        last = self.entry_of.get(last_read(graph, planned))
        kept = kept_entries(self.asked, list(dict.fromkeys(self.entry_of.values())), last)
        return {fqn for fqn in planned.values() if self.entry_of[fqn] in kept}


def resharding_of(model: nn.Module, plan: Plan) -> Resharding:
    """What ``plan`` asks for. Raises PlanError for a table that names no entry."""
    own = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    every = list(model.named_parameters(remove_duplicate=False))
    aliases = {fqn: own[id(parameter)] for fqn, parameter in every if own[id(parameter)] != fqn}
    try:
        entries = entries_of(plan, list(own.values()), [fqn for fqn, _ in model.named_modules()], aliases).entries
    except PlanError:  # of entries: said where they are needed, in each check
        return Resharding(plan.parallel.reshard_after_forward, {})
    try:
        kept_entries(plan.parallel.reshard_after_forward, [entry.name for entry in entries], None)
    except PlanError as error:
        raise PlanError(f"{plan.path}: {error}") from None
    return Resharding(plan.parallel.reshard_after_forward, {fqn: entry.name for entry in entries for fqn in entry.parameters})


def last_read(graph: fx.Graph, parameters: Mapping[fx.Node, str]) -> str:
    """FQN of that of ``parameters`` which the forward of ``graph`` reads last; empty if it reads none."""
    of: dict[fx.Node, str] = dict(parameters)
    last = ""
    for node in graph.nodes:
        if node.op == "output" or node.meta.get("autograd_backward"):
            continue
        read = [of[source] for source in node.all_input_nodes if source in of]
        if read and (is_all_gather(node) or is_wait(node) or moves_data(node)):
            of[node] = read[-1]
        elif read:
            last = read[-1]
    return last
