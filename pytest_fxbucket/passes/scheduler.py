"""Where launches and waits stand, as a class to build on: places, process groups, and what is kept in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.c10d import group_ranks, twin_name, untwinned
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.collectives import REDUCTIONS
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.bucketer import hook_name, of
from pytest_fxbucket.passes.compute import Computes, FirstComputes
from pytest_fxbucket.passes.new_nodes import set_argument
from pytest_fxbucket.words import show

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.order import Order
    from pytest_fxbucket.passes.merge import Merged
    from pytest_fxbucket.plan.schema_bucket import Overlap

Pair = tuple["fx.Node", "fx.Node"]


class Scheduler:
    """Decides places by the rules of a plan's ``[overlap]``. A subclass overrides any of its hooks.

    The pass makes one for each graph, once its buckets are merged and before anything moves. A place that a hook asks for is
    kept exactly, or is a :class:`PlanError` that names the hook, the bucket and what stands in the way. Where a hook gives
    None, ``prefetch`` and ``defer_reduce`` decide.
    """

    def __init__(self, rules: Overlap, graph: fx.Graph, buckets: Sequence[Merged], computes: Computes = ()) -> None:
        self.rules = rules
        """The table ``[overlap]``."""
        self.graph = graph
        """With the buckets in it, to be read."""
        self.buckets = tuple(buckets)
        """All that are planned, merged or as they were, in order of launch."""
        self._computes = computes

    def launch_before(self, bucket: Merged) -> fx.Node | None:
        """The node right before which the all-gather ``bucket`` is launched, with what it needs; None: as ``prefetch`` says.

        It may be another bucket's launch, which may move itself. By ``launch_at``, unless a subclass says otherwise.
        """
        direction, entry = bucket.first.direction, bucket.first.entry
        other = self.rules.launch_at.get(direction, {}).get(entry)
        if other is None:
            return None
        where = place_by_hand("launch_at", direction, entry, other)
        at, own = (self.starts.of(direction, one, where, bucket.first.round) for one in (other, entry))
        if at >= own:
            raise PlanError(f"{where} is impossible: when the compute of {other!r} starts, {entry!r} is used first")
        return self.order.nodes[at]

    def wait_before(self, bucket: Merged) -> fx.Node | None:
        """The node right before which the reduction ``bucket`` is waited for; None: as ``defer_reduce`` says.

        By ``wait_before``, unless a subclass says otherwise.
        """
        direction, entry = bucket.first.direction, bucket.first.entry
        other = self.rules.wait_before.get(direction, {}).get(entry)
        # If the entry is reduced in several steps, the rule is for the wait of the last: the others come before it.
        if other is None or any(one.level > bucket.level for one in self.beside(bucket)):
            return None
        return self.order.nodes[self.starts.of(direction, other, place_by_hand("wait_before", direction, entry, other))]

    def group_of(self, bucket: Merged) -> str:
        """The process group that ``bucket`` runs on: its own (:meth:`group`), that one's twin (:meth:`twin`), or another one
        of the same ranks that this process knows. By ``gather_group``, unless a subclass says otherwise.

        Ranks make twins before they run the graph.
        """
        gathers = bucket.first.kind == "all_gather"
        own = self.rules.gather_group in ("own", bucket.first.direction)
        return self.twin(bucket) if gathers and own else self.group(bucket)

    def kept_in_order(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """The pairs (earlier, later) of nodes whose order ``insert_overlap_deps`` writes into the graph; asked only then.

        ``pairs`` are those that make the overlap: all of them, unless a subclass says otherwise. A pair that a subclass adds
        must have a launch or a wait of a bucket in it, and stand in that order. The report lists pairs that no input can carry.
        """
        return pairs

    # To be asked by subclasses.

    def beside(self, bucket: Merged) -> list[Merged]:
        """Other buckets of the same entry, direction, round and sort (all-gathers, or reductions): they are needed together."""
        return [one for one in self.buckets if one is not bucket and _stage(one) == _stage(bucket)]

    @staticmethod
    def group(bucket: Merged) -> str:
        """Name of the process group that ``bucket`` runs on by now."""
        return str(collectives.argument(bucket.launch, "group_name"))

    @staticmethod
    def twin(bucket: Merged) -> str:
        """Name of a second group of the same ranks: on it nothing queues behind what runs on the first."""
        return twin_name(Scheduler.group(bucket))

    @cached_property
    def order(self) -> Order:
        """What each node must stand behind, and where it stands before anything moves."""
        return order_of(self.graph)

    @cached_property
    def starts(self) -> FirstComputes:
        """Where the compute of entries starts."""
        return FirstComputes(self.order, self.buckets, self._computes)


def _stage(bucket: Merged) -> tuple[object, ...]:
    first = bucket.first
    return first.entry or bucket.launch, first.direction, first.round, first.kind in REDUCTIONS


def place_by_hand(key: str, direction: str, entry: str, other: str) -> str:
    """A place of the rules, as people know it; ``key`` is launch_at or wait_before."""
    return f"{key}.{direction}: {entry!r} {'at' if key == 'launch_at' else 'before'} {other!r}"


def overrides(scheduler: Scheduler, hook: str) -> bool:
    """Whether ``scheduler`` has a ``hook`` of its own, and does not go by the rules alone."""
    return getattr(type(scheduler), hook) is not getattr(Scheduler, hook)


def refuse_unnamed(scheduler: Scheduler) -> None:
    """Raise :class:`PlanError` for a place by hand in the rules whose entry has no such bucket."""
    for key, kinds, what in (("launch_at", ("all_gather",), "all-gather"), ("wait_before", tuple(REDUCTIONS), "reduction")):
        for direction, places in getattr(scheduler.rules, key).items():
            here = [one for one in scheduler.buckets if one.first.direction == direction and one.first.kind in kinds]
            known = dict.fromkeys(bucket.first.entry for bucket in here)
            for entry, other in sorted(places.items()):
                if entry not in known:
                    raise PlanError(
                        f"{place_by_hand(key, direction, entry, other)} names no bucket: entry {entry!r} has no {what} there; "
                        f"entries that have one: {', '.join(known) or 'none'}"
                    )


def put_on_groups(scheduler: Scheduler) -> None:
    """Let each bucket run on the group that :meth:`Scheduler.group_of` says.

    Raises :class:`PlanError` for one that this process does not know or that has other ranks.
    """
    for bucket in scheduler.buckets:
        now, group = scheduler.group(bucket), scheduler.group_of(bucket)
        if group == now:
            continue
        if not isinstance(group, str):
            raise PlanError(
                f"{hook_name(scheduler, 'group_of')} must give the name of a group for {of(bucket.first)}, not {show(group)}"
            )
        if untwinned(group) != untwinned(now):
            where = f"{hook_name(scheduler, 'group_of')}: {of(bucket.first)} cannot run on process group {group!r}"
            try:
                same = group_ranks(group) == group_ranks(now)
            except KeyError as error:
                raise PlanError(f"{where}: this process knows no group {error.args[0]!r}") from None
            if not same:
                raise PlanError(f"{where}: it has ranks {group_ranks(group)}, and {now!r} has {group_ranks(now)}")
        set_argument(bucket.launch, "group_name", group)


def kept_pairs(scheduler: Scheduler, pairs: Sequence[Pair]) -> list[Pair]:
    """What :meth:`Scheduler.kept_in_order` says; raises :class:`PlanError` for a pair that cannot be kept."""
    said = scheduler.kept_in_order(tuple(pairs))
    hook = hook_name(scheduler, "kept_in_order")
    if not isinstance(said, (list, tuple)):
        raise PlanError(f"{hook} must give pairs of nodes in a list or tuple, not {show(said)}")
    place = {node: index for index, node in enumerate(scheduler.graph.nodes)}
    ours = {node for bucket in scheduler.buckets for node in (bucket.launch, *bucket.waits)}
    known = set(pairs)
    for pair in said:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(node in place for node in pair)):
            raise PlanError(f"{hook} must give pairs (earlier, later) of nodes of the graph, not {show(pair)}")
        if pair in known:
            continue
        earlier, later = pair
        if ours.isdisjoint(pair):
            raise PlanError(f"{hook}: of {earlier.name} and {later.name} neither is a launch or a wait of a bucket")
        if place[earlier] >= place[later]:
            raise PlanError(f"{hook}: {earlier.name} cannot be kept before {later.name}, which stands before it")
    return list(said)
