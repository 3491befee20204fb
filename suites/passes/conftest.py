"""Warm ranks for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_fxbucket.ranks.pools import Pools


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Pools whose fork server has imported what the jobs need."""
    made = Pools(warm=("suites.passes.rank_jobs_of_passes",))
    made.start()
    yield made
    made.close()
