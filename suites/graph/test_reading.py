"""What is read off a graph, and what is said of a graph that is jumbled: a name for each thing that cannot be told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from operator import getitem
from pathlib import Path

import pytest
import torch
from torch import fx

from pytest_fxbucket.capture.from_plan import capture_plan
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.manual import manual_overlap_bucketing
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.schema_model import Model, Parallel
from pytest_fxbucket.step.mesh import shard_mesh
from pytest_fxbucket.step.roles import StepGraph
from suites.graph.handmade import GROUP, Handmade, aten, c10d, gathered_rows, unpacked

MODULES = ["tok_embeddings", "layers.0", ["norm", "output"]]


@torch.library.custom_op("suite::pack", mutates_args=())
def pack(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


@pack.register_fake
def _(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts))


@torch.library.custom_op("suite::unpack", mutates_args=())
def unpack(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [piece.clone() for piece in torch.split(rows, sizes, -1)]


@unpack.register_fake
def _(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [rows.new_empty((*rows.shape[:-1], size)) for size in sizes]


suite = torch.ops.suite


@pytest.fixture(scope="module")
def llama() -> StepGraph:
    args = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1}
    model = Model("fixtures.models.llama:build", "fixtures.models.llama:batch", args, "fixtures.models.llama:loss")
    return capture_plan(Plan(Path("plan.toml"), model=model, parallel=Parallel(dp_shard=4)), shard_mesh(4), 0)


def copied(step: StepGraph) -> fx.GraphModule:
    graph_module = step.graphs["joint"]
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph)


def read(step: StepGraph, graph: fx.Graph) -> GraphAnalysis:
    return read_graph(graph, step.inputs["joint"], step.outputs["joint"])


def ours(step: StepGraph) -> fx.GraphModule:
    with fake_world(0, 4):
        return manual_overlap_bucketing(copied(step), MODULES)


def torchs(step: StepGraph, mode: str | None, rank: int = 1) -> fx.GraphModule:
    """torch's own pass, its estimate of a roofline (which needs triton) taken out."""
    from unittest import mock

    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing as torch_pass

    with fake_world(rank, 4), mock.patch("torch.utils._runtime_estimation.get_transfer_time", return_value=0.0):
        return torch_pass(copied(step), MODULES, bucket_mode=mode)


def test_the_captured_llama_has_a_launch_for_each_read_of_a_parameter(llama: StepGraph) -> None:
    reading = read(llama, llama.graphs["joint"].graph)
    everything = {parameter.fqn for parameter in llama.parameters}
    assert reading.problems == ()
    assert {len(bucket.members) for bucket in reading.buckets} == {1}
    kinds: dict[tuple[str, str], set[str]] = {}
    for bucket in reading.buckets:
        kinds.setdefault((bucket.direction, bucket.kind), set()).update(bucket.fqns)
    assert kinds == {
        ("forward", "all_gather"): everything,
        ("backward", "all_gather"): everything - {"tok_embeddings.weight"},
        ("backward", "reduce_scatter"): everything,
    }
    for bucket in reading.buckets:
        assert bucket.launch < (bucket.wait or 0) < (bucket.first_use or 0)
        assert (bucket.backward_use is not None) == (bucket.direction == "backward")


@pytest.mark.parametrize("mode", [None, "default"])  # None means "custom_ops"
def test_torchs_own_pass_is_followed_and_seen_to_merge_forward_with_backward_gathers(
    llama: StepGraph, mode: str | None
) -> None:
    reading = read(llama, torchs(llama, mode).graph)
    assert reading.problems == ()
    everything = [parameter.fqn for parameter in llama.parameters]
    gathers = [b for b in reading.buckets if b.kind == "all_gather"]
    assert [(b.direction, b.backward_use is not None) for b in gathers] == [("forward", False), *[("forward", True)] * 2]
    assert Counter(fqn for b in gathers for fqn in b.fqns) == {fqn: 1 + (fqn != "tok_embeddings.weight") for fqn in everything}
    reductions = [b for b in reading.buckets if b.kind == "reduce_scatter"]
    assert sorted(fqn for b in reductions for fqn in b.fqns) == sorted(everything)
    assert [len(b.members) for b in reductions] == [2, 9, 1]
    before = read(llama, llama.graphs["joint"].graph)
    assert Counter(fqn for _, _, fqn in reading.computes) == Counter(fqn for _, _, fqn in before.computes)


