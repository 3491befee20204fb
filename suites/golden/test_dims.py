"""Process groups are named by mesh dimensions: the same words on every rank that is in a group of that kind."""

from __future__ import annotations

import pytest

from pytest_fxbucket.step.mesh import Mesh, dims_text
from pytest_fxbucket.step.roles import MeshDim

MESH = (MeshDim("dp_replicate", 2), MeshDim("dp_shard", 4), MeshDim("tp", 2))


@pytest.mark.parametrize(
    ("groups", "name"),
    [
        ([(0, 1), (6, 7), (14, 15)], "tp"),
        ([(0, 2, 4, 6), (9, 11, 13, 15)], "dp_shard"),
        ([(0, 8), (7, 15)], "dp_replicate"),
        ([tuple(range(8)), tuple(range(8, 16))], "dp_shard x tp"),
        ([(0, 1, 8, 9), (6, 7, 14, 15)], "dp_replicate x tp"),
        ([tuple(range(16))], "dp_replicate x dp_shard x tp"),
        ([(0, 2), (4, 6), (13, 15)], "2 ranks 2 apart"),
        ([(0, 3, 4), (8, 11, 12)], "ranks +0 +3 +4"),
        ([(5,), (0,)], "1 rank"),
        ([(0, 16)], "2 ranks 16 apart"),
    ],
)
def test_a_group_has_one_name_on_all_ranks(groups: list[tuple[int, ...]], name: str) -> None:
    assert {dims_text(ranks, MESH) for ranks in groups} == {name}


def test_a_dimension_of_one_rank_is_spanned_by_no_group() -> None:
    mesh = (MeshDim("dp_replicate", 1), MeshDim("dp_shard", 4))
    assert dims_text((0, 1, 2, 3), mesh) == "dp_shard"


@pytest.mark.parametrize(
    ("rank", "ranks", "first"),
    [(9, (9, 11, 13, 15), (0, 2, 4, 6)), (7, (6, 7, 14, 15), (0, 1, 8, 9)), (5, (5,), (0,)), (3, (1, 3), (0, 2))],
)
def test_a_group_is_moved_to_the_place_of_another_rank_and_back(
    rank: int, ranks: tuple[int, ...], first: tuple[int, ...]
) -> None:
    mesh = Mesh(MESH)
    assert mesh.seen_by(0, ranks) == first
    assert mesh.seen_by(rank, first) == ranks
