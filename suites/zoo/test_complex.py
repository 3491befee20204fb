"""Complex parameters keep their dtype beside real ones that are cast, and audit expects that."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.ranks.pools import Pools
from suites.zoo.odd_parameters import SHELF
from suites.zoo.visit import visit


@pytest.mark.parametrize("row", ["fp32", "bf16"])
def test_a_fourier_filter_is_gathered_and_reduced_whole(row: str, pools: Pools, tmp_path: Path) -> None:
    outcome = visit(SHELF.complex_parameter, row, pools, tmp_path, items=("audit",))
    assert (outcome.kind, outcome.nearness) == ("green", 0.0), outcome.said