def test_a_rank_that_packs_into_the_part_of_another_is_a_problem(llama: StepGraph) -> None:
    """Baking in the rank goes wrong when a graph is made on one rank and run on another."""
    graph = torchs(llama, None, rank=1).graph
    node = next(n for n in graph.nodes if "_pre_bucket_all_gather" in str(n.target))
    node.args = (*node.args[:4], 2, *node.args[5:])
    assert any("sends 1024 elements at offset 0 that nothing defined" in problem for problem in read(llama, graph).problems)


def test_torchs_coalesced_launches_are_followed(llama: StepGraph) -> None:
    reading = read(llama, torchs(llama, "coalesced").graph)
    assert reading.problems == ()
    reductions = [b for b in reading.buckets if b.kind == "reduce_scatter"]
    assert [len(b.members) for b in reductions] == [2, 9, 1]
    whole = read(llama, torchs(llama, None).graph)
    assert sorted(b.bytes for b in reading.buckets) == sorted(b.bytes for b in whole.buckets)
    assert readers_of(reading) == readers_of(whole)


def _swap(values: list[fx.Node], i: int, j: int) -> list[fx.Node]:
    values[i], values[j] = values[j], values[i]
    return values


def swap_in_pack(graph: fx.Graph) -> None:
    gathers = [n for n in graph.nodes if launch_kind(n) == "all_gather"]
    node = next(source for n in gathers for source in n.all_input_nodes if source.target is aten.cat.default)
    node.args = (_swap(list(node.args[0]), 1, 2), *node.args[1:])


def swap_in_unpack(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if n.target is aten.split_with_sizes.default)
    first, second = (next(u for u in node.users if u.args[1] == i) for i in (1, 2))
    first.args, second.args = (node, 2), (node, 1)


def readers_of(reading: GraphAnalysis) -> list[str]:
    return [fqn for _, _, fqn in reading.computes]


@pytest.mark.parametrize("swap", [swap_in_pack, swap_in_unpack])
def test_members_swapped_on_one_side_show_in_what_compute_reads(llama: StepGraph, swap: Callable[[fx.Graph], None]) -> None:
    graph = ours(llama).graph
    good = readers_of(read(llama, graph))
    swap(graph)
    bad = readers_of(read(llama, graph))
    assert bad != good
    wk, wv = "layers.0.attention.wk.weight", "layers.0.attention.wv.weight"
    assert (good.index(wk) < good.index(wv)) != (bad.index(wk) < bad.index(wv))


def test_members_swapped_on_both_sides_show_in_the_byte_layout_alone(llama: StepGraph) -> None:
    graph = ours(llama).graph
    before = read(llama, graph)
    swap_in_pack(graph)
    swap_in_unpack(graph)
    after = read(llama, graph)
    assert (after.problems, readers_of(after)) == ((), readers_of(before))
    changed = [(x.fqns, y.fqns) for x, y in zip(before.buckets, after.buckets, strict=True) if x.fqns != y.fqns]
    ((old, new),) = changed
    assert (new[1], new[2]) == (old[2], old[1])


def test_gradients_returned_for_the_wrong_parameter_show_in_the_layout(llama: StepGraph) -> None:
    graph = ours(llama).graph
    before = read(llama, graph)
    values = _swap(list(graph.output_node().args[0]), 2, 3)
    graph.output_node().args = (values,)
    assert [b.fqns for b in read(llama, graph).buckets] != [b.fqns for b in before.buckets]


def test_node_names_and_metadata_change_nothing_that_is_read(llama: StepGraph) -> None:
    graph = ours(llama).graph
    before = read(llama, graph)
    for i, node in enumerate(graph.nodes):
        node.name = f"n{i}"
        node.meta = {"val": node.meta.get("val")}
    after = read(llama, graph)
    # The module names activations for people, and comes from the tracer's marks.
    strip = [{**{f: getattr(b, f) for f in Bucket.__slots__}, "node": "", "module": ""} for b in before.buckets]
    assert [{**{f: getattr(b, f) for f in Bucket.__slots__}, "node": "", "module": ""} for b in after.buckets] == strip
    assert (after.computes, after.problems) == (before.computes, before.problems)


def two_gathered(made: Handmade) -> Iterator[fx.Node]:
    shards = [made.param("a", 2, 2), made.param("b", 2, 2)]
    yield from unpacked(made, gathered_rows(made, shards), [4, 4], [(4, 2), (4, 2)])


def test_half_a_shard_in_a_launch_is_a_problem_that_names_it() -> None:
    made = Handmade()
    half = made.call(aten.slice.Tensor, made.param("a", 4, 2), 0, 0, 2)
    made.loss(made.gathered(half))
    assert made.read().problems[0].endswith("gathers 4 of the 8 elements of a's shard")


