"""Compiled training on two ranks: with the pass and without, every loss, gradient and parameter is the same bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.compiled import train
from pytest_fxbucket.ranks.pools import Pools
from suites.compiled.rank_jobs_of_compiled import CASES

JOBS = "suites.compiled.rank_jobs_of_compiled"


@pytest.fixture(autouse=True)
def no_cache_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take their environment from here, job by job."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def run(pools: Pools, job: str, payload: Any) -> list[Any]:
    return list(pools.get(2).run(f"{JOBS}:{job}", [payload] * 2, timeout_s=400))


def test_ranks_are_forked_with_what_a_first_compilation_makes(pools: Pools) -> None:
    """What it raises is left for a rank whose job imports it, and none does."""
    module = "suites.compiled.compiled_once"
    assert pools.get(2).run("suites.ranks.jobs:is_loaded", [module] * 2, timeout_s=60) == [True, True]


def test_the_pass_changes_no_bit_of_training(pools: Pools) -> None:
    cases = [case for case in CASES if case != "by size"]  # which is trained under inductor below
    assert run(pools, "differing", {"cases": cases, "inductor": False}) == [{case: [] for case in cases}] * 2


def test_the_pass_changes_no_bit_of_training_of_several_graphs_under_inductor(pools: Pools) -> None:
    """By the job of ``make gpu``, which says so too where inductor compiled nothing."""
    assert pools.get(2).run("suites.gpu.step_jobs:compiled", [("by size", False)] * 2, timeout_s=400) == [[]] * 2


def test_ranks_with_padded_rows_and_ranks_without_launch_the_same(pools: Pools) -> None:
    """Of 4 rows the ranks have 2, 2 and 0, of 16 words 6, 6 and 4: DTensor pads where there are too few."""
    first, *others = pools.get(3).run(f"{JOBS}:uneven", [4] * 3, timeout_s=400)
    assert others == [first] * 2
    assert first["changed"] == []
    assert first["reports"] == ["5 to 3"] * 2
    assert len(first["launches"]) == 3 + 3


def test_the_example_of_the_docs_gives_the_same_losses_in_fewer_launches(pools: Pools) -> None:
    """Without inductor, which takes a minute for it: it trains a smaller net above, and compiles one as the example does."""
    payload = {"ways": ["aot_eager", "backend"], "steps": 2, "shape": {**train.SHAPE, "layers": 1, "dim": 8}}
    ranks = list(train.on_ranks(payload, pools, timeout_s=400))
    assert train.differing(ranks, "backend") == []
    for rank in ranks:
        assert rank["backend"].launches < rank["aot_eager"].launches
    assert ranks[0]["backend"].losses != ranks[1]["backend"].losses  # other batches
    assert "equal bit for bit" in train.table(ranks)
