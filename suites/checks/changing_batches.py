"""Batches that change from the second step on, when all that capture looks at is over."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from suites.checks.bitwise_models import batch


def wider(rank: int, step: int) -> Any:
    (x,) = batch(rank, step)
    return (x.double() if step == 2 else x,)


def on_one_rank(rank: int, step: int) -> Any:
    (x,) = batch(rank, step)
    return (x[:1],) if rank == 1 and step == 0 else (x,)


def skips(rank: int, step: int) -> Any:
    return pytest.skip("not here") if step == 2 else batch(rank, step)


def ends(rank: int, step: int) -> Any:
    return sys.exit(0) if step == 2 else batch(rank, step)