def test_readers_of_ranks_in_another_order_are_a_problem_that_names_operator_and_parameter() -> None:
    made = Handmade()
    a, _ = two_gathered(made)
    rows = made.call(aten.view.default, a, [2, 4])
    turned = made.call(aten.cat.default, [made.call(aten.slice.Tensor, rows, 0, i, i + 1) for i in (1, 0)])
    made.loss(made.call(aten.view.default, turned, [4, 2]))
    (problem,) = made.read().problems
    assert problem == "aten.neg.default (neg_default) reads gathered bytes that are no parameter in its order: a"


def test_a_bucket_read_as_one_whole_is_a_problem_that_names_its_members() -> None:
    made = Handmade()
    made.loss(gathered_rows(made, [made.param("a", 2, 2), made.param("b", 2, 2)]))
    (problem,) = made.read().problems
    assert problem.endswith("reads gathered bytes that are no parameter in its order: a, b")


def test_an_unknown_operator_that_unpacks_a_gather_is_named() -> None:
    made = Handmade()
    rows = gathered_rows(made, [made.param("a", 2, 2), made.param("b", 2, 2)])
    pieces = made.call(suite.unpack.default, rows, [4, 4])
    made.loss(made.part(pieces, 0), made.part(pieces, 1))
    assert made.read().problems == (
        "suite.unpack.default (unpack_default) reads gathered bytes that are no parameter in its order: a, b",
    )


def test_an_unknown_operator_that_packs_parameters_is_named() -> None:
    made = Handmade()
    packed = made.call(suite.pack.default, [made.param("a", 2, 2), made.param("b", 2, 2)])
    made.loss(made.gathered(packed))
    (problem,) = made.read().problems
    assert "gathers what suite.pack.default (pack_default) made of a, b, an operator that is not followed" in problem


def test_a_gather_of_activations_is_no_problem() -> None:
    made = Handmade()
    a = made.param("a", 2, 2)
    made.loss(made.gathered(made.call(aten.mm.default, made.batch(2, 2), a)))
    reading = made.read()
    assert reading.problems == ()
    assert reading.buckets[0].fqns == ("",)


def gradients(made: Handmade) -> list[fx.Node]:
    return [made.compute(made.batch(4, 2)) for _ in range(2)]


def test_an_unknown_operator_that_packs_gradients_is_named() -> None:
    made = Handmade()
    packed = made.call(suite.pack.default, gradients(made))
    pieces = made.call(aten.split_with_sizes.default, made.reduced(packed), [4, 4])
    for i, fqn in enumerate("ab"):
        made.returns(made.part(pieces, i), fqn=fqn)
    problems = made.read().problems
    assert len(problems) == 2
    assert "the gradient returned for a is not one whole piece of a reduction" in problems[0]
    assert problems[0].endswith("from what was reduced of suite.pack.default (pack_default)")


def test_an_unknown_operator_that_unpacks_gradients_is_named() -> None:
    made = Handmade()
    flat = made.call(aten.view.default, made.reduced(made.call(aten._chunk_cat.default, gradients(made), 0, 2)), [-1])
    pieces = made.call(suite.unpack.default, flat, [4, 4])
    for i, fqn in enumerate("ab"):
        made.returns(made.part(pieces, i), fqn=fqn)
    problems = made.read().problems
    assert len(problems) == 2
    assert "returned for b is not one whole piece of a reduction, but made by" in problems[1]
    assert "neg.default" in problems[1]


def test_a_gradient_added_of_two_reductions_names_both() -> None:
    """A layer that is used twice."""
    made = Handmade()
    first, second = (made.reduced(gradient) for gradient in gradients(made))
    made.returns(made.call(aten.add.Tensor, made.call(aten.mul.Tensor, first, 0.5), second), fqn="a")
    reading = made.read()
    assert reading.problems == ()
    assert [b.fqns for b in reading.buckets] == [("a",), ("a",)]


def joined_by_cat(made: Handmade, first: fx.Node, second: fx.Node) -> fx.Node:
    return made.call(aten.sum.dim_IntList, made.call(aten.stack.default, [first, second]), [0])


def added_in_part(made: Handmade, first: fx.Node, second: fx.Node) -> fx.Node:
    half = made.call(aten.slice.Tensor, second, 0, 0, 1)
    return made.call(aten.add.Tensor, first, half)


