"""What launches send and bring: other numbers, dtypes, or places of members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.graph.collectives import launch_kind, tensors_sent, waits_of
from pytest_fxbucket.graph.movement import moves_data, pads
from pytest_fxbucket.graph.ops import dtype_name, operator_name
from pytest_fxbucket.graph.walks import reached
from pytest_fxbucket.mutate.launches import (
    dim_of,
    flights,
    gathers,
    members_of,
    pack_of,
    pieces_of,
    plain_launches,
    reductions,
    sent_otherwise,
    sizes_of,
    split_of,
)
from pytest_fxbucket.mutate.moving import carries
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import dtype_of_cast, leave_out, put_behind, tensor

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten
_MORE = 1 + 2**-6
"""Enough for bfloat16, which has 8 bits."""
_PERMUTES = ("aten::transpose", "aten::permute", "aten::t", "aten::flip", "aten::roll")
_OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32}


def branch_on_the_rank(seen: SeenGraph) -> Iterator[Site]:
    """What the last rank sends is another number than its graph's on all other ranks.

    Every launch of floating point numbers.
    """
    for flight in flights(seen):
        if flight.sent is not None and flight.sent.meta["val"].dtype.is_floating_point:
            how = f"sends {_MORE} times what it should"
            yield Site(flight.launch.name, how, partial(_scale, flight.launch.name), on_last_rank=True)


def _scale(name: str, broken: BrokenGraph) -> None:
    launch = broken[name]
    sent = launch.all_input_nodes[0]
    launch.replace_input_with(sent, broken.before(launch, aten.mul.Tensor, sent, _MORE))


def cast_early(seen: SeenGraph) -> Iterator[Site]:
    """What arrives and is cast later is cast before the launch instead.

    Every launch of which all that arrives is cast to one dtype.
    """
    for launch, _ in plain_launches(seen):
        dtypes = {_cast_of(user) for wait in waits_of(launch) for user in _ends(wait)}
        # A reader that does not cast puts None into the set.
        if len(dtypes) == 1 and (dtype := dtypes.pop()) is not None:
            yield Site(launch.name, f"sends what was cast to {dtype} already", partial(_cast_early, launch.name, dtype))


def _ends(wait: fx.Node) -> Iterator[fx.Node]:
    """What reads ``wait``, through what moves its elements only."""
    moved = reached([wait], lambda node: (user for user in node.users if _cast_of(user) is None and moves_data(user)))
    for node in moved:
        yield from (user for user in node.users if user not in moved)


def _cast_of(node: fx.Node) -> torch.dtype | None:
    return dtype_of_cast(node) if node.op == "call_function" else None


def _cast_early(name: str, dtype: torch.dtype, broken: BrokenGraph) -> None:
    launch = broken[name]
    sent = launch.all_input_nodes[0]
    value = tensor(sent)
    own = value.dtype if value is not None else None
    cast = aten._to_copy.default
    early = broken.before(launch, cast, sent, dtype=dtype)
    # Cast back behind the wait, since the old casts still read it.
    sent_otherwise(launch, early, lambda wait: broken.behind(wait, cast, wait, dtype=own), broken)


def cast_late(seen: SeenGraph) -> Iterator[Site]:
    """What is sent is cast behind the wait instead of before the launch: reduced in bfloat16, or gathered in float32.

    Every launch right behind a cast that it alone reads.
    """
    for launch, sent in plain_launches(seen):
        if dtype_of_cast(sent) is not None and len(sent.users) == 1:
            yield Site(launch.name, "sends what was not cast, which is cast behind its wait", partial(_cast_late, launch.name))


def _cast_late(name: str, broken: BrokenGraph) -> None:
    launch = broken[name]
    cast = launch.all_input_nodes[0]
    dtype = dtype_of_cast(cast)
    sent_otherwise(
        launch,
        cast.all_input_nodes[0],
        lambda wait: broken.behind(wait, aten._to_copy.default, wait, dtype=dtype),
        broken,
    )


def members_swapped(seen: SeenGraph) -> Iterator[Site]:
    """Two members of as many elements trade places: in the pack of a launch, behind its wait, or in both.

    Each size that several members of a launch have: the first two of it.
    """
    for flight in flights(seen):
        pack, split = pack_of(flight.launch), split_of(flight)
        packed = _first_twins([str(list(one.meta["val"].shape)) for one in members_of(pack)]) if pack is not None else []
        cut = (
            [pair for pair in _first_twins(sizes_of(split)) if set(pair) <= set(pieces_of(split))] if split is not None else []
        )
        if pack is not None:
            for a, b in packed:
                how = f"has its members {a} and {b} in each other's places"
                yield Site(flight.launch.name, how, partial(_swap, pack.name, "", a, b))
        if split is not None:
            for a, b in cut:
                how = f"has what arrives of members {a} and {b} in each other's places"
                yield Site(flight.launch.name, how, partial(_swap, "", split.name, a, b))
        if pack is not None and split is not None and len(members_of(pack)) == len(sizes_of(split)):
            for a, b in (pair for pair in packed if pair in cut):
                how = f"has members {a} and {b} in each other's places, before it and behind"
                yield Site(flight.launch.name, how, partial(_swap, pack.name, split.name, a, b))


def _first_twins(what: Sequence[object]) -> list[tuple[int, int]]:
    """The first two of each that is there several times."""
    # Backwards, so that of each value the first pair is the one that stays in the dict.
    pairs = {what[a]: (a, b) for a, b in reversed(list(combinations(range(len(what)), 2))) if what[a] == what[b]}
    return sorted(pairs.values())


def _swap(pack: str, split: str, a: int, b: int, broken: BrokenGraph) -> None:
    if pack:
        members = members_of(broken[pack])
        members[a], members[b] = members[b], members[a]
        broken[pack].update_arg(0, members)
    if split:
        pieces = pieces_of(broken[split])
        pieces[a].update_arg(1, b)
        pieces[b].update_arg(1, a)


def offset_shifted(seen: SeenGraph) -> Iterator[Site]:
    """A member is cut out of what arrives at a wrong place: one element off, or where its neighbour of another size was before.

    Each piece of each unpack, and each two neighbours of different sizes.
    """
    for flight in flights(seen):
        if (split := split_of(flight)) is None:
            continue
        sizes, pieces = sizes_of(split), pieces_of(split)
        for number, end in enumerate(accumulate(sizes)):
            if number in pieces and sizes[number]:
                # Nothing lies before the first piece: -1 would count from the end.
                to = -1 if number else 1
                change = partial(_shift, pieces[number].name, split.name, end - sizes[number] + to, end + to)
                yield Site(pieces[number].name, f"begins {to:+} element further", change)
        for a, b in pairwise(sorted(pieces)):
            if b == a + 1 and sizes[a] != sizes[b]:
                how = f"and {pieces[b].name} are cut as if the second came first"
                yield Site(pieces[a].name, how, partial(_exchange, split.name, a))


def _shift(piece: str, split: str, begin: int, end: int, broken: BrokenGraph) -> None:
    node, cut = broken[piece], broken[split]
    broken.bypass(node, broken.before(node, aten.slice.Tensor, cut.args[0], dim_of(cut), begin, end))


def _exchange(name: str, first: int, broken: BrokenGraph) -> None:
    split = broken[name]
    sizes, pieces = sizes_of(split), pieces_of(split)
    sizes[first : first + 2] = reversed(sizes[first : first + 2])
    split.update_arg(1, sizes)
    pieces[first].update_arg(1, first + 1)
    pieces[first + 1].update_arg(1, first)


def padding_leaks(seen: SeenGraph) -> Iterator[Site]:
    """Padded rows of an uneven shard are read as if they were a parameter's, or hold ones where they are reduced.

    Every strip of first rows off what is gathered, and every pad with zeros of what is reduced.
    """
    for flight in gathers(seen):
        for node in flight.arrived:
            rows = node.all_input_nodes[0].meta["val"].shape[0] if _strips(node) else 0
            kept = node.meta["val"].shape[0] if rows else 0
            if rows > kept:
                yield Site(node.name, f"takes {rows - kept} padded rows in", partial(_from, node.name, rows - kept, rows))
    for flight in reductions(seen):
        for source in dict.fromkeys(source for _, source in flight.sources):
            if pads(source):
                yield Site(source.name, "pads with ones", partial(_with_ones, source.name))


def _strips(node: Any) -> bool:
    # Dimension 0 from 0 to an end, without a step.
    return operator_name(node) == "aten::slice" and tuple(node.args[1:3]) == (0, 0) and len(node.args) == 4


def _from(name: str, begin: int, end: int, broken: BrokenGraph) -> None:
    node = broken[name]
    node.args = (node.args[0], 0, begin, end)


def _with_ones(name: str, broken: BrokenGraph) -> None:
    node = broken[name]
    node.args = (*node.args[:2], 1.0)


def tokens_misrouted(seen: SeenGraph) -> Iterator[Site]:
    """What goes to experts and back by all-to-all is not put in order, or in the reversed one.

    Waits for all-to-alls, and what permutes their tokens without a change of shape, before the launch or behind the wait.
    """
    for launch in seen.graph.nodes:
        if launch_kind(launch) != "all_to_all":
            continue
        before = reached(tensors_sent(launch), lambda node: filter(moves_data, node.all_input_nodes))
        behind = reached(waits_of(launch), lambda node: filter(_is_moved, node.users))
        for node in (*before, *behind):
            if operator_name(node) in _PERMUTES and _keeps_shape(node):
                yield Site(node.name, f"is left out, beside {launch.name}", partial(leave_out, node.name))
        for wait in waits_of(launch):
            # A single row is the same when it is reversed.
            if (value := tensor(wait)) is not None and value.dim() and value.shape[0] != 1:
                yield Site(wait.name, "is read in reversed order", partial(_reverse, wait.name))


def _is_moved(node: fx.Node) -> bool:
    return node.op == "call_function" and moves_data(node)


def _keeps_shape(node: fx.Node) -> bool:
    made, source = tensor(node), tensor(node.all_input_nodes[0])
    return made is not None and source is not None and made.shape == source.shape


def _reverse(name: str, broken: BrokenGraph) -> None:
    wait = broken[name]
    put_behind(wait, broken.behind(wait, aten.flip.default, wait, [0]))


def view_changed(seen: SeenGraph) -> Iterator[Site]:
    """A matrix that arrives is seen as if its columns lay one behind the other, not its rows.

    The last view of each member behind a wait, where it gives a matrix of several rows and columns.
    """
    for flight in flights(seen):
        for node in flight.arrived:
            shape = [size for size in node.meta["val"].shape if size != 1] if operator_name(node) == "aten::view" else []
            if len(shape) == 2 and len(node.meta["val"].shape) == 2 and any(not carries(user) for user in _readers(node)):
                yield Site(node.name, "takes columns for rows", partial(_turn, node.name))


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Who reads ``node``, turned around too."""
    return [reader for user in node.users for reader in (user.users if operator_name(user) == "aten::t" else [user])]


