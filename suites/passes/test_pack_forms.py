"""Each form of pack brings what the launches it replaces brought: values, dtype, shape and strides, on all ranks."""

from __future__ import annotations

from operator import getitem

import pytest
import torch
from torch import fx

from pytest_fxbucket.compat.fake_tensors import storage_key
from pytest_fxbucket.fuzz.lockstep import Env
from pytest_fxbucket.fuzz.program import Program, aten
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.merge import build
from suites.passes.packing import assert_same, packed, targets

RANKS = 3
FORMS = ("gather", "reduce", "all_reduce")


def returning(made: Program, *nodes: fx.Node) -> fx.Graph:
    """Waits as they come, read by compute too."""
    return made.returns(*nodes, *(made.call(aten.clone.default, node) for node in nodes)).graph


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float64])
def test_members_of_any_one_dtype_arrive(form: str, dtype: torch.dtype) -> None:
    made = Program(RANKS)
    shapes = [(RANKS, 3), (2 * RANKS,), (RANKS, 1, 5)]
    tensors = [made.given(f"p{i}", *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    assert_same(returning(made, *made.together(form, tensors)), RANKS)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_tensors_of_coalesced_launches_arrive(kind: str) -> None:
    """The fake value of a coalesced all-reduce of a transposed tensor has strides that no result has."""
    made = Program(RANKS)
    tensors = [made.given(f"p{i}", RANKS * (i + 1), 3) for i in range(4)]
    tensors[1] = made.call(aten.t.default, made.given("q", 3, RANKS))
    waits = [*made.coalesced(kind, tensors[:2]), *made.coalesced(kind, tensors[2:])]
    after, built, _ = assert_same(returning(made, *waits), RANKS)
    assert len(built.results) == 4
    assert all(result.meta["val"].is_contiguous() for result in built.results)
    assert sum(collectives.launch_kind(node) is not None for node in after.nodes) == 1


def test_gathers_into_a_buffer_of_their_own_need_no_buffer() -> None:
    made = Program(RANKS)
    waits = [made.gather_into(p, made.buffer_for(p)) for p in made.shards("pq")]
    after, _, _ = assert_same(returning(made, *waits), RANKS)
    assert not [node for node in after.nodes if node.target == aten.empty.memory_format]


@pytest.mark.parametrize("form", ["gather", "all_reduce"])
def test_a_single_tensor_is_copied_so_that_a_later_write_does_not_reach_what_is_sent(form: str) -> None:
    made = Program(2)
    after, built, env = assert_same(returning(made, *made.together(form, made.shards("p"))), 2)
    (p,) = after.find_nodes(op="placeholder")
    sent = built.launch.args[0]
    assert storage_key(env[sent][0]) != storage_key(env[p][0])
    assert storage_key(sent.meta["val"]) != storage_key(p.meta["val"])


SEVERAL = (
    (torch.bfloat16, (1, 3)),
    (torch.float32, (5,)),
    (torch.int64, (3, 1)),
    (torch.bool, (1, 7)),
    (torch.float8_e4m3fn, (3,)),
    (torch.float32, (0, 4)),
    (torch.uint8, (5,)),
    (torch.bfloat16, (1,)),
    (torch.float64, (1, 3)),
    (torch.complex64, (1,)),
    (torch.int8, (2, 0)),
)


def of_several_dtypes(made: Program) -> list[fx.Node]:
    return [made.given(f"p{i}", *shape, dtype=dtype) for i, (dtype, shape) in enumerate(SEVERAL)]


def test_members_of_several_dtypes_arrive_each_in_its_own() -> None:
    made = Program(RANKS)
    after, built, _ = assert_same(returning(made, *made.together("gather", of_several_dtypes(made))), RANKS)
    assert built.launch.meta["val"].dtype == torch.uint8
    assert [node.target for node in after.nodes].count(torch.ops._c10d_functional.all_gather_into_tensor.default) == 1


def test_strided_members_of_several_dtypes_arrive() -> None:
    made = Program(RANKS)
    p, q = made.given("p", 3, 5, dtype=torch.bfloat16), made.given("q", 7, 4)
    views = [
        made.call(aten.t.default, p),
        made.call(aten.slice.Tensor, q, 0, 1, 7, 2),
        made.call(aten.expand.default, made.given("r", 1, dtype=torch.int64), [3]),
    ]
    assert_same(returning(made, *made.together("gather", views)), RANKS)


def test_each_member_of_several_dtypes_begins_aligned_to_the_largest() -> None:
    made = Program(2)
    after, _, _ = assert_same(returning(made, *made.together("gather", of_several_dtypes(made))), 2)
    (split,) = (node for node in after.nodes if node.target == aten.split_with_sizes.default)
    sizes = split.args[1]
    used = {node.args[1] for node in split.users if node.target is getitem}
    begins = [sum(sizes[:i]) for i in range(len(sizes)) if i in used]
    assert [begin % 8 for begin in begins] == [0] * len(SEVERAL)
    assert sum(sizes) % 8 == 0


@pytest.mark.parametrize("several", [False, True])
def test_an_all_gather_packs_no_more_for_more_ranks(several: bool) -> None:
    """What is made before the launch grows with the members, not with members x ranks."""

    def made_before_launch(ranks: int) -> int:
        made = Program(ranks)
        shards = of_several_dtypes(made) if several else made.shards("pqrst", 64, 3)
        built = packed(returning(made, *made.together("gather", shards)), ranks)
        storages = {
            storage_key(v): v.untyped_storage().nbytes() for n in built.pack if isinstance(v := n.meta["val"], torch.Tensor)
        }
        return sum(storages.values())

    assert made_before_launch(2) == made_before_launch(64)


def test_a_pack_makes_one_copy_of_its_members() -> None:
    made = Program(4)
    shards = made.shards("pqrst", 64, 3)
    built = packed(returning(made, *made.together("gather", shards)), 4)
    storages = {storage_key(node.meta["val"]): node.meta["val"].untyped_storage().nbytes() for node in built.pack}
    for shard in shards:  # seen flat
        storages.pop(storage_key(shard.meta["val"]))
    assert sum(storages.values()) == 5 * 64 * 3 * 4


@pytest.mark.parametrize("form", [*FORMS, "several"])
def test_fake_values_say_what_the_nodes_hold(form: str) -> None:
    """Shape, dtype, strides and offset; and between pack and between unpack nodes, who shares a storage."""
    made = Program(2)
    if form == "several":
        tensors, form = of_several_dtypes(made), "gather"
    else:
        tensors = [made.given(f"p{i}", *shape) for i, shape in enumerate([(2, 5), (2, 3), (4,)])]
    after, built, env = assert_same(returning(made, *made.together(form, tensors)), 2)
    for node in (*built.pack, built.launch, built.waits[0], *built.unpack):
        for fake, real in zip(collectives.tensors(node.meta["val"]), collectives.tensors(env[node][0]), strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride()), node
            if node not in built.results:
                assert fake.storage_offset() == real.storage_offset(), node
    for nodes in (
        built.pack,
        [node for node in (built.waits[0], *built.unpack) if form == "gather" or node not in built.results],
    ):
        assert _sharing(nodes, None) == _sharing(nodes, env)
    makers = [node for node in after.nodes if node.target is not getitem]  # that gives the very tensor which a list holds
    objects = [id(value) for node in makers for value in collectives.tensors(node.meta.get("val"))]
    assert len(objects) == len(set(objects))


def _sharing(nodes: list[fx.Node] | tuple[fx.Node, ...], env: Env | None) -> list[list[str]]:
    storages: dict[int, list[str]] = {}
    for node in nodes:
        for i, tensor in enumerate(collectives.tensors(node.meta["val"] if env is None else env[node][0])):
            if tensor.numel():
                storages.setdefault(storage_key(tensor), []).append(f"{node.name} {i}")
    return sorted(storages.values())


def test_a_merged_node_says_its_entry_and_sources_and_the_modules_of_all_members() -> None:
    made = Program(2)
    made.backward = True
    graph = returning(made, *made.together("reduce", made.fulls("xy")))
    members = targets(graph, 2, "backward")
    with graph.inserting_before(graph.output_node()):
        built = build(graph, members, foldable=lambda cast: True)
    for node in (*built.pack, built.launch, built.waits[0], *built.unpack):
        assert [source.name for source in node.meta["from_node"]] == [member.launch.name for member in members]
        stacks = [member.launch.meta["fwd_nn_module_stack"] for member in members]
        assert {key: node.meta[key] for key in node.meta if key not in ("val", "from_node")} == {
            "fwd_nn_module_stack": stacks[0],
            "bucketing_fwd_nn_module_stack_sources": stacks,
            "fxbucket_entry": "a",
            "fxbucket_sources": ("p0", "p1"),
            "fxbucket_launches": tuple(member.launch.name for member in members),
            "autograd_backward": True,
        }
