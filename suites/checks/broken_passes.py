"""Passes that are broken on purpose: each buckets as a good one does, then breaks one thing.

All have the call shape of torch's pass, ``(gm, module_bucket_plans) -> GraphModule``, and expect a Llama of two layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import fx

from pytest_fxbucket.passes.manual import manual_overlap_bucketing
from suites.checks.bucketed_llama import (
    WK,
    aten,
    c10d,
    calls,
    columns,
    cuts,
    gathers,
    is_last_rank,
    launch_behind,
    like,
    packs,
    reductions,
    replace_input,
    swap_members,
    swap_pieces,
    wait_of,
)

Plans = Sequence[str | list[str]]


_GOOD: dict[tuple[str, ...], fx.Graph] = {}


def good(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    """Bucketed as it should be; remembered, since the graph is the same for every pass and rank."""
    key = (repr(plans), *(node.name for node in gm.graph.nodes))
    if key not in _GOOD:
        _GOOD[key] = manual_overlap_bucketing(gm, plans).graph
    return fx.GraphModule(gm, copy.deepcopy(_GOOD[key]))


def breaking(change: Callable[[fx.GraphModule], None]) -> Callable[[fx.GraphModule, Plans], fx.GraphModule]:
    """The pass that buckets as it should, and then does ``change`` to the graph."""

    @wraps(change)
    def broken(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
        gm = good(gm, plans)
        change(gm)
        return gm

    return broken


@breaking
def swapped_in_pack(gm: fx.GraphModule) -> None:
    swap_members(packs(gm)[0])


@breaking
def swapped_in_both(gm: fx.GraphModule) -> None:
    swap_members(packs(gm)[0])
    swap_pieces(columns(gm)[0])


@breaking
def wrong_split(gm: fx.GraphModule) -> None:
    """The sizes of two neighbours change places: every piece still has a size of some member."""
    split = columns(gm)[0]
    rows, sizes, dim = split.args
    assert isinstance(sizes, (list, tuple))
    split.args = (rows, [sizes[1], sizes[0], *sizes[2:]], dim)


@breaking
def late_first_launch_of_backward(gm: fx.GraphModule) -> None:
    """What stayed gathered computes first, and could hide it."""
    launch = gathers(gm)[4]
    wait_of(launch).prepend(launch)


@breaking
def half_early_wait(gm: fx.GraphModule) -> None:
    """The wait stands in the middle of what should hide it."""
    wait = wait_of(gathers(gm)[2])
    calls(gm, aten.mm.default)[1].append(wait)


@breaking
def early_waits_behind_dummy_readers(gm: fx.GraphModule) -> None:
    """Everything is waited for at the top, behind reads that nobody needs."""
    graph = gm.graph
    launches = gathers(gm)[:4]
    tok, *rest = launches
    place = tok
    for launch in rest:
        before = launches[launches.index(launch) - 1]
        launch_behind(place, launch)
        launch.append(wait_of(before))
        with graph.inserting_after(wait_of(before)):
            place = like(wait_of(before), aten.neg.default, wait_of(before))
    place.append(wait_of(rest[-1]))


@breaking
def wrong_on_last_rank(gm: fx.GraphModule) -> None:
    if is_last_rank():
        pack = reductions(gm)[1].all_input_nodes[0]
        replace_input(pack, pack.all_input_nodes[WK], lambda old: like(old, aten.mul.Tensor, old, 1 + 2**-20))


@breaking
def other_order_on_last_rank(gm: fx.GraphModule) -> None:
    if is_last_rank():
        first, second = gathers(gm)[:2]
        second.append(first)


@breaking
def other_layout_on_last_rank(gm: fx.GraphModule) -> None:
    if is_last_rank():
        swap_members(reductions(gm)[1].all_input_nodes[0])
        swap_pieces(cuts(gm)[1])


@breaking
def low_precision_in_one_gather(gm: fx.GraphModule) -> None:
    pack = packs(gm)[1]

    def squeezed(old: fx.Node) -> fx.Node:
        half = like(old, aten._to_copy.default, old, dtype=torch.bfloat16)
        return like(old, aten._to_copy.default, half, dtype=torch.float32)

    replace_input(pack, pack.all_input_nodes[WK], squeezed)


@breaking
def launch_without_overload(gm: fx.GraphModule) -> None:
    """As written by hand: the operator's packet, not one of its overloads."""
    source = calls(gm, aten.mm.default)[0]
    with gm.graph.inserting_after(source):
        launch = like(source, c10d.all_reduce, source, "sum", "0")
    with gm.graph.inserting_after(launch):
        like(source, c10d.wait_tensor, launch)


@breaking
def wrong_group_size(gm: fx.GraphModule) -> None:
    source = calls(gm, aten.mm.default)[0]
    with gm.graph.inserting_after(source):
        launch = like(source, c10d.all_gather_into_tensor.default, source, 3, "0")
    with gm.graph.inserting_after(launch):
        like(source, c10d.wait_tensor.default, launch)


@breaking
def pack_overwritten(gm: fx.GraphModule) -> None:
    """The buffer that is sent is cleared, through a view, while it is being sent."""
    pack = packs(gm)[0]
    (launch,) = pack.users
    with gm.graph.inserting_after(launch):
        view = like(pack, aten.view.default, pack, [-1])
    with gm.graph.inserting_after(view):
        like(pack, aten.zero_.default, view)


@breaking
def other_compute(gm: fx.GraphModule) -> None:
    scale = calls(gm, aten.mul.Tensor)[1]
    users = list(scale.users)
    with gm.graph.inserting_after(scale):
        changed = like(scale, aten.mul.Tensor, scale, 1 + 2**-22)
    for user in users:
        user.replace_input_with(scale, changed)


@breaking
def without_metadata(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        node.meta = {"val": node.meta.get("val")}


@breaking
def without_values(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        node.meta = {}


@breaking
def stale_values(gm: fx.GraphModule) -> None:
    """Halves, as of a copied node, that say that they are as large as the whole."""
    launch = reductions(gm)[1]
    pack = launch.all_input_nodes[0]
    rows, columns = pack.meta["val"].shape
    with gm.graph.inserting_before(launch):
        half = like(pack, aten.slice.Tensor, pack, 0, 0, rows // 2)
        half = like(pack, aten.view.default, like(pack, aten.neg.default, half), [rows // 2, columns])
        whole = like(pack, aten.cat.default, [half, half])
    launch.replace_input_with(pack, whole)


@breaking
def lying_values(gm: fx.GraphModule) -> None:
    """A reduction in half precision whose input says that it is float32."""
    launch = reductions(gm)[1]
    pack = launch.all_input_nodes[0]
    with gm.graph.inserting_before(launch):
        half = like(pack, aten._to_copy.default, pack, dtype=torch.bfloat16)
        lie = like(pack, aten.neg.default, half)
        lie = like(pack, aten.neg.default, lie)
    launch.replace_input_with(pack, lie)


@breaking
def one_more_output(gm: fx.GraphModule) -> None:
    (returned,) = gm.graph.output_node().args
    assert isinstance(returned, (list, tuple))
    gm.graph.output_node().args = ([*returned, returned[0]],)


def raises(gm: fx.GraphModule, plans: Plans) -> fx.GraphModule:
    raise KeyError("no such module as layers.9")


def returns_none(gm: fx.GraphModule, plans: Plans) -> None:
    good(gm, plans)
