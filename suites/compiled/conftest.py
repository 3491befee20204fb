from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.ranks.pools import Pools


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    """This process is rank 0 of 2; dynamo has compiled nothing yet."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with fake_world(0, 2):
        yield


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    made = Pools(warm=("suites.compiled.compiled_once", "torch._dynamo.backends.common"))
    yield made
    made.close()
