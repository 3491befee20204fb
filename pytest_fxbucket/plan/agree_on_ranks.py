"""A mesh with more ranks than can be run: said before anything is traced. Pure; imports no torch."""

from __future__ import annotations

from math import prod

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Plan

_SMALL = {"dp_replicate": 2, "dp_shard": 4}


def refuse_too_many_ranks(plan: Plan, most: int, where: str) -> None:
    """Raise PlanError, beginning with ``where``, if the mesh that bitwise would run has more than ``most`` ranks."""
    if plan.run_world <= most:
        return
    mesh = "[parallel] with [run] world" if plan.run.world else "[parallel]"
    use = "make [run] world smaller" if plan.run.world else "set [run] world"
    smaller = ", ".join(f"{name} = {size}" for name, size in _smaller(plan, most).items())
    raise PlanError(
        f"{where}: {mesh} has {plan.run_world} ranks, and at most {most} can be run here; {use}, as in world = {{ {smaller} }}"
    )


def _smaller(plan: Plan, most: int) -> dict[str, int]:
    """Degrees of a mesh of the same dimensions that can be run; tp is made smaller only where it must be."""
    ep = plan.parallel.ep
    small = {**_SMALL, "dp_shard": ep * max(1, _SMALL["dp_shard"] // ep)}
    found = {name: small[name] for name, size in plan.degrees.items() if size > small.get(name, size)}
    if prod((plan.degrees | found).values()) > most and plan.parallel.tp > 1:
        found["tp"] = 2
    return found
