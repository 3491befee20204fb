"""Are gathers launched in the order in which they are needed, and reductions before the compute that used to hide them? And
does the graph hold its order by edges, where insert_overlap_deps asks for that?

Launches of one process group run one behind the other, so a gather behind one that is needed later holds up compute. A
reduction that is launched behind compute which used to hide it has less to hide behind. Only a loss against the graph before
the pass is reported, and neither what the inputs of a launch force nor what was placed by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.checks.promises.expectations import DIRECTIONS, Expectations, by_round, of_kind, of_round
from pytest_fxbucket.checks.promises.prefetch import numbered
from pytest_fxbucket.compat.fx import after
from pytest_fxbucket.graph.collectives import REDUCTIONS, is_wait, launch_kind, tensors_sent
from pytest_fxbucket.graph.walks import walked
from pytest_fxbucket.words import some

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis

_Key = tuple[str, str, int, str]
_Launched = Mapping[_Key, list[int]]
"""Positions at which members were launched before the pass, by kind, direction, round or level, and FQN."""


def launch_order_problems(promise: Expectations, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """A sentence for each launch of ``passed`` that lost its place among launches or compute; ``captured``: before the pass."""
    launched: dict[_Key, list[int]] = {}
    for bucket in captured.buckets:
        for fqn in bucket.fqns:
            launched.setdefault(_key(bucket, fqn), []).append(bucket.launch)
    yield from _gathers(promise, launched, passed)
    yield from _reductions(promise, launched, captured, passed)


def _key(bucket: Bucket, fqn: str) -> _Key:
    return bucket.kind, bucket.direction, bucket.round or bucket.level, fqn


def _gathers(promise: Expectations, launched: _Launched, passed: GraphAnalysis) -> Iterator[str]:
    """A sentence for each gather that another one of its group, direction and round overtook, though that is needed later."""
    for direction in DIRECTIONS:
        by_hand = promise.overlap.launch_at.get(direction, {})
        for number, round_ in by_round(of_kind(passed, direction, "all_gather")).items():
            free = [
                one for one in round_ if _is_planned(promise, one) and not by_hand.keys() & set(promise.entries_of(one.fqns))
            ]
            needs = _needs(promise, free)
            for place, later in enumerate(free):
                for sooner in free[:place]:
                    # Both must come first: what is waited for first may be computed with last.
                    is_needed_first = all(a < b for a, b in zip(needs[later.launch], needs[sooner.launch], strict=True))
                    if sooner.group == later.group and is_needed_first and _overtook(sooner, later, launched):
                        what = f"entry {_name(promise, later)}, {direction} all_gather{of_round(number)}"
                        yield f"{what} is launched behind that of {_name(promise, sooner)}, which is needed later"
                        break


def _needs(promise: Expectations, gathers: Sequence[Bucket]) -> dict[int, tuple[int, int]]:
    """By launch, the first wait and the first use of its entries: all launches of one entry count as needed together."""
    waits, uses = dict[str, int](), dict[str, int]()
    for bucket in gathers:
        for entry in promise.entries_of(bucket.fqns):
            wait = bucket.launch if bucket.wait is None else bucket.wait
            waits[entry] = min(waits.get(entry, wait), wait)
            use = wait if bucket.first_use is None else bucket.first_use
            uses[entry] = min(uses.get(entry, use), use)
    return {
        bucket.launch: (min(waits[e] for e in entries), min(uses[e] for e in entries))
        for bucket in gathers
        if (entries := promise.entries_of(bucket.fqns))
    }


def _overtook(sooner: Bucket, later: Bucket, launched: _Launched) -> bool:
    """Whether ``sooner`` stood behind ``later`` before the pass, and need not stand before it."""
    before, behind = ([at for fqn in one.fqns for at in launched.get(_key(one, fqn), ())] for one in (later, sooner))
    # If members of the two stood among each other, neither came first.
    return bool(before and behind) and max(before) < min(behind) and later.blocked < sooner.launch


def _reductions(promise: Expectations, launched: _Launched, captured: GraphAnalysis, passed: GraphAnalysis) -> Iterator[str]:
    """A sentence for each reduction launched behind compute that stood behind it before the pass and that it does not need."""
    stood = {key: where for where, key in numbered(captured)}
    now = [(where, key) for where, key in numbered(passed) if key in stood and key[0] in DIRECTIONS]  # updates may move
    for bucket in passed.buckets:
        members = [at for fqn in bucket.fqns if fqn for at in launched.get(_key(bucket, fqn), ())]
        if bucket.kind not in REDUCTIONS or not members or not _is_planned(promise, bucket):
            continue
        # The last member counts: a bucket cannot be launched before all of its gradients are there.
        between = [key for where, key in now if bucket.blocked < where < bucket.launch and stood[key] > max(members)]
        if between:
            names = promise.entries_of(fqn for _, fqn, _ in between)
            what = f"entry {_name(promise, bucket)}, {bucket.direction} {bucket.kind}"
            yield f"{what} is launched behind compute of {some(names)}, which used to hide it"


def _is_planned(promise: Expectations, bucket: Bucket) -> bool:
    return any(fqn and promise.is_planned(fqn) for fqn in bucket.fqns)


def _name(promise: Expectations, bucket: Bucket) -> str:
    return some(promise.entries_of(bucket.fqns), 1)


# Do edges of the graph hold its order, where ``[overlap] insert_overlap_deps`` asks for that?
#
# A compiler may reorder whatever no edge forbids, so each promised pair needs a path of edges from the earlier to the later.


_PROMISE = "as insert_overlap_deps promises"


def order_problems(graph: fx.Graph, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A sentence for each of ``pairs`` (earlier, later) that a compiler may put in another order, since no path holds it.

    And one for each wait among the later nodes whose readers do not hold the tensors that its launch sends: a compiler could
    reuse their memory before the collective is done.
    """
    nodes = {node.name: node for node in graph.nodes}
    place = {node: at for at, node in enumerate(graph.nodes)}
    for pair in pairs:
        if gone := [name for name in pair if name not in nodes]:
            yield f"{gone[0]} is not in the graph, which was to keep {pair[0]} before {pair[1]}"
        elif not _is_made_of(nodes[pair[1]], nodes[pair[0]], place):
            yield f"nothing keeps {pair[0]} before {pair[1]}, {_PROMISE}"
    launches = _launches(graph)
    for later in dict.fromkeys(later for _, later in pairs):
        wait = nodes.get(later)
        if wait in launches and is_wait(wait):
            yield from _not_held(wait, launches[wait])


def _is_made_of(later: fx.Node, earlier: fx.Node, place: Mapping[fx.Node, int]) -> bool:
    """Whether a path of edges leads from ``earlier`` to ``later``."""
    # Nodes that stand before ``earlier`` cannot lead back to it, so each search stays between the two.
    return earlier in walked([later], lambda node: (one for one in node.all_input_nodes if place[one] >= place[earlier]))


def _launches(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The launch of each wait, and of each node between: views, and operators that only hold the order."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        # The first input is what ``after`` and views give on. All others of ``after`` need only be computed before.
        source = next(iter(node.all_input_nodes), None)
        if launch_kind(node) is not None:
            found[node] = node
        elif source in found and not is_wait(source):
            found[node] = found[source]
    return found


def _not_held(wait: fx.Node, launch: fx.Node) -> Iterator[str]:
    sent = set(tensors_sent(launch))
    for reader in wait.users:
        if reader.target is not after or not sent <= set(reader.all_input_nodes):
            yield f"{reader.name} reads {wait.name}, and does not hold what {launch.name} sends, {_PROMISE}"
