"""Graphs whose roles are told by placements: what becomes of them, what their ranks are given, what contradicts itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fixtures.models import placed
from pytest_fxbucket.capture.given_graphs import take_step
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema_bucket import Bucket
from pytest_fxbucket.plan.schema_model import Graph, Parallel
from pytest_fxbucket.step.mesh import fake_mesh, mesh_with, shard_mesh
from suites.capture.placed_graphs import WEIGHT, ids, joint, other_ranks, step_of, traced, two_by_two

ROOT = Path(__file__).resolve().parents[2]
(PLAN,) = load_plans(ROOT / "fixtures" / "plans" / "placed.toml")
MESH = mesh_with({"dp_shard": 2, "tp": 2})


@pytest.fixture
def rank_three() -> Iterator[None]:
    with fake_world(3, 4):
        yield


def test_a_step_of_dtensors_has_roles_shapes_and_the_meshs_own_groups() -> None:
    with fake_mesh(MESH, 3):
        step = take_step(placed.step(), PLAN, MESH, 3)
    assert [(v.role, v.fqn, v.shape) for v in step.inputs["joint"]][::3] == [
        ("param", "layers.0.up", (4, 8)),
        ("param", "layers.1.up", (4, 8)),
        ("batch", "x", (6, 8)),
    ]
    assert [(v.role, v.fqn) for v in step.outputs["joint"]][:2] == [("loss", ""), ("grad", "layers.0.up")]
    assert [(p.fqn, p.shape, p.shard_shape) for p in step.parameters][1] == ("layers.0.down", (16, 8), (8, 4))
    assert step.copies == {
        "": [[0, 1, 2, 3]],
        **{f"layers.{i}.bias": [[0, 1], [2, 3]] for i in (0, 1)},
        **{f"layers.{i}.{name}": [] for i in (0, 1) for name in ("up", "down")},
    }
    launches = filter(None, map(read_launch, step.graphs["joint"].graph.nodes))
    assert {launch.group for launch in launches} == {"mesh_dp_shard", "mesh_tp"}


def test_each_rank_is_given_its_part_of_the_whole() -> None:
    parts = []
    for rank in range(4):
        with fake_world(rank, 4):
            parts.append(step_of(two_by_two()).inputs["joint"][0])
    left, right = (torch.cat(parts[dp : dp + 2]) for dp in (0, 2))
    assert torch.cat([left, right], 1).equal(WEIGHT)


@pytest.mark.usefixtures("rank_three")
def test_a_dtensor_gives_its_own_part_and_one_without_values_is_drawn_alike() -> None:
    mesh = two_by_two()
    mine = distribute_tensor(WEIGHT, mesh, (Shard(1), Shard(0)), src_data_rank=None)
    spec = mine._spec
    own, drawn, again = (step_of(mesh, parameters={"weight": one}).inputs["joint"][0] for one in (mine, spec, spec))
    assert own.equal(WEIGHT[4:, 2:])
    assert drawn.equal(again)
    assert not drawn.equal(own)


@pytest.mark.usefixtures("rank_three")
def test_two_parameters_of_one_shape_are_drawn_otherwise() -> None:
    mesh = two_by_two()
    spec = distribute_tensor(WEIGHT, mesh, (Shard(1), Shard(0)), src_data_rank=None)._spec
    graph = traced(lambda a, b, x: [(a * b * x).sum(), b * x, a * x], (4, 2), (4, 2), (4, 2))
    step = step_of(mesh, graphs=graph, parameters={"layers.17.q.weight": spec, "layers.20.v.weight": spec})
    a, b, _ = step.inputs["joint"]
    assert not a.equal(b)


def test_a_graph_that_returns_lists_in_a_list_is_one_of_all_their_values(rank_three: None) -> None:
    graph = traced(lambda weight, x: [[(weight * x).sum()], [x * 2, None]], (4, 2), (4, 2))
    step = step_of(two_by_two(), graphs=graph, outputs={"joint": ["loss", "weight", None]})
    assert step.roles["joint"]["outputs"] == ["loss", "grad", "value"]
    assert len(step.graphs["joint"](*step.inputs["joint"])) == 3


WHERE = (Shard(1), Shard(0))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another local size": (
        {"parameters": {"weight": (WEIGHT, (Shard(0), Replicate()))}},
        "'weight' is [8, 4], placed (S(0), R), of which this rank has [4, 4], but the joint graph takes [4, 2]",
    ),
    "a gradient of another size": (
        {"graphs": traced(lambda weight, x: [(weight * x).sum(), x.sum(0)], (4, 2), (4, 2))},
        "'weight' is placed (S(1), S(0)), of which this rank has [4, 2], but the joint graph gives a gradient of [2]; "
        "is it reduced, and parted as its parameter is?",
    ),
    "a name of no parameter": (
        {"inputs": {"joint": ["wieght", "x"]}},
        "the joint graph takes 'wieght', which is no parameter, no buffer, nothing of the batch and nothing that a graph "
        'before it gives; did you mean "weight"?',
    ),
    "a gradient of no parameter": (
        {"outputs": {"joint": ["loss", "wieght"]}},
        "the joint graph gives 'wieght', which is neither a parameter, whose gradient it would be, nor \"loss\"; "
        'did you mean "weight"?',
    ),
    "a mesh dimension that is not there": (
        {"parameters": {"weight": (WEIGHT, (*WHERE, Replicate()))}},
        "'weight' has 3 placements, and the mesh the dimensions dp, tp; give one for each",
    ),
    "a part of a sum": (
        {"parameters": {"weight": (WEIGHT, (Partial(), Shard(0)))}},
        "'weight' is Partial on dp, and what a graph is given must be Shard or Replicate",
    ),
    "no placements": (
        {"parameters": {"weight": WEIGHT}},
        "'weight' is a value of type Tensor, expected a DTensor, a DTensorSpec or a tuple (whole tensor, placements)",
    ),
    "numbers that cannot be drawn": (
        {"graphs": ids(), "batch": {"x": (torch.empty(8, 2, device="meta"), (Shard(0), Replicate()))}},
        "the joint graph takes 'x' in int64, of which no values can be drawn; give (whole tensor, placements), or a DTensor "
        "with values",
    ),
    "too few names": (
        {"batch": {}},
        "the joint graph takes 2 values, but 1 names are known for them; say them in inputs['joint']",
    ),
    "a graph of no known name": ({"graphs": {"jiont": joint()}}, "there is no graph 'jiont'; did you mean \"joint\"?"),
    "names of no graph": ({"outputs": {"reduce": ["weight"]}}, "'reduce' has names of what it takes or gives, but no graph"),
}


@pytest.mark.parametrize(("changed", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_contradicts_itself_is_refused_in_one_sentence(changed: Any, said: str, rank_three: None) -> None:
    with pytest.raises(CaptureError) as caught:
        step_of(two_by_two(), **changed)
    assert str(caught.value) == f"placed_step: {said}"


def test_a_dtensor_on_another_mesh_is_refused(rank_three: None) -> None:
    mesh, other = two_by_two(), two_by_two()["tp"]
    weight = DTensor.from_local(torch.ones(4, 2), other, (Shard(0),))
    with pytest.raises(CaptureError, match=r"'weight' is placed on DeviceMesh\(\(tp=2\).*, and the step on DeviceMesh\(\(dp=2"):
        step_of(mesh, parameters={"weight": weight})


def test_a_mesh_that_is_not_the_plans_is_refused_with_both() -> None:
    with fake_mesh(MESH, 1), pytest.raises(CaptureError) as caught:
        take_step(other_ranks(), PLAN, MESH, 1)
    assert str(caught.value) == (
        "[graph] factory fixtures.models.placed:step: joint graph launches all_reduce (all_reduce) on ranks 1, 2, which are "
        "along no dimension of [parallel]'s mesh (dp_shard = 2, tp = 2); let both meshes have the same sizes in the same order"
    )


def test_a_mesh_of_other_sizes_is_refused_though_nothing_is_launched_on_it() -> None:
    with fake_mesh(shard_mesh(4), 0), pytest.raises(CaptureError) as caught:
        take_step(step_of(two_by_two()), PLAN, shard_mesh(4), 0)
    assert str(caught.value) == (
        "[graph] factory fixtures.models.placed:step: dimension dp of its mesh has ranks 0, 2, which are along no dimension of "
        "[parallel]'s mesh (dp_shard = 4); let both meshes have the same sizes in the same order"
    )


def test_a_copy_whose_gradient_nothing_reduces_fails_bitwise(checked: Callable[..., Verdict]) -> None:
    plan = replace(
        PLAN,
        graph=Graph("suites.capture.placed_graphs:unreduced"),
        parallel=Parallel(dp_shard=2),
        bucket=Bucket(by="size"),
        run=replace(PLAN.run, world={}),
    )
    verdict = checked(plan, "bitwise")
    assert verdict.outcome == "failed"
    assert verdict.lines == (
        "ranks 0 and 1 hold copies of weight, which differ after the last step: their gradients were not reduced alike",
        "ranks 0 and 1 have other losses, which by its placements are the same",
    )