@pytest.mark.parametrize("join", [joined_by_cat, added_in_part])
def test_a_gradient_of_two_reductions_that_is_no_sum_of_both_is_a_problem_and_never_half_checked(
    join: Callable[..., fx.Node],
) -> None:
    made = Handmade()
    made.returns(join(made, *(made.reduced(gradient) for gradient in gradients(made))), fqn="a")
    (problem,) = made.read().problems
    assert "the gradient returned for a is not one whole piece of a reduction, but made by aten." in problem


def test_a_gradient_that_is_scaled_after_its_reduction_keeps_its_name() -> None:
    made = Handmade()
    scale = made.given("buffer", "scale", 1)
    for fqn, gradient in zip("ab", gradients(made), strict=True):
        made.returns(made.call(aten.mul.Tensor, made.call(aten.mul.Tensor, made.reduced(gradient), 0.5), scale), fqn=fqn)
    reading = made.read()
    assert reading.problems == ()
    assert [b.fqns for b in reading.buckets] == [("a",), ("b",)]


def test_a_gradient_without_a_reduction_is_no_problem() -> None:
    made = Handmade()
    first, second = gradients(made)
    made.returns(made.reduced(first), fqn="a")
    scattered = made.reduced(second)  # activations, as sequence parallelism scatters them
    made.returns(made.call(aten.mul.Tensor, scattered, made.gathered(made.param("c", 1, 2))), fqn="b")
    reading = made.read()
    assert reading.problems == ()
    assert [b.fqns for b in reading.buckets if b.kind == "reduce_scatter"] == [("a",), ("",)]


def test_direction_is_where_a_gather_is_read() -> None:
    made = Handmade()
    a, b = made.param("a", 2, 2), made.param("b", 2, 2)
    early = made.gather(b)  # launched in forward, read in backward only
    loss = made.loss(made.gathered(a))
    unread = made.gathered(a)
    made.returns(made.reduced(made.call(aten.mul.Tensor, made.wait(early), loss)), fqn="b")
    assert unread.users == {}
    directions = [(bucket.kind, bucket.fqns, bucket.direction) for bucket in made.read().buckets]
    assert directions == [
        ("all_gather", ("b",), "backward"),
        ("all_gather", ("a",), "forward"),
        ("all_gather", ("a",), "backward"),
        ("reduce_scatter", ("b",), "backward"),
    ]


def test_a_launch_that_is_not_followed_still_has_its_direction() -> None:
    made = Handmade()
    made.loss(made.wait(made.call(c10d.broadcast.default, made.gathered(made.param("a", 2, 2)), 0, GROUP)))
    reading = made.read()
    assert [(bucket.kind, bucket.direction) for bucket in reading.buckets] == [
        ("all_gather", "forward"),
        ("broadcast", "forward"),
    ]


def test_a_launch_that_nobody_waits_for_has_no_wait() -> None:
    made = Handmade()
    made.loss(made.gather(made.param("a", 2, 2)))
    (bucket,) = made.read().buckets
    assert bucket.wait is None


@pytest.mark.parametrize("drop", ["inputs", "outputs"])
def test_roles_that_do_not_match_the_graph_are_an_error(drop: str) -> None:
    made = Handmade()
    made.loss(made.gathered(made.param("a", 2, 2)))
    getattr(made, drop).clear()
    with pytest.raises((PassError, ValueError)):
        made.read()


def test_getitem_of_anything_is_data_movement_but_launches_nothing() -> None:
    made = Handmade()
    node = made.call(aten.split_with_sizes.default, made.batch(4, 2), [2, 2])
    assert launch_kind(made.call(getitem, node, 0)) is None


def test_products_of_activations_are_known_by_the_last_parameter_read_on_the_way_to_them() -> None:
    """By data alone: a pass may have taken all metadata from the graph."""
    made = Handmade()
    first, second = (made.gathered(made.param(name, 2, 4)) for name in ("a.w", "b.w"))
    x = made.call(aten.mm.default, made.batch(3, 4), made.call(aten.t.default, first))
    weights = made.call(aten.mm.default, x, made.call(aten.t.default, x))
    mixed = made.call(aten.mm.default, made.call(aten.neg.default, weights), x)
    made.loss(made.call(aten.mm.default, mixed, second))
    made.call(aten.mm.default, *(made.batch(2, 2) for _ in range(2)))
    reading = made.read()
    names = [node.name for node in made.graph.nodes]
    assert [(names[at], direction, fqn) for at, direction, fqn in reading.products] == [
        (weights.name, "forward", "a.w"),
        (mixed.name, "forward", "a.w"),
    ]
