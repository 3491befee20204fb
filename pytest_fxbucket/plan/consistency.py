"""Keys of a plan file that contradict each other, or that would be read and ignored together. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import prod

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.cluster_consistency import agree_on_cluster
from pytest_fxbucket.plan.compiler_consistency import agree_on_compiler
from pytest_fxbucket.plan.context_consistency import agree_on_context
from pytest_fxbucket.plan.overlap_consistency import agree_on_overlap
from pytest_fxbucket.plan.pipeline_consistency import agree_on_pipeline
from pytest_fxbucket.plan.schema import Bucket, Parallel, Plan, Step
from pytest_fxbucket.plan.selectors import ROOT, Resolution, resolve
from pytest_fxbucket.plan.table_rules import SEQUENCE_STYLES, Places
from pytest_fxbucket.words import MOST_RANKS, show


def agree(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    if plan.model is None and plan.graph is None:
        raise PlanError(f"{where}: there is neither [model] nor [graph]; one of them says what is checked")
    if plan.model is not None and plan.graph is not None:
        raise PlanError(f"{where}: [model] and [graph] are both there; keep the one that is to be checked")
    agree_on_mesh(plan, where)
    agree_on_step(plan, where)
    agree_on_pipeline(plan, where)
    agree_on_transforms(plan, where)
    _on_a_ring(plan, where)
    agree_on_compiler(plan, where)
    agree_on_cluster(plan, where)
    agree_on_overlap(plan, where)
    if not plan.bucket.has_entries:
        _by_size(plan, where)
    else:
        _by_plan(plan, where)


def _on_a_ring(plan: Plan, where: str) -> None:
    run = plan.run
    if run.reduce == "rank_order":
        if run.ring is not None:
            raise PlanError(f'{where}: [run] ring is there, and reduce = "rank_order" goes round none; use reduce = "ring"')
        return
    if not plan.checks.eager:
        raise PlanError(
            f'{where}: [run] reduce = "ring" is what eager adds by, and checks.eager is false; leave one of them out'
        )
    if run.ring is not None and plan.run_world % run.ring.nodes:
        raise PlanError(
            f"{where}: [run] ring.nodes = {run.ring.nodes} does not divide the {plan.run_world} ranks that are run; "
            "each node has as many"
        )


def agree_with_entries(plan: Plan, entries: Sequence[str], where: str) -> None:
    """Raise PlanError, beginning with ``where``, for keys that speak of other entries than those the plan has.

    ``entries`` are the names of all of them, in order, ranges and stars written out.
    """
    caps = plan.bucket.cap_mb
    if len(caps) > max(1, len(entries)):
        held = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise PlanError(f"{where}: [bucket] cap_mb has {len(caps)} caps for {held}; give one an entry at most")
    _refuse_wrong_places("launch_at", plan.overlap.launch_at, entries, where)
    _refuse_wrong_places("wait_before", plan.overlap.wait_before, entries, where)


def _refuse_wrong_places(key: str, by_direction: Places, entries: Sequence[str], where: str) -> None:
    """Raise PlanError, beginning with ``where``, for pairs that name no entry of ``entries``, or that form a circle.

    ``key`` is ``launch_at`` or ``wait_before``. Whether a place can be had in a graph is for the pass to tell.
    """
    for direction, pairs in by_direction.items():
        inside = f"{where}: [overlap] {key}.{direction}"
        for entry, other in pairs.items():
            for name in (entry, other):
                if name not in entries:
                    raise PlanError(f'{inside}: "{entry}" = "{other}" names no bucket: {_no_entry(name, entries)}')
        circle = _circle(pairs)
        if circle:
            raise PlanError(f"{inside}: {_says(circle)}")


def _no_entry(name: str, entries: Sequence[str]) -> str:
    """Say that ``name`` is no entry, and which one is meant."""
    holders = [entry for entry in entries if any(name == part or name.startswith(f"{part}.") for part in entry.split("+"))]
    if holders:
        return f'"{name}" is within the entry "{holders[0]}"; name that'
    close = get_close_matches(name, entries, n=1, cutoff=0.6)
    if close:
        return f'there is no entry "{name}"; did you mean "{close[0]}"?'
    more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
    return f'there is no entry "{name}"; entries are {", ".join(entries[:6])}{more}'


def _circle(pairs: Mapping[str, str]) -> list[str]:
    """Entries of which each is placed at the next one and the last at the first; empty if there are none.

    Every entry is placed at one other at most, so a walk from it either ends or comes back.
    """
    done: set[str] = set()
    for start in pairs:
        walk: list[str] = []
        entry: str | None = start
        while entry is not None and entry not in done:
            done.add(entry)
            walk.append(entry)
            entry = pairs.get(entry)
        if entry in walk:
            return walk[walk.index(entry) :]
    return []


def _says(circle: Sequence[str]) -> str:
    if len(circle) == 1:
        return f'"{circle[0]}" is placed at itself; name the entry whose compute is to hide it'
    ring = " -> ".join([*circle, circle[0]])
    return f"the pairs form a circle, {ring}; each would have to come before the next, so take one out"


def _by_plan(plan: Plan, where: str) -> None:
    bucket = plan.bucket
    if bucket.enabled and not bucket.plan and bucket.unplanned != ROOT:
        raise PlanError(f'{where}: [bucket] plan has no entry; name one, or use unplanned = "root" or enabled = false')
    entries = _names(bucket)
    if entries is not None:
        agree_with_entries(plan, entries, where)


def _names(bucket: Bucket) -> list[str] | None:
    """Names of all entries; None if only the model can tell."""
    if any(len(entry.selectors) == 1 and "*" in entry.selectors[0].split(".") for entry in bucket.plan):
        return None
    return [entry.name for entry in bucket.plan] + ([ROOT] if bucket.unplanned == ROOT else [])


def _by_size(plan: Plan, where: str) -> None:
    """By size there are no entries: neighbours share a bucket up to a cap."""
    bucket, overlap = plan.bucket, plan.overlap
    by = f"by = {show(bucket.by)}"
    if bucket.enabled and bucket.by == "size" and not all(bucket.cap_mb[:-1] or bucket.cap_mb):
        zero = "0" if len(bucket.cap_mb) == 1 else "a 0 before its end"
        raise PlanError(
            f"{where}: [bucket] {by} fills buckets up to cap_mb, which has {zero} (no cap); set it, as in cap_mb = 25"
        )
    if bucket.plan:
        raise PlanError(f"{where}: [bucket] plan names entries, and {by} makes none; leave plan out, or empty in a matrix row")
    if bucket.unplanned != "error":
        raise PlanError(
            f"{where}: [bucket] unplanned = {show(bucket.unplanned)} means nothing with {by}, which leaves no parameter out; "
            "leave it out"
        )
    for key, places in (("launch_at", overlap.launch_at), ("wait_before", overlap.wait_before)):
        if places:
            raise PlanError(f"{where}: [overlap] {key} names entries, and {by} makes none; use prefetch and defer_reduce")


# Keys of ``[parallel]`` and ``[run] world`` that contradict each other.


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
        agree_on_context(plan, where)
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
    """A mode uses its own degrees, and no other; the one of a mode that has one can be 1 beside ``pp`` or ``cp``."""
    needed = _DEGREES[mesh.mode]
    for name in _MODE_WITH:
        degree = getattr(mesh, name)
        if name not in needed and degree > 1:
            (own,) = needed
            use = f"write {own} = {degree}" if getattr(mesh, own) == 1 else 'mode = "hybrid_shard" does both'
            raise PlanError(f'{inside} {name} = {degree} has no meaning with mode = "{mesh.mode}"; {use}')
    for name in needed:
        if getattr(mesh, name) == 1 and (mesh.pp * mesh.cp == 1 or len(needed) > 1):
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


_SCATTER = 'name the module whose output is to be cut along the sequence, as in "tok_embeddings" = "scatter"'
_GATHER = 'name the module that is to read all of the sequence, as in "output" = "gather"'


def _tensor_parallel(mesh: Parallel, inside: str) -> None:
    if mesh.tp > 1 and not mesh.tp_plan and mesh.mode in _DEGREES:
        raise PlanError(
            f'{inside} tp = {mesh.tp} parts nothing; say what in tp_plan, as in tp_plan = {{ "layers.*.wq" = "colwise" }}'
        )
    if mesh.tp_plan and mesh.tp == 1:
        raise PlanError(f"{inside} tp_plan parts nothing with tp = 1; set tp to 2 or more, or leave tp_plan out")
    styles = mesh.tp_plan.values()
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


# Keys of ``[step]`` and ``[optimizer]`` that contradict each other, or that would be read and ignored.


def agree_on_step(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    _of_overrides(plan, where)
    if plan.graph is not None:
        _of_a_graph(plan, where)
    elif not plan.optimizer:
        _without_optimizer(plan, where)
    else:
        _of_optimizers(plan, where)


def _without_optimizer(plan: Plan, where: str) -> None:
    clip, updates = plan.step.clip_norm, plan.overlap.updates
    none = "there is no [optimizer]; add one, or leave"
    if clip:
        raise PlanError(f"{where}: [step] clip_norm = {clip:g} clips what an optimizer sees, and {none} clip_norm out")
    if updates != "last":
        raise PlanError(f"{where}: [overlap] updates = {show(updates)} places an optimizer's updates, and {none} updates out")


def _of_optimizers(plan: Plan, where: str) -> None:
    several = len(plan.optimizer) > 1
    for number, one in enumerate(plan.optimizer, 1):
        if one.groups == "entry" and not plan.bucket.has_entries:
            inside = f"[[optimizer]] {number}:" if several else "[optimizer]"
            none = f"by = {show(plan.bucket.by)} makes none"
            raise PlanError(f'{where}: {inside} groups = "entry" needs entries, and {none}; use groups = "one"')
    rest = [number for number, one in enumerate(plan.optimizer, 1) if not one.params]
    if len(rest) > 1:
        raise PlanError(
            f"{where}: [[optimizer]] {rest[0]} and {rest[1]} both leave params out, and only one can have all the rest; "
            "name those of the other"
        )


def _of_overrides(plan: Plan, where: str) -> None:
    for number, one in enumerate(plan.override, 1):
        inside = f"{where}: [[override]] {number}:" if len(plan.override) > 1 else f"{where}: [override]"
        if not one.module and one.type is None:
            raise PlanError(f"{inside} names no module; give it module, a list of names, or type, a class")
        if one.module and one.type is not None:
            raise PlanError(f"{inside} has both module and type; keep one, and make another [[override]] of the other")
        if one.by == "call" and one.args:
            raise PlanError(f'{inside} has args, which by = "call" does not take; leave them out, or give by a callable')
        if one.by != "call" and one.output is not None:
            raise PlanError(f'{inside} output is for by = "call": a sub-graph says itself what it gives; leave output out')


def _of_a_graph(plan: Plan, where: str) -> None:
    """What capture would do with a model it cannot do with a graph that is traced already."""
    mesh, plain = plan.parallel, Parallel()
    keys = ("pp", "cp", "cp_form", "tp_plan", "ep", "ep_plan", "reduce_order")
    key = next((key for key in keys if getattr(mesh, key) != getattr(plain, key)), "")
    tables = (
        f"[parallel] {key}" if key else "",
        "[pipeline]" if plan.pipeline is not None else "",
        "[step]" if plan.step != Step() else "",
        "[override]" if plan.override else "",
        "[optimizer]" if plan.optimizer else "",
    )
    if found := next(filter(None, tables), ""):
        raise PlanError(f"{where}: {found} is for a [model] that is to be traced; leave it out beside [graph]")


# Keys of ``[[transform]]`` that contradict each other or other tables.


def agree_on_transforms(plan: Plan, where: str) -> None:
    """Raise PlanError, one sentence that begins with ``where``, for keys that cannot stand together."""
    _passes(plan, where)
    _next_iteration(plan, where)
    _merged_again(plan, where)


def _passes(plan: Plan, where: str) -> None:
    """The pass stands among transformations once, and says in tables of its own what it does."""
    passes = [number for number, one in enumerate(plan.transform, 1) if one.name == "bucket"]
    if len(passes) > 1:
        raise PlanError(f"{where}: [[transform]] {passes[0]} and {passes[1]} are both the pass, bucket; list it once")
    if passes and plan.transform[passes[0] - 1].args:
        raise PlanError(
            f"{where}: [[transform]] {passes[0]}: bucket takes no args; [bucket] and [overlap] say what the pass does"
        )


def _next_iteration(plan: Plan, where: str) -> None:
    """It gives three graphs: what needs one cannot follow."""
    moving = [number for number, one in enumerate(plan.transform, 1) if one.name == "next_iteration"]
    if not moving:
        return
    at = f"{where}: [[transform]] {moving[0]}"
    if len(moving) > 1:
        raise PlanError(f"{at} and {moving[1]} are both next_iteration; list all its entries in one")
    if moving[0] < len(plan.transform):
        after = plan.transform[moving[0]].name
        raise PlanError(f"{at}: next_iteration gives three graphs, and {after} stands behind it; list it last")
    if plan.step.clip_norm:
        raise PlanError(
            f"{at}: next_iteration moves updates, and [step] clip_norm makes each of them need the reductions of all; leave "
            "one of them out"
        )
    if plan.overlap.insert_overlap_deps:
        raise PlanError(
            f"{at}: next_iteration moves what [overlap] insert_overlap_deps = true would hold in its place; leave that out"
        )


def _merged_again(plan: Plan, where: str) -> None:
    for number, one in enumerate(plan.transform, 1):
        again = one.args.get("again", False) if one.name == "merge_duplicates" else False
        if (again is True or again == "backward") and plan.parallel.reshard_after_forward is not False:
            raise PlanError(
                f"{where}: [[transform]] {number}: merge_duplicates with again = {show(again)} keeps what forward gathered "
                "until backward, where [parallel] reshard_after_forward = true gathers it again; use again = "
                '"microbatches", or set reshard_after_forward to false'
            )


# A mesh with more ranks than can be run: said before anything is traced.


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


def entries_of(plan: Plan, parameters: Sequence[str], modules: Sequence[str], aliases: Mapping[str, str]) -> Resolution:
    """What the entries of ``plan`` mean; none by size. Raises PlanError for entries that match nothing or overlap."""
    bucket = plan.bucket
    if not bucket.has_entries:
        return Resolution((), (), ())
    where = f"{plan.path}: [bucket]"
    found = resolve(bucket.plan, parameters, modules, aliases=aliases, unplanned=bucket.unplanned, where=where)
    agree_with_entries(plan, [entry.name for entry in found.entries], str(plan.path))
    return found
