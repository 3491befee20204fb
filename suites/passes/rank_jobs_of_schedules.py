"""Runs in the ranks: schedules by seconds that every rank measures for itself."""

from __future__ import annotations

import random

from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from pytest_fxbucket.errors import PassError
from pytest_fxbucket.fuzz.program import COLUMNS, Program, aten
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.passes import schedule_overlap_bucketing


def branches(deeper: bool = False) -> fx.GraphModule:
    """Sixteen gathers that do not need each other, each in front of compute of its own."""
    made = Program(4)
    square = made.given("square", COLUMNS, COLUMNS)
    found = []
    for number in range(16):
        gathered = made.gather(made.given(f"w{number}", 2, COLUMNS))
        found.append(made.call(aten.mm.default, gathered, square))
    if deeper:
        found.append(made.neg(found[-1]))
    total = found[0]
    for other in found[1:]:
        total = made.call(aten.add.Tensor, total, other)
    return made.returns(total)


def order_by(seed: int) -> list[str]:
    """Launches and compute in the order that they are put in by seconds that ``seed`` gives."""
    chance, gm = random.Random(seed), branches()
    schedule_overlap_bucketing(
        gm, custom_runtime_estimation=lambda *_: chance.uniform(0.1, 5.0), max_memory_increase_ratio=None
    )
    return [node.name for node in gm.graph.nodes if launch_kind(node) or "mm" in node.name]


def scheduled(rank: int, world: int, _: None) -> list[str]:
    """The order on this rank, which measures other seconds than all others."""
    return order_by(rank)


def over_groups_of_other_names(rank: int, world: int, _: None) -> int:
    """How many launches are left where each two ranks have a group of their own, which they call otherwise than others."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group().group_name
    made = Program(2)
    total = made.given("x", 8, COLUMNS)
    for number in range(4):
        total = made.call(aten.mul.Tensor, total, made.gather(made.given(f"w{number}", 4, COLUMNS), group))
    gm = made.returns(total)
    options = {"collective_bucketing": True, "max_memory_increase_ratio": None, "max_memory_increase_gb": None}
    schedule_overlap_bucketing(gm, custom_runtime_estimation=lambda *_: 1.0, **options)
    return sum(launch_kind(node) is not None for node in gm.graph.nodes)


def of_other_graphs(rank: int, world: int, _: None) -> str:
    """What a rank is told whose graph is not that of the others."""
    try:
        schedule_overlap_bucketing(branches(deeper=rank == 1), custom_runtime_estimation=lambda *_: 1.0)
    except PassError as error:
        return str(error)
    return ""
