"""Parameters and gradients are followed through every form of pack and unpack, by arguments and never by metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.buckets import GraphAnalysis
from suites.graph.handmade import GROUP, RANKS, Handmade, aten, c10d, gathered_rows, unpacked

SHARDS = {"a": (2, 3), "b": (4,), "c": (1, 2, 2)}
FULL = {fqn: (shape[0] * RANKS, *shape[1:]) for fqn, shape in SHARDS.items()}
SIZES = {"a": 6, "b": 4, "c": 4}


def shards_of(made: Handmade) -> list[fx.Node]:
    return [made.param(fqn, *shape) for fqn, shape in SHARDS.items()]


def flat(made: Handmade, node: fx.Node) -> fx.Node:
    return made.call(aten.view.default, node, [-1])


def packed_by_flatten(made: Handmade, shards: Sequence[fx.Node]) -> fx.Node:
    return made.gather(made.call(aten.flatten_dense_tensors.default, list(shards)))


def packed_by_cat(made: Handmade, shards: Sequence[fx.Node]) -> fx.Node:
    return made.gather(made.call(aten.cat.default, [flat(made, shard) for shard in shards]))


def packed_by_copies(made: Handmade, shards: Sequence[fx.Node]) -> fx.Node:
    buffer = made.call(aten.empty.memory_format, [sum(SIZES.values())], dtype=torch.float32, device="cpu")
    offset = 0
    for shard, size in zip(shards, SIZES.values(), strict=True):
        made.call(aten.copy_.default, made.call(aten.slice.Tensor, buffer, 0, offset, offset + size), flat(made, shard))
        offset += size
    return made.gather(buffer)


def packed_by_foreach(made: Handmade, shards: Sequence[fx.Node]) -> fx.Node:
    buffer = made.call(aten.empty.memory_format, [sum(SIZES.values())], dtype=torch.float32, device="cpu")
    split = made.call(aten.split_with_sizes.default, buffer, list(SIZES.values()))
    targets = [made.part(split, i) for i in range(len(SIZES))]
    made.call(aten._foreach_copy_.default, targets, [flat(made, shard) for shard in shards])
    return made.gather(buffer)


def packed_in_place(made: Handmade, shards: Sequence[fx.Node]) -> fx.Node:
    """As rank 1 does it: its part of the whole result is the input."""
    numel = sum(SIZES.values())
    whole = made.call(aten.empty.memory_format, [numel * RANKS], dtype=torch.float32, device="cpu")
    mine = made.call(aten.slice.Tensor, whole, 0, numel, 2 * numel)
    made.call(aten.copy_.default, mine, made.call(aten.cat.default, [flat(made, shard) for shard in shards]))
    return made.call(c10d.all_gather_into_tensor_out.default, mine, RANKS, GROUP, out=whole)


PACKS = [packed_by_flatten, packed_by_cat, packed_by_copies, packed_by_foreach, packed_in_place]


def rows_of(made: Handmade, launch: fx.Node) -> fx.Node:
    return made.call(aten.view.default, made.wait(launch), [RANKS, -1])


def unpacked_by_copies(made: Handmade, launch: fx.Node) -> list[fx.Node]:
    return unpacked(made, rows_of(made, launch), list(SIZES.values()), list(FULL.values()))


def unpacked_by_views(made: Handmade, launch: fx.Node) -> list[fx.Node]:
    split = made.call(aten.split_with_sizes.default, rows_of(made, launch), list(SIZES.values()), 1)
    pieces = (made.part(split, i) for i in range(len(SIZES)))
    return [made.call(aten.reshape.default, piece, list(full)) for piece, full in zip(pieces, FULL.values(), strict=True)]


def unpacked_by_narrow(made: Handmade, launch: fx.Node) -> list[fx.Node]:
    rows, offset, found = rows_of(made, launch), 0, []
    for fqn, size in SIZES.items():
        piece = made.call(aten.slice.Tensor, rows, 1, offset, offset + size)
        piece = made.call(aten.clone.default, piece, memory_format=torch.contiguous_format)
        found.append(made.call(aten._unsafe_view.default, piece, list(FULL[fqn])))
        offset += size
    return found


def unpacked_into_buffers(made: Handmade, launch: fx.Node) -> list[fx.Node]:
    """As FSDP2 does it."""
    buffers = [made.call(aten.empty.memory_format, list(full), dtype=torch.float32, device="cpu") for full in FULL.values()]
    views = [made.call(aten.view.default, buffer, [RANKS, -1]) for buffer in buffers]
    made.call(aten.split_with_sizes_copy.out, rows_of(made, launch), list(SIZES.values()), 1, out=views)
    return buffers


def unpacked_rank_by_rank(made: Handmade, launch: fx.Node) -> list[fx.Node]:
    rows, offset, found = rows_of(made, launch), 0, []
    for fqn, size in SIZES.items():
        piece = made.call(aten.slice.Tensor, rows, 1, offset, offset + size)
        shards = [
            made.call(aten.view.default, made.call(aten.select.int, piece, 0, r), list(SHARDS[fqn])) for r in range(RANKS)
        ]
        found.append(made.call(aten.cat.default, shards, 0))
        offset += size
    return found


UNPACKS = [unpacked_by_views, unpacked_by_narrow, unpacked_into_buffers, unpacked_rank_by_rank]


def computed(reading: GraphAnalysis) -> list[str]:
    return [fqn for _, _, fqn in reading.computes]


@pytest.mark.parametrize(
    ("pack", "unpack"),
    [*((pack, unpacked_by_copies) for pack in PACKS), *((packed_by_flatten, unpack) for unpack in UNPACKS)],
)
def test_each_pack_and_unpack_of_a_gather_is_followed(
    pack: Callable[..., fx.Node], unpack: Callable[..., list[fx.Node]]
) -> None:
    made = Handmade()
    whole = unpack(made, pack(made, shards_of(made)))
    made.loss(*whole)
    reading = made.read()
    assert reading.problems == ()
    (bucket,) = reading.buckets
    assert [(m.fqn, m.offset, m.numel, m.precision) for m in bucket.members] == [
        ("a", 0, 6, 23),
        ("b", 24, 4, 23),
        ("c", 40, 4, 23),
    ]
    assert (bucket.numel, bucket.bytes, bucket.direction) == (28, 112, "forward")
    assert computed(reading) == ["a", "b", "c"]
    assert bucket.launch < (bucket.wait or 0) < (bucket.first_use or 0)


@pytest.mark.parametrize(("order", "reads"), [((0, 1), ["w"]), ((1, 0), [])])
def test_parts_along_another_dimension_are_followed_to_where_they_are_joined_in_the_order_of_ranks(
    order: Sequence[int], reads: list[str]
) -> None:
    """A parameter of Shard(1): what ranks sent lies one behind the other, and the model joins it side by side."""
    made = Handmade()
    parts = made.call(aten.split.Tensor, made.gathered(made.param("w", 4, 3)), 4)
    made.loss(made.call(aten.cat.default, [made.part(parts, rank) for rank in order], 1))
    reading = made.read()
    jumbled = "aten.neg.default (neg_default) reads gathered bytes that are no parameter in its order: w"
    assert (computed(reading), reading.problems) == (reads, () if reads else (jumbled,))


@pytest.mark.parametrize("unpack", [unpacked_by_narrow, unpacked_rank_by_rank])
def test_a_piece_cut_one_element_too_early_shows_though_the_metadata_says_otherwise(
    unpack: Callable[..., list[fx.Node]],
) -> None:
    made = Handmade()
    made.loss(*unpack(made, packed_by_cat(made, shards_of(made))))
    for node in made.finish().nodes:
        if node.target is aten.slice.Tensor and node.args[2:] == (6, 10):
            node.args = (*node.args[:2], 5, 9)
    (problem,) = made.read().problems
    assert problem.endswith("reads gathered bytes that are no parameter in its order: a, b")


@pytest.mark.parametrize("sizes", [[6, 3, 5], [4, 6, 4], [6, 4, 3]])
@pytest.mark.parametrize("unpack", [unpacked_by_copies, unpacked_by_views, unpacked_into_buffers])
def test_a_wrong_split_size_shows_though_the_metadata_says_otherwise(
    unpack: Callable[..., list[fx.Node]], sizes: list[int]
) -> None:
    made = Handmade()
    made.loss(*unpack(made, packed_by_cat(made, shards_of(made))))
    for node in made.finish().nodes:
        if "split" in str(node.target):
            node.args = (node.args[0], sizes, *node.args[2:])
    with pytest.raises(PassError, match="the graph cannot be run"):
        made.read()


def test_what_does_not_fit_names_the_operator_and_what_it_was_given() -> None:
    made = Handmade()
    made.loss(*unpacked_by_copies(made, packed_by_flatten(made, shards_of(made))))
    split = next(n for n in made.finish().nodes if n.target is aten.split_with_sizes_copy.default)
    split.args = (split.args[0], [6, 3, 4], 1)
    with pytest.raises(
        PassError, match=r"cannot be run: aten\.split_with_sizes_copy\.default \(split_with_sizes_copy_default\) of view"
    ):
        made.read()


def test_zeros_between_gradients_of_a_bucket_are_no_part_of_a_gradient() -> None:
    made = Handmade()
    first, second = (made.call(aten.view.default, made.compute(made.batch(2, 3)), [RANKS, -1]) for _ in range(2))
    gap = made.call(aten.zeros.default, [RANKS, 3], device="cpu")
    arrived = flat(made, made.reduced(flat(made, made.call(aten.cat.default, [first, gap, second], 1))))
    split = made.call(aten.split_with_sizes.default, arrived, [3, 3, 3])
    for i, fqn in ((0, "a"), (2, "b")):
        made.returns(made.part(split, i), fqn=fqn)
    made.compute(made.part(split, 1))
    reading = made.read()
    assert reading.problems == ()
    (bucket,) = reading.buckets
    assert [(m.fqn, m.offset, m.numel) for m in bucket.members] == [("a", 0, 3), ("b", 24, 3)]
    end = reading.last
    assert [m.last_use for m in bucket.members] == [end, end]
    assert bucket.first_use == end


def test_a_chunk_cat_of_gradients_that_do_not_stand_side_by_side_cannot_be_run() -> None:
    made = Handmade()
    fits, not_fits = made.compute(made.batch(2, 4)), made.compute(made.batch(3, 4))
    packed = made.call(aten._chunk_cat.default, [fits, fits], 1, RANKS)
    made.returns(made.reduced(packed))
    made.finish()
    packed.args = ([fits, not_fits], *packed.args[1:])
    with pytest.raises(PassError, match=r"cannot be run: aten\._chunk_cat\.default .* does not fit"):
        made.read()


VIEWS: dict[str, list[tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "t": [(aten.t.default, ())],
    "transpose": [(aten.transpose.int, (0, 1))],
    "permute": [(aten.permute.default, ([1, 0],))],
    "t of t": [(aten.t.default, ()), (aten.t.default, ())],
    "unsqueeze": [(aten.unsqueeze.default, (0,))],
    "squeeze": [(aten.unsqueeze.default, (0,)), (aten.squeeze.dim, (0,))],
    "view": [(aten.view.default, ([3, 4],))],
    "detach": [(aten.detach.default, ())],
    "alias": [(aten.alias.default, ())],
    "expand": [(aten.unsqueeze.default, (0,)), (aten.expand.default, ([5, 4, 3],))],
    "half of the rows": [(aten.slice.Tensor, (0, 2, 4))],
    "some columns": [(aten.slice.Tensor, (1, 1, 3))],
    "one row": [(aten.select.int, (0, 3))],
    "one column": [(aten.select.int, (1, 2))],
    "diagonal": [(aten.diagonal.default, ())],
    "clone": [(aten.clone.default, ())],
    "transposed clone": [(aten.t.default, ()), (aten.clone.default, ())],
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_what_a_model_looks_at_of_a_parameter_is_that_parameter(
    views: list[tuple[Callable[..., Any], tuple[Any, ...]]],
) -> None:
    made = Handmade()
    shards = shards_of(made)
    node, other, _ = unpacked_by_copies(made, packed_by_flatten(made, shards))
    for target, args in views:
        node = made.call(target, node, *args)
    made.loss(node, other)
    reading = made.read()
    assert reading.problems == ()
    assert computed(reading) == ["a", "b"]


def test_parameters_that_the_model_joins_are_read_where_it_joins_them() -> None:
    """Fused projections, or a class token before the patches."""
    made = Handmade()
    x = made.batch(5, 3)
    a, d = made.gathered(made.param("a", 2, 3)), made.gathered(made.param("d", 1, 3))
    made.loss(made.call(aten.cat.default, [a, d]), made.call(aten.cat.default, [d, x]))
    reading = made.read()
    assert reading.problems == ()
    assert computed(reading) == ["a", "d", "d"]


@pytest.mark.parametrize("kept", [5, 3, 1])
def test_uneven_parameters_are_followed_without_their_padding(kept: int) -> None:
    """``kept`` rows of a parameter on 4 ranks; a shard has ceil(kept / 4) rows."""
    made = Handmade(ranks=4)
    per_rank = -(-kept // 4)
    shards = [made.param("a", per_rank, 3), made.param("b", 1, 2)]
    full = unpacked(made, gathered_rows(made, shards), [per_rank * 3, 2], [(per_rank * 4, 3), (4, 2)])
    made.loss(made.call(aten.slice.Tensor, full[0], 0, 0, kept), full[1])
    reading = made.read()
    assert reading.problems == ()
    assert reading.buckets[0].fqns == ("a", "b")


GRADIENTS = {"a": (4, 3), "b": (5,), "c": (1, 2), "d": (8, 2)}


def pad(made: Handmade, node: fx.Node) -> fx.Node:
    shape = node.meta["val"].shape
    rows = -(-shape[0] // made.ranks) * made.ranks
    return made.call(aten.constant_pad_nd.default, node, [0, 0] * (len(shape) - 1) + [0, rows - shape[0]])


def reduced_by_chunk_cat(made: Handmade, gradients: Sequence[fx.Node]) -> fx.Node:
    return made.reduced(made.call(aten._chunk_cat.default, list(gradients), 0, made.ranks))


def reduced_by_cat(made: Handmade, gradients: Sequence[fx.Node]) -> fx.Node:
    rows = [made.call(aten.view.default, pad(made, gradient), [made.ranks, -1]) for gradient in gradients]
    return made.reduced(flat(made, made.call(aten.cat.default, rows, 1)))


def with_gradients(reduce: Callable[..., fx.Node], ranks: int) -> Handmade:
    made = Handmade(ranks)
    gradients = [made.compute(made.batch(*shape)) for shape in GRADIENTS.values()]
    arrived = flat(made, reduce(made, gradients))
    shapes = {fqn: (-(-shape[0] // ranks), *shape[1:]) for fqn, shape in GRADIENTS.items()}
    split = made.call(aten.split_with_sizes.default, arrived, [torch.Size(shape).numel() for shape in shapes.values()])
    for i, (fqn, shape) in enumerate(shapes.items()):
        made.returns(made.call(aten.view.default, made.part(split, i), list(shape)), fqn=fqn)
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunk_cat_of_uneven_gradients_is_followed(ranks: int) -> None:
    reading = with_gradients(reduced_by_chunk_cat, ranks).read()
    assert reading.problems == ()
    (bucket,) = reading.buckets
    pieces = [-(-shape[0] // ranks) * (shape[1] if len(shape) > 1 else 1) for shape in GRADIENTS.values()]
    assert [(m.fqn, m.numel) for m in bucket.members] == list(zip(GRADIENTS, pieces, strict=True))
    assert (bucket.op, bucket.numel) == ("avg", sum(pieces) * ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_padded_gradients_side_by_side_are_followed(ranks: int) -> None:
    reading = with_gradients(reduced_by_cat, ranks).read()
    assert reading.problems == ()
    assert reading.buckets[0].fqns == tuple(GRADIENTS)


def test_gradients_behind_each_other_instead_of_side_by_side_are_a_problem() -> None:
    def reduce(made: Handmade, gradients: Sequence[fx.Node]) -> fx.Node:
        return made.reduced(made.call(aten.cat.default, [flat(made, pad(made, gradient)) for gradient in gradients]))

    reading = with_gradients(reduce, 4).read()
    assert any("does not send each rank the same piece of every gradient" in problem for problem in reading.problems)


def test_a_gradient_of_which_a_part_is_never_sent_is_a_problem() -> None:
    made = Handmade()
    half = made.call(aten.slice.Tensor, made.compute(made.batch(8, 3)), 0, 0, 4)
    made.returns(made.reduced(half), fqn="a")
    assert any("does not send each rank the same piece of every gradient" in problem for problem in made.read().problems)


def test_precision_is_that_of_the_narrowest_cast_on_the_way() -> None:
    made = Handmade()
    a, b, c = (made.param(fqn, 2, 2) for fqn in "abc")
    narrow = made.call(aten._to_copy.default, made.call(aten._to_copy.default, b, dtype=torch.bfloat16), dtype=torch.float32)
    squeezed = made.call(torch.ops.prims.convert_element_type.default, c, torch.float16)
    wide = made.call(aten._to_copy.default, squeezed, dtype=torch.float32)
    full = unpacked(made, gathered_rows(made, [a, narrow, wide]), [4, 4, 4], [(4, 2)] * 3)
    made.loss(*full)
    assert [m.precision for m in made.read().buckets[0].members] == [23, 7, 10]


def test_elements_seen_as_others_of_the_same_size_are_followed() -> None:
    made = Handmade()
    bits = made.gather(made.call(aten.view.dtype, made.param("a", 2, 2), torch.int32))
    made.loss(made.call(aten.view.dtype, made.wait(bits), torch.float32))
    reading = made.read()
    assert reading.problems == ()
    assert reading.buckets[0].fqns == ("a",)


def test_a_buffer_written_again_holds_what_was_written_last() -> None:
    made = Handmade()
    a, b = made.param("a", 4), made.param("b", 4)
    buffer = made.call(aten.empty.memory_format, [4], dtype=torch.float32, device="cpu")
    made.call(aten.copy_.default, buffer, a)
    first = made.gathered(buffer)
    made.call(aten.copy_.default, buffer, b)
    made.loss(first, made.gathered(buffer))
    assert [bucket.fqns for bucket in made.read().buckets] == [("a",), ("b",)]


def test_a_parameter_overwritten_before_its_launch_is_no_parameter() -> None:
    made = Handmade()
    a = made.param("a", 4)
    packed = made.call(aten.clone.default, a)
    made.call(aten.mul_.Tensor, packed, 2)
    made.loss(made.gathered(packed))
    reading = made.read()
    assert reading.buckets[0].fqns == ("",)
    assert any("mul_" in problem and " a," in problem for problem in reading.problems)


def test_bytes_that_nothing_defined_are_a_problem() -> None:
    made = Handmade()
    a = made.param("a", 4)
    buffer = made.call(aten.empty.memory_format, [6], dtype=torch.float32, device="cpu")
    made.call(aten.copy_.default, made.call(aten.slice.Tensor, buffer, 0, 0, 4), a)
    made.loss(made.gathered(buffer))
    assert any("sends 2 elements at offset 4 that nothing defined" in problem for problem in made.read().problems)


def test_a_graph_without_fake_values_is_an_error_that_says_so() -> None:
    made = Handmade()
    made.loss(made.gathered(made.param("a", 4)))
    for node in made.finish().nodes:
        node.meta = {}
    with pytest.raises(PassError, match="carries no fake value"):
        made.read()
