"""Launches of every kind are followed: sums, coalesced ones, those into buffers, and launches of what another one brought."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem

import pytest
import torch
from torch import fx

from pytest_fxbucket.graph.buckets import GraphAnalysis
from suites.graph.handmade import GROUP, RANKS, Handmade, aten, c10d

OTHER = "1"


def gradient(made: Handmade, *shape: int) -> fx.Node:
    return made.compute(made.batch(*shape))


def kinds_and_names(reading: GraphAnalysis) -> list[tuple[str, tuple[str, ...]]]:
    assert reading.problems == ()
    return [(bucket.kind, bucket.fqns) for bucket in reading.buckets]


def cut(made: Handmade, arrived: fx.Node, fqns: str, sizes: Sequence[int]) -> None:
    pieces = made.call(aten.split_with_sizes.default, made.call(aten.view.default, arrived, [-1]), list(sizes))
    for i, fqn in enumerate(fqns):
        made.returns(made.part(pieces, i), fqn=fqn)


def test_gradients_that_are_summed_have_their_names() -> None:
    """As DDP does it."""
    made = Handmade()
    made.returns(made.summed(gradient(made, 4, 2)), fqn="a")
    reading = made.read()
    assert kinds_and_names(reading) == [("all_reduce", ("a",))]
    (bucket,) = reading.buckets
    assert (bucket.numel, bucket.bytes, bucket.parts, bucket.op) == (8, 32, 1, "sum")
    assert [(direction, fqn) for _, direction, fqn in reading.computes] == [("backward", "a")]


def test_a_bucket_of_summed_gradients_is_followed_and_swapped_members_show() -> None:
    for fqns in ("ab", "ba"):
        made = Handmade()
        packed = made.call(aten.flatten_dense_tensors.default, [gradient(made, 4, 2), gradient(made, 8)])
        cut(made, made.summed(packed), fqns, [8, 8])
        reading = made.read()
        assert kinds_and_names(reading) == [("all_reduce", tuple(fqns))]
        assert [(m.offset, m.numel) for m in reading.buckets[0].members] == [(0, 8), (32, 8)]


def test_members_of_two_dtypes_are_packed_in_the_one_that_torch_promotes_them_to() -> None:
    made = Handmade()
    shards = [made.param("a", 4, dtype=torch.bfloat16), made.param("b", 4)]
    made.loss(made.gathered(made.call(aten.flatten_dense_tensors.default, shards)))
    (bucket,) = made.read().buckets
    assert (bucket.dtype, bucket.bytes) == (torch.float32, 64)


def test_a_wrong_split_of_summed_gradients_is_a_problem() -> None:
    made = Handmade()
    packed = made.call(aten.flatten_dense_tensors.default, [gradient(made, 4, 2), gradient(made, 6)])
    cut(made, made.summed(packed), "ab", [7, 7])
    assert any("is not one whole piece of a reduction" in problem for problem in made.read().problems)


@pytest.mark.parametrize("first", ["reduce_scatter", "all_reduce"])
def test_a_gradient_that_is_reduced_twice_has_its_name_in_both(first: str) -> None:
    """Hybrid sharding, either way."""
    made = Handmade()
    value = gradient(made, 4, 2)
    if first == "all_reduce":
        made.returns(made.reduced(made.summed(value, OTHER)), fqn="a")
    else:
        made.returns(made.summed(made.reduced(value), OTHER), fqn="a")
    reading = made.read()
    assert sorted(kinds_and_names(reading)) == [("all_reduce", ("a",)), ("reduce_scatter", ("a",))]
    early, late = reading.buckets
    assert early.kind == first
    assert early.first_use == late.launch, "what is sent on is used then"
    assert late.first_use == reading.last
    assert [fqn for _, _, fqn in reading.computes] == ["a"]


def test_a_piece_that_is_scattered_again_has_its_name_in_both() -> None:
    made = Handmade()
    made.returns(made.reduced(made.reduced(gradient(made, 8, 2))), fqn="a")
    assert kinds_and_names(made.read()) == [("reduce_scatter", ("a",)), ("reduce_scatter", ("a",))]


def test_a_sum_of_activations_has_no_name_and_is_no_problem() -> None:
    made = Handmade()
    x = made.summed(made.call(aten.mm.default, made.batch(2, 4), made.gathered(made.param("a", 2, 2))))
    made.loss(made.call(aten.mul.Tensor, x, 2))
    assert kinds_and_names(made.read()) == [("all_gather", ("a",)), ("all_reduce", ("",))]


def test_a_sum_in_place_is_followed() -> None:
    made = Handmade()
    value = made.call(aten.clone.default, gradient(made, 4))
    made.returns(made.wait(made.call(c10d.all_reduce_.default, value, "sum", GROUP)), fqn="a")
    reading = made.read()
    assert kinds_and_names(reading) == [("all_reduce", ("a",))]
    assert "is not merged" in reading.buckets[0].unmergeable


COALESCED = {
    "all_gather": c10d.all_gather_into_tensor_coalesced.default,
    "reduce_scatter": c10d.reduce_scatter_tensor_coalesced.default,
    "all_reduce": c10d.all_reduce_coalesced.default,
}


def coalesced(made: Handmade, kind: str, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    args = {"all_gather": (RANKS, GROUP), "reduce_scatter": ("avg", RANKS, GROUP), "all_reduce": ("avg", GROUP)}[kind]
    launch = made.call(COALESCED[kind], list(nodes), *args)
    return [made.wait(made.part(launch, i)) for i in range(len(nodes))]


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_coalesced_reductions_are_followed(kind: str) -> None:
    made = Handmade()
    for fqn, node in zip("ab", coalesced(made, kind, [gradient(made, 4, 2), gradient(made, 6)]), strict=True):
        made.returns(node, fqn=fqn)
    reading = made.read()
    assert kinds_and_names(reading) == [(kind, ("a", "b"))]
    (bucket,) = reading.buckets
    part = 2 if kind == "reduce_scatter" else 1
    assert (bucket.dtype, bucket.numel, bucket.bytes) == (torch.float32, 14, 56)
    assert [(m.offset, m.numel) for m in bucket.members] == [(0, 8 // part), (32 // part, 6 // part)]


def test_coalesced_gathers_of_several_dtypes_are_followed_and_swapped_results_show() -> None:
    for order in ((0, 1), (1, 0)):
        made = Handmade()
        shards = [made.param("a", 2, 2), made.param("b", 3, dtype=torch.bfloat16)]
        whole = coalesced(made, "all_gather", shards)
        made.loss(*(whole[i] for i in order))
        reading = made.read()
        assert kinds_and_names(reading) == [("all_gather", ("a", "b"))]
        (bucket,) = reading.buckets
        assert (bucket.dtype, bucket.bytes, [m.dtype for m in bucket.members]) == (
            None,
            2 * (16 + 6),
            [torch.float32, torch.bfloat16],
        )
        assert [fqn for _, _, fqn in reading.computes] == ["ab"[i] for i in order]


def test_a_gather_of_a_gather_is_named_by_the_parameter_in_both() -> None:
    """Sharded over two groups; the inner launch is used when the outer one is launched."""
    made = Handmade()
    inner = made.gathered(made.param("a", 2, 3))
    made.loss(made.wait(made.gather(inner, 3, OTHER)))
    reading = made.read()
    assert kinds_and_names(reading) == [("all_gather", ("a",)), ("all_gather", ("a",))]
    first, second = reading.buckets
    assert (first.numel, second.numel, second.parts) == (12, 36, 3)
    assert first.first_use == second.launch
    assert first.members[0].last_use == second.launch
    assert [fqn for _, _, fqn in reading.computes] == ["a"]


def test_a_gather_of_a_gather_may_be_nested_the_other_way_but_not_jumbled() -> None:
    made = Handmade()
    both = made.wait(made.gather(made.gathered(made.param("a", 1, 3)), 3, OTHER))
    turned = made.call(aten.permute.default, made.call(aten.view.default, both, [3, 2, 3]), [1, 0, 2])
    made.loss(made.call(aten.reshape.default, turned, [6, 3]))
    assert [kind for kind, _ in kinds_and_names(made.read())] == ["all_gather", "all_gather"]
    made = Handmade()
    both = made.wait(made.gather(made.gathered(made.param("a", 1, 3)), 3, OTHER))
    rows = [made.call(aten.slice.Tensor, both, 0, i, i + 1) for i in (0, 1, 3, 2, 4, 5)]
    made.loss(made.call(aten.cat.default, rows))
    assert any("reads gathered bytes that are no parameter in its order: a" in problem for problem in made.read().problems)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_launches_into_buffers_are_followed_and_told_apart_if_the_buffer_is_used_elsewhere(elsewhere: bool) -> None:
    made = Handmade()
    buffer = made.call(aten.empty.memory_format, [4, 2], dtype=torch.float32, device="cpu")
    launch = made.call(c10d.all_gather_into_tensor_out.default, made.param("a", 2, 2), RANKS, GROUP, out=buffer)
    whole = made.wait(launch)
    made.loss(buffer if elsewhere else whole)
    piece = made.call(aten.empty.memory_format, [2, 2], dtype=torch.float32, device="cpu")
    scattered = made.call(c10d.reduce_scatter_tensor_out.default, gradient(made, 4, 2), "avg", RANKS, GROUP, out=piece)
    made.returns(made.wait(scattered), fqn="a")
    reading = made.read()
    assert kinds_and_names(reading) == [("all_gather", ("a",)), ("reduce_scatter", ("a",))]
    assert reading.buckets[0].unmergeable == ("its buffer is used elsewhere" if elsewhere else "")


@pytest.mark.parametrize(("written", "why"), [(0, "what it sends is written before its wait"), (1, "")])
def test_what_is_written_while_it_is_sent_is_told_apart(written: int, why: str) -> None:
    """And what is written beside it is not."""
    made = Handmade()
    cut = made.call(aten.split.Tensor, made.call(aten.clone.default, made.param("a", 4, 2)), 2)
    parts = [made.call(getitem, cut, number) for number in range(2)]
    launch = made.gather(parts[0])
    made.call(aten.zero_.default, parts[written])
    made.loss(made.wait(launch))
    assert made.read().buckets[0].unmergeable == why


def test_a_group_of_one_rank_is_told_apart() -> None:
    made = Handmade(ranks=1)
    made.loss(made.gathered(made.param("a", 2, 2)))
    assert made.read().buckets[0].unmergeable == "its group has one rank"


def test_a_parameter_of_a_symbolic_size_is_a_sentence_and_a_batch_of_one_is_nothing() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for symbolic in ("a", "x"):
        made = Handmade()
        made.mode.shape_env = ShapeEnv()
        size = made.mode.from_tensor(torch.empty(2, 3), static_shapes=False)
        a = made.param("a", 2, 3)
        x = made.batch(2, 3)
        (a if symbolic == "a" else x).meta["val"] = size
        full = made.gathered(a)
        made.loss(full, made.gathered(made.call(aten.neg.default, x)))
        problems = made.read().problems
        if symbolic == "a":
            (problem,) = problems
            assert "carries a of a symbolic size (s" in problem
            assert problem.endswith("trace the step with sizes that are numbers")
        else:
            assert problems == ()


def test_what_a_launch_needs_keeps_it_from_going_further_up() -> None:
    made = Handmade()
    a, b = made.param("a", 2, 2), made.param("b", 2, 2)
    first = made.gathered(a)
    made.loss(first)
    made.loss(made.gathered(made.call(aten._to_copy.default, b, dtype=torch.bfloat16)), made.gathered(first))
    reading = made.read()
    plain, cast, chained = reading.buckets
    assert (plain.blocked, cast.blocked, chained.blocked) == (-1, -1, plain.wait)
    assert (plain.needed, cast.needed) == (chained.launch, None)


def test_a_padded_gradient_is_named_and_made_where_it_is_padded() -> None:
    made = Handmade(ranks=4)
    padded = made.call(aten.constant_pad_nd.default, gradient(made, 5, 2), [0, 0, 0, 3])
    made.returns(made.reduced(padded), fqn="a")
    reading = made.read()
    assert kinds_and_names(reading) == [("reduce_scatter", ("a",))]
    assert [where for where, _, _ in reading.computes] == [list(made.graph.nodes).index(padded)]


def test_a_pad_of_bytes_that_cuts_is_followed_and_one_on_a_gathered_parameter_is_the_models_own() -> None:
    made = Handmade()
    longer = made.call(aten.constant_pad_nd.default, made.param("a", 2, 3, dtype=torch.uint8), [1, 1])
    made.loss(made.gathered(made.call(aten.constant_pad_nd.default, longer, [-1, -1])))
    assert kinds_and_names(made.read()) == [("all_gather", ("a",))]
    for dtype in (torch.uint8, torch.float32):
        made = Handmade()
        made.loss(made.call(aten.constant_pad_nd.default, made.gathered(made.param("a", 2, 3, dtype=dtype)), [0, 1]))
        reading = made.read()
        assert kinds_and_names(reading) == [("all_gather", ("a",))]
        assert [fqn for _, _, fqn in reading.computes] == ["a"]
