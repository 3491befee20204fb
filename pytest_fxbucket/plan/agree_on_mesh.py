"""Keys of ``[parallel]`` and ``[run] world`` that contradict each other."""

from __future__ import annotations

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.schema import Parallel, Plan

_NEEDS = {"fully_shard": ("dp_shard",), "replicate": ("dp_replicate",), "hybrid_shard": ("dp_replicate", "dp_shard")}
_WITHOUT = {
    "dp_shard": "leaves nothing to shard",
    "dp_replicate": "leaves no copies",
}
_OTHER = {
    "fully_shard": "hybrid_shard shards and copies",
    "replicate": "hybrid_shard shards and copies",
}


def agree_on_mesh(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for degrees that do not fit mode, tables or each other."""
    mesh = plan.parallel
    _mode(mesh, plan.model is not None, where)
    if plan.model is not None:
        _tensor_parallel(mesh, where)
        _expert_parallel(mesh, plan.run_degrees["dp_shard"], where)
    for name, small in plan.run.world.items():
        full = plan.degrees[name]
        if small > full:
            raise PlanError(
                f"{where}: [run] world.{name} = {small} is more than [parallel] {name} = {full}; world is for a smaller mesh"
            )


def _mode(mesh: Parallel, is_model: bool, where: str) -> None:
    inside = f"{where}: [parallel]"
    if not is_model or mesh.mode not in _NEEDS:
        if mesh.dp_shard * mesh.dp_replicate * mesh.tp < 2:
            raise PlanError(f"{inside} dp_shard = 1 leaves one rank, which has nobody to talk to; use 2 or more")
        return
    for name in ("dp_shard", "dp_replicate"):
        degree, needed = getattr(mesh, name), name in _NEEDS[mesh.mode]
        if needed and degree < 2:
            of = "" if mesh.mode == "fully_shard" else f' for mode = "{mesh.mode}"'
            raise PlanError(f"{inside} {name} = {degree} {_WITHOUT[name]}{of}; use 2 or more")
        if not needed and degree > 1:
            raise PlanError(f'{inside} {name} = {degree} has no meaning with mode = "{mesh.mode}"; {_OTHER[mesh.mode]}')
    if mesh.mode != "hybrid_shard" and mesh.reduce_order != "scatter_first":
        raise PlanError(f'{inside} reduce_order is of two reductions, and mode = "{mesh.mode}" has one; leave it out')
    if mesh.mode == "replicate" and not mesh.reshard_after_forward:
        raise PlanError(
            f'{inside} reshard_after_forward is of sharded parameters, and mode = "replicate" has none; leave it out'
        )


def _tensor_parallel(mesh: Parallel, where: str) -> None:
    if mesh.tp > 1 and not mesh.tp_plan and mesh.mode in _NEEDS:
        raise PlanError(
            f"{where}: [parallel] tp = {mesh.tp} parts nothing; "
            'say what in tp_plan, as in tp_plan = { "layers.*.wq" = "colwise" }'
        )
    if mesh.tp_plan and mesh.tp == 1:
        raise PlanError(f"{where}: [parallel] tp_plan parts nothing with tp = 1; set tp, or leave tp_plan out")


def _expert_parallel(mesh: Parallel, run_shard: int, where: str) -> None:
    inside = f"{where}: [parallel]"
    if mesh.ep == 1 and not mesh.ep_plan:
        return
    if mesh.ep > 1 and not mesh.ep_plan:
        raise PlanError(
            f'{inside} ep = {mesh.ep} parts nothing; name the modules in ep_plan, as in ep_plan = ["layers.*.experts"]'
        )
    if mesh.ep == 1:
        raise PlanError(f"{inside} ep_plan parts nothing with ep = 1; set ep, or leave ep_plan out")
    if mesh.mode not in ("fully_shard", "hybrid_shard"):
        raise PlanError(f'{inside} ep takes its ranks from dp_shard, which mode = "{mesh.mode}" does not use')
    for what, degree in (("dp_shard", mesh.dp_shard), ("[run] world.dp_shard", run_shard)):
        if degree % mesh.ep:
            raise PlanError(f"{inside} ep = {mesh.ep} does not divide {what} = {degree}, from which it takes its ranks")
