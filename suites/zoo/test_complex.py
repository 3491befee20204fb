"""Complex parameters are reduced in their own dtype beside real ones that are cast, and audit expects that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_fxbucket.ranks.pools import Pools
from suites.zoo.odd_parameters import SHELF
from suites.zoo.visit import RANKS, visit


def test_gradients_of_a_fourier_filter_are_reduced_whole(pools: Pools, tmp_path: Path) -> None:
    """In a real reduce_dtype half of each would be lost."""
    parallel = {"dp_shard": RANKS, "reduce_dtype": "float32"}
    model = replace(SHELF.complex_parameter, tables={"parallel": parallel})
    outcome = visit(model, "fp32", pools, tmp_path, items=("audit",))
    assert (outcome.kind, outcome.nearness) == ("green", 0.0), outcome.said
