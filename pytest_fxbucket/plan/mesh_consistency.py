"""Keys of ``[parallel]`` and ``[run] world`` that contradict each other. Pure; imports no torch."""

from __future__ import annotations

from math import prod

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import not_built
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Parallel
from pytest_fxbucket.plan.table_rules import SEQUENCE_STYLES
from pytest_fxbucket.words import MOST_RANKS, show

_DEGREES = {"fully_shard": ("dp_shard",), "replicate": ("dp_replicate",), "hybrid_shard": ("dp_replicate", "dp_shard")}
_MODE_WITH = {"dp_shard": "fully_shard", "dp_replicate": "replicate"}
_AT_ONE = {"dp_shard": "leaves nothing to shard", "dp_replicate": "leaves one copy"}
_SMALL = {"dp_replicate": 2, "dp_shard": 4}
_SCATTER = 'name the module whose output is to be cut along the sequence, as in "tok_embeddings" = "scatter"'
_GATHER = 'name the module that is to read all of the sequence, as in "output" = "gather"'


def agree_on_mesh(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for degrees that do not fit mode, tables or each other."""
    mesh, inside = plan.parallel, f"{where}: [parallel]"
    if plan.world_size > MOST_RANKS:
        raise PlanError(f"{inside} makes a mesh of {plan.world_size} ranks, and at most {MOST_RANKS} can be looked at")
    # Of a given graph, and of a mode of the user's own, nobody knows which degrees it uses.
    if plan.model is None or mesh.mode not in _DEGREES:
        _somebody_to_talk_to(mesh, inside)
    else:
        _degrees_of_mode(mesh, inside)
        _keys_of_mode(mesh, inside)
    if plan.model is not None:
        _context_parallel(plan, inside)
        _tensor_parallel(mesh, inside)
        _expert_parallel(mesh, plan.run_degrees["dp_shard"], inside)
    for name, small in plan.run.world.items():
        full = plan.degrees[name]
        if small > full:
            raise PlanError(
                f"{where}: [run] world.{name} = {small} is more than [parallel] {name} = {full}; world is for a smaller mesh"
            )


def _somebody_to_talk_to(mesh: Parallel, inside: str) -> None:
    if mesh.dp_shard * mesh.dp_replicate * mesh.cp * mesh.tp * mesh.pp < 2:
        raise PlanError(f"{inside} makes a mesh of one rank, which has nobody to talk to; set dp_shard to 2 or more")


def _degrees_of_mode(mesh: Parallel, inside: str) -> None:
    """Refuse a degree that the mode does not use, and 1 for one that it uses.

    A single one may be 1 beside ``pp`` or ``cp``; of two ``dp_shard`` beside ``cp``, over which parameters are sharded, too.
    """
    needed = _DEGREES[mesh.mode]
    for name in _MODE_WITH:
        degree = getattr(mesh, name)
        if name not in needed and degree > 1:
            (own,) = needed  # hybrid_shard uses both degrees, so a mode with a foreign one uses a single one
            use = f"write {own} = {degree}" if getattr(mesh, own) == 1 else 'mode = "hybrid_shard" does both'
            raise PlanError(f'{inside} {name} = {degree} has no meaning with mode = "{mesh.mode}"; {use}')
    for name in needed:
        beside = mesh.pp * mesh.cp if len(needed) == 1 else mesh.cp if name == "dp_shard" else 1
        if getattr(mesh, name) == 1 and beside == 1:
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


def _context_parallel(plan: Plan, inside: str) -> None:
    mesh = plan.parallel
    if mesh.cp == 1:
        if mesh.cp_form == "ring":
            raise PlanError(
                f'{inside} cp_form = "ring" leads round one rank with cp = 1; set cp to 2 or more, or leave cp_form out'
            )
        return
    if mesh.has_ring and plan.pipeline is not None:
        raise not_built(
            f"{inside} cp_form",
            mesh.cp_form,
            "its sends name the neighbours of each rank, and one graph of a stage serves all its ranks; "
            'use cp_form = "all_gather" beside [pipeline]',
        )
    if mesh.ep > 1:
        raise PlanError(f"{inside} cp = {mesh.cp} is not built yet beside ep = {mesh.ep}; leave one of them out")
    if plan.override:
        raise PlanError(
            f"{inside} cp = {mesh.cp} gathers what attention reads where a module is traced, and [[override]] leaves modules "
            "untraced; leave one of them out"
        )


def _tensor_parallel(mesh: Parallel, inside: str) -> None:
    # A mode of the user's own may part modules without tp_plan.
    if mesh.tp > 1 and not mesh.tp_plan and mesh.mode in _DEGREES:
        raise PlanError(
            f'{inside} tp = {mesh.tp} parts nothing; say what in tp_plan, as in tp_plan = {{ "layers.*.wq" = "colwise" }}'
        )
    if mesh.tp_plan and mesh.tp == 1:
        raise PlanError(f"{inside} tp_plan parts nothing with tp = 1; set tp to 2 or more, or leave tp_plan out")
    styles = mesh.tp_plan.values()
    # Activations are in parts from a scatter to a gather, so each of these styles needs both ends.
    there = next((style for style in SEQUENCE_STYLES if style in styles), "")
    for style, use in (("scatter", _SCATTER), ("gather", _GATHER)):
        if there and style not in styles:
            raise PlanError(f"{inside} tp_plan has {show(there)} and no {show(style)}; {use}")


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
    """Degrees to suggest for ``[run] world``: the same dimensions on fewer ranks; tp is made smaller only if it must be."""
    # A multiple of ep, since ep takes its ranks from those of dp_shard.
    ep = plan.parallel.ep
    small = {**_SMALL, "dp_shard": ep * max(1, _SMALL["dp_shard"] // ep)}
    found = {name: small[name] for name, size in plan.degrees.items() if size > small.get(name, size)}
    if prod((plan.degrees | found).values()) > most and plan.parallel.tp > 1:
        found["tp"] = 2
    return found
