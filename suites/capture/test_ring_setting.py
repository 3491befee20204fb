"""Ranks that are threads of one process share torch's setting for ring attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pytest_fxbucket.compat import context_parallel


@pytest.fixture
def setting() -> Iterator[Callable[[], tuple[Any, Any]]]:
    options = context_parallel._attention._cp_options
    before = vars(options).copy()
    yield lambda: (options.enable_load_balance, options.rotate_method)
    vars(options).update(before)


def test_the_setting_stays_until_the_last_rank_is_out(setting: Callable[[], tuple[Any, Any]]) -> None:
    before = setting()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(context_parallel._from_neighbour_to_neighbour())
        ring = setting()
        assert ring != before
        second.enter_context(context_parallel._from_neighbour_to_neighbour())
        first.close()
        assert setting() == ring
        second.close()
        assert setting() == before
