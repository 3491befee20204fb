"""``capture_step(parallel=...)``: a step of one's own is parted, and trains as if its user had parted it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from torch import nn

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.train_step import capture_step
from suites.train_step.parallel_jobs import WAYS

ROOT, JOBS = Path(__file__).resolve().parents[2], "suites.train_step.parallel_jobs"


@pytest.mark.parametrize("name", WAYS)
def test_a_step_that_is_parted_trains_as_one_parted_by_hand(pools: Pools, name: str) -> None:
    world = math.prod(WAYS[name][2] or (2,))
    found = pools.get(world).run(f"{JOBS}:train", [{"name": name}] * world, timeout_s=120, paths=[str(ROOT)])
    assert found == [0 if name == "replicate" else 28] * world


def test_state_that_an_optimizer_has_already_is_parted(pools: Pools) -> None:
    assert pools.get(4).run(f"{JOBS}:begun", [None] * 4, timeout_s=120, paths=[str(ROOT)]) == [42] * 4


@pytest.mark.parametrize("job", ["sent_into_views", "under_two_names"])
def test_parameters_that_lie_or_are_named_oddly_are_the_users_all_the_same(pools: Pools, job: str) -> None:
    assert pools.get(2).run(f"{JOBS}:{job}", [None] * 2, timeout_s=120, paths=[str(ROOT)]) == [True, True]


def test_what_cannot_be_parted_is_said_in_a_sentence(pools: Pools) -> None:
    every = pools.get(4).run(f"{JOBS}:refusals", [None] * 4, timeout_s=120, paths=[str(ROOT)])
    assert every == [every[0]] * 4
    assert every[0].pop("sent").startswith("gave ")  # all ranks the same
    failed = every[0].pop("half-way")
    assert failed.startswith("parallel raising failed at ")
    assert failed.endswith('ValueError: no such layer; the model is parted by "fully_shard" already, make it anew')
    failed = every[0].pop("half of the first")
    assert failed.endswith("ValueError: no such layer; the model is parted in part already, make it anew")
    assert every[0].pop("nothing yet").endswith("ValueError: no such layer")
    assert every[0].pop("other names").endswith("ValueError: no such layer")
    assert every[0] == {
        "too many": "the step takes (x), and is called otherwise: too many positional arguments",
        "unknown keyword": "the step takes (x), and is called otherwise: got an unexpected keyword argument 'y'",
        "ranks that differ": "rank 1 begins with another parameter 0.weight than rank 0; seed all ranks alike, or give "
        "sync=True, which sends what rank 0 has",
        "a layer more": "rank 1 has another model than rank 0, first at 1.weight; build the same one on all ranks",
        "a layer less": "rank 1 has another model than rank 0, first at 1.weight; build the same one on all ranks",
        "unknown": 'parallel is "fsdp"; known are fully_shard, hybrid_shard, replicate, modules for tp, and callables',
        "mesh": 'parallel = "fully_shard" takes a mesh of 1 dimensions beside tp, and this one has 2',
        "no mesh": 'parallel = "hybrid_shard" needs a mesh of two dimensions, copies first',
        "no parallel": "mesh is given without parallel, which says what is done on it",
        "not divided": "argument x of shape (6, 4) cannot be parted over 4 ranks along dimension 0; give batch_dim its own "
        'dimension, or None if all ranks take all of it: batch_dim={"x": None}',
        "no argument": 'batch_dim has "y", and the step has no argument of that name',
        "module": 'parallel has "1", and the model has no module of that name',
        "less": "parallel leaves the model without its parameter 0.weight; wrap and shard modules, and keep the names of their "
        "parameters",
        "style": 'parallel has "0" = "diagonal"; known are colwise, rowwise and ParallelStyle objects',
        "other model": "parallel refusals.<locals>.<lambda> gave another module, where the model itself is to be parted",
        "no DeviceMesh": "mesh is a value of type list, expected a torch.distributed.device_mesh.DeviceMesh",
    }


def test_without_a_process_group_there_is_nothing_to_part_over() -> None:
    with pytest.raises(CaptureError, match=r"there is no process group; call torch\.distributed\.init_process_group first"):
        capture_step(print, model=nn.Linear(2, 2), parallel="fully_shard")
