"""Keys of ``[parallel]`` and ``[run] world`` that contradict each other."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.limits import MOST_RANKS
from pytest_fxbucket.plan.schema import Parallel, Plan

_DEGREES = {"fully_shard": ("dp_shard",), "replicate": ("dp_replicate",), "hybrid_shard": ("dp_replicate", "dp_shard")}
_MODE_WITH = {"dp_shard": "fully_shard", "dp_replicate": "replicate"}
_AT_ONE = {"dp_shard": "leaves nothing to shard", "dp_replicate": "leaves one copy"}


def agree_on_mesh(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for degrees that do not fit mode, tables or each other."""
    mesh, inside = plan.parallel, f"{where}: [parallel]"
    if plan.world_size > MOST_RANKS:
        raise PlanError(f"{inside} makes a mesh of {plan.world_size} ranks, and at most {MOST_RANKS} can be looked at")
    if plan.model is None or mesh.mode not in _DEGREES:
        _somebody_to_talk_to(mesh, inside)
    else:
        _degrees_of_mode(mesh, inside)
        _keys_of_mode(mesh, inside)
    if plan.model is not None:
        _tensor_parallel(mesh, inside)
        _expert_parallel(mesh, plan.run_degrees["dp_shard"], inside)
    for name, small in plan.run.world.items():
        full = plan.degrees[name]
        if small > full:
            raise PlanError(
                f"{where}: [run] world.{name} = {small} is more than [parallel] {name} = {full}; world is for a smaller mesh"
            )


def _somebody_to_talk_to(mesh: Parallel, inside: str) -> None:
    if mesh.dp_shard * mesh.dp_replicate * mesh.tp < 2:
        raise PlanError(f"{inside} makes a mesh of one rank, which has nobody to talk to; set dp_shard to 2 or more")


def _degrees_of_mode(mesh: Parallel, inside: str) -> None:
    """A mode uses its own degrees, and no other."""
    needed = _DEGREES[mesh.mode]
    for name in _MODE_WITH:
        degree = getattr(mesh, name)
        if name not in needed and degree > 1:
            (own,) = needed
            use = f"write {own} = {degree}" if getattr(mesh, own) == 1 else 'mode = "hybrid_shard" does both'
            raise PlanError(f'{inside} {name} = {degree} has no meaning with mode = "{mesh.mode}"; {use}')
    for name in needed:
        if getattr(mesh, name) == 1:
            others = [f', or mode = "{_MODE_WITH[other]}"' for other in needed if other != name]
            use = "use 2 or more" + "".join(others)
            raise PlanError(f"{inside} {name} = 1 {_AT_ONE[name]}; {use}")


def _keys_of_mode(mesh: Parallel, inside: str) -> None:
    if mesh.mode != "hybrid_shard" and mesh.reduce_order != "scatter_first":
        raise PlanError(f'{inside} reduce_order is of two reductions, and mode = "{mesh.mode}" has one; leave it out')
    if mesh.mode == "replicate" and mesh.reshard_after_forward not in (None, True):
        raise PlanError(
            f'{inside} reshard_after_forward is of sharded parameters, and mode = "replicate" has none; leave it out'
        )


def _tensor_parallel(mesh: Parallel, inside: str) -> None:
    if mesh.tp > 1 and not mesh.tp_plan and mesh.mode in _DEGREES:
        raise PlanError(
            f'{inside} tp = {mesh.tp} parts nothing; say what in tp_plan, as in tp_plan = {{ "layers.*.wq" = "colwise" }}'
        )
    if mesh.tp_plan and mesh.tp == 1:
        raise PlanError(f"{inside} tp_plan parts nothing with tp = 1; set tp to 2 or more, or leave tp_plan out")


def _expert_parallel(mesh: Parallel, run_shard: int, inside: str) -> None:
    if mesh.ep == 1:
        if mesh.ep_plan:
            raise PlanError(f"{inside} ep_plan parts nothing with ep = 1; set ep to 2 or more, or leave ep_plan out")
        return
    if not mesh.ep_plan:
        raise PlanError(
            f'{inside} ep = {mesh.ep} parts nothing; name the modules in ep_plan, as in ep_plan = ["layers.*.experts"]'
        )
    if mesh.mode not in ("fully_shard", "hybrid_shard"):
        raise PlanError(
            f'{inside} ep takes its ranks from those of dp_shard, as mode = "fully_shard" and "hybrid_shard" have them; '
            f'it cannot be with mode = "{mesh.mode}"'
        )
    for what, degree in (("dp_shard", mesh.dp_shard), ("[run] world.dp_shard", run_shard)):
        if degree % mesh.ep:
            fitting = mesh.ep * max(1, degree // mesh.ep)
            raise PlanError(
                f"{inside} ep = {mesh.ep} does not divide {what} = {degree}, from whose ranks it takes its own; "
                f"use a multiple of {mesh.ep}, such as {fitting}"
            )
