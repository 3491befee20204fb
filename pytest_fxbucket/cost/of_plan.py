"""The cost model that a plan has of its own, and the process groups that costs are told for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.c10d import DEFAULT, untwinned
from pytest_fxbucket.cost.costs import CostModel, Roofline, checked
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.step.mesh import Mesh

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.step.roles import StepGraph


def own_cost(plan: Plan, step: StepGraph, cluster: Cluster) -> CostModel | None:
    """The plan's own cost model; what it does not know is told for the process groups of ``step``. None if it has none."""
    if plan.cluster is None or plan.cluster.cost is None:
        return None
    name = plan.cluster.cost
    model = import_callable(name, f"{plan.path}: [cluster] cost")
    return checked(model, f'{plan.path}: [cluster] cost = "{name}"', Roofline(cluster, groups_of(step)))


def groups_of(step: StepGraph) -> _Groups:
    """Ranks of each process group of ``step``, by the name that its launches have."""
    mesh = Mesh(step.mesh)
    return _Groups({**mesh.groups(step.rank), DEFAULT: tuple(range(mesh.size))})


@dataclass(frozen=True)
class _Groups:
    """Gives ranks by a group's name; of one that nobody knows as many as the launch says, side by side."""

    known: Mapping[str, Sequence[int]]

    def __call__(self, group: str, count: int) -> Sequence[int]:
        return self.known.get(group) or self.known.get(untwinned(group)) or range(max(count, 1))