def _turn(name: str, broken: BrokenGraph) -> None:
    view = broken[name]
    rows, columns = view.meta["val"].shape
    other = broken.before(view, aten.view.default, view.args[0], [columns, rows])
    turned = broken.before(view, aten.t.default, other)
    broken.bypass(view, broken.before(view, aten.clone.default, turned, memory_format=torch.contiguous_format))


def wire_dtype(seen: SeenGraph) -> Iterator[Site]:
    """What is sent is cast to another floating dtype before the launch, and back behind the wait.

    Every launch of one tensor of floating point numbers.
    """
    for flight in flights(seen):
        other = None if flight.sent is None else _OTHER.get(flight.sent.meta["val"].dtype)
        if other is not None:
            waits = tuple(wait.name for wait in flight.waits)
            how = f"carries {dtype_name(other)}"
            yield Site(flight.launch.name, how, partial(_carry, flight.launch.name, waits, other))


def _carry(name: str, waits: tuple[str, ...], dtype: torch.dtype, broken: BrokenGraph) -> None:
    launch = broken[name]
    sent = launch.all_input_nodes[0]
    was = sent.meta["val"].dtype
    cast = broken.before(launch, aten._to_copy.default, sent, dtype=dtype)
    launch.replace_input_with(sent, cast)
    # Launch and waits stay, and nothing computes their fake values anew.
    for node in (launch, *map(broken.__getitem__, waits)):
        node.meta["val"] = node.meta["val"].to(dtype)
    for wait in map(broken.__getitem__, waits):
        # Taken before the cast back is made, which reads the wait itself.
        readers = list(wait.users)
        back = broken.behind(wait, aten._to_copy.default, wait, dtype=was)
        for reader in readers:
            reader.replace_input_with(wait, back)


def write_in_flight(seen: SeenGraph) -> Iterator[Site]:
    """What a collective sends, or fills, is written between its launch and its wait.

    Every launch of one tensor that is waited for: what it sends, and what it fills.
    """
    for flight in flights(seen):
        if flight.sent is not None and flight.waits:
            name = flight.launch.name
            yield Site(name, f"sends {flight.sent.name}, which is written meanwhile", partial(_write, name, flight.sent.name))
            yield Site(name, "fills what is written meanwhile", partial(_write, name, name))


def _write(launch: str, written: str, broken: BrokenGraph) -> None:
    broken.behind(broken[launch], aten.mul_.Scalar, broken[written], 2)
